"""Tokenizer that splits a bash script into words and operators, without running or expanding anything.

A word is a sequence of parts: literal text, variables, arithmetic, and expansions that only a shell can evaluate. Each
part has its line number. Here-documents, redirections and comments are skipped.

Source of the grammar: the Bash Reference Manual 5.2, sections 3.1.2 (quoting), 3.5 (expansions) and 6.7 (arrays).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NESTING = 20
"""Largest depth of defaults within defaults that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Literal:
    """Literal text.

    Attributes:
        text: Text without its quotes.
        line: Line number in the script.
        quoted: Whether the text was quoted or escaped.
    """

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """Expansion of a variable: `$NAME`, `${NAME}`, `${NAME[@]}` or `${NAME:-default}`.

    Attributes:
        name: Name of the variable, or a positional or special parameter such as 1, @ or #.
        source: Source text of the expansion.
        line: Line number in the script.
        quoted: Whether the expansion is in double quotes.
        all_elements: Whether the expansion means all elements of an array.
        operator: Operator `:-`, `-`, `:=`, `=`, `:+` or `+`; empty if there is none.
        other: Parts of the word after the operator.
    """

    name: str
    source: str
    line: int
    quoted: bool
    all_elements: bool = False
    operator: str = ""
    other: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Arithmetic expansion `$((...))`."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """Expansion that only a shell can evaluate, such as the output of a command, or one of an unsupported kind."""

    source: str
    line: int
    quoted: bool


Part = Literal | Variable | Arithmetic | Unreadable


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """Word of a script. In `NAME=(a b)` the parts are `NAME=`, and `array` contains a and b."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def bare(self) -> str | None:
        """Text of the word if the whole word is literal and unquoted, otherwise None."""
        if self.array is None and all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Operator between commands: a line break, `;`, `&`, `&&`, `|`, `||`, `(` or `)`."""

    text: str
    line: int


_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(:?[-=+])?", re.S)
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATORS = ";&|()"


def cut(text: str, line: int = 1) -> Iterator[Word | Operator]:
    """Split a script, whose first line has this number, into words and operators, in their order."""
    reader = _Reader(text.replace("\r\n", "\n"), line)
    while (token := reader.token()) is not None:
        yield token


class _Reader:
    """Position in the text, with methods that read from there on."""

    def __init__(self, text: str, line: int, depth: int = 0) -> None:
        self.text, self.at, self.line, self.depth = text, 0, line, depth
        self.documents: list[str] = []  # delimiters of the here-documents that begin after this line

    def peek(self, count: int = 1) -> str:
        """Return the next characters without advancing."""
        return self.text[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        """Return the next characters and advance behind them."""
        taken = self.peek(count)
        self.at += count
        self.line += taken.count("\n")
        return taken

    def token(self) -> Word | Operator | None:
        """Read the next word or operator. Return None at the end."""
        while self.at < len(self.text):
            self._skip_blanks()
            char, line = self.peek(), self.line
            if char == "#":
                self._skip_comment()
            elif char == "\n":
                self.take()
                self._skip_documents()
                return Operator(text="\n", line=line)
            elif self.peek(2) == "((":
                # An arithmetic command: its effect on variables is not followed.
                source = self._balanced("(", ")")
                return Word(parts=(Unreadable(source=source, line=line, quoted=False),), line=line)
            elif char in "<>" or self.peek(2) == "&>":
                self._skip_redirection()
            elif char and char in _OPERATORS:
                two = self.peek(2)
                return Operator(text=self.take(2 if two in ("&&", "||", ";;") else 1), line=line)
            elif char:
                word = self.word()
                if word.bare and word.bare.isdigit() and self.peek() in ("<", ">"):
                    continue  # the file descriptor of a redirection
                return word
        return None

    def word(self) -> Word:
        """Read the word that begins here."""
        parts: list[Part] = []
        line = self.line
        while self.at < len(self.text):
            char = self.peek()
            if char.isspace() or char in "<>":
                break
            if char == "(" and self._is_assignment(parts):
                return Word(parts=_join_literals(parts), line=line, array=self._array())
            if char in _OPERATORS:
                break
            if self.peek(2) == "\\\n":
                self.take(2)
            elif char == "\\":
                self.take()
                parts.append(Literal(text=self.take(), line=self.line, quoted=True))
            elif char == "'":
                parts += self._single_quoted()
            elif char == '"':
                parts += self._double_quoted()
            elif char in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                begin = self.line
                parts.append(Literal(text=self.take(), line=begin, quoted=False))
        return Word(parts=_join_literals(parts), line=line)

    def _is_assignment(self, parts: list[Part]) -> bool:
        """Return whether the parts are `NAME=` or `NAME+=`, which an array may follow."""
        text = Word(parts=tuple(parts), line=self.line).bare
        return text is not None and _ASSIGNED.fullmatch(text) is not None

    def _array(self) -> tuple[Word, ...]:
        """Read the elements of an array up to the closing bracket."""
        self.take()
        words = []
        while self.at < len(self.text):
            self._skip_blanks()
            char = self.peek()
            if char == ")":
                self.take()
                break
            if char == "#":
                self._skip_comment()
            elif char == "\n" or (char and char in "<>;&|("):
                self.take()
            elif char:
                words.append(self.word())
        return tuple(words)

    def _single_quoted(self) -> list[Part]:
        """Read a text in single quotes."""
        self.take()
        end = self.text.find("'", self.at)
        parts = self._lines(self.take((end if end >= 0 else len(self.text)) - self.at))
        self.take()
        return parts

    def _lines(self, text: str) -> list[Part]:
        """Split quoted text, which was just read, into one part per line."""
        first = self.line - text.count("\n")
        return [
            Literal(text=line, line=first + number, quoted=True)
            for number, line in enumerate(text.splitlines(keepends=True) or [""])
        ]

    def _double_quoted(self) -> list[Part]:
        """Read a text in double quotes, in which expansions are recognised."""
        self.take()
        parts: list[Part] = [Literal(text="", line=self.line, quoted=True)]
        while self.at < len(self.text) and self.peek() != '"':
            parts += self._inside_quotes()
        self.take()
        return parts

    def _inside_quotes(self) -> list[Part]:
        """Read the next character, escape or expansion between double quotes."""
        if self.peek(2) == "\\\n":
            self.take(2)
            return []
        if self.peek() == "\\" and self.peek(2)[1:] in ('"', "$", "`", "\\"):
            self.take()
        elif self.peek() in "$`":
            return [self._expansion(quoted=True)]
        line = self.line
        return [Literal(text=self.take(), line=line, quoted=True)]

    def _expansion(self, *, quoted: bool) -> Part:
        """Read the expansion that begins with `$` or a backquote here."""
        line, begin = self.line, self.at
        if self.peek(3) == "$((":
            self.take()
            return Arithmetic(text=self._balanced("(", ")")[2:-2], line=line, quoted=quoted)
        if self.peek() == "`" or self.peek(2) == "$(":
            if self.take() == "$":
                self._balanced("(", ")")
            else:
                end = self.text.find("`", self.at)
                self.take((end if end >= 0 else len(self.text)) - self.at + 1)
            return Unreadable(source=self.text[begin : self.at], line=line, quoted=quoted)
        self.take()
        if self.peek() == "{":
            return self._parameter(self._balanced("{", "}"), line, quoted=quoted)
        found = _SIMPLE.match(self.text, self.at)
        if found is None:
            return Literal(text="$", line=line, quoted=quoted)
        self.take(len(found[0]))
        return Variable(name=found[0], source=f"${found[0]}", line=line, quoted=quoted)

    def _parameter(self, source: str, line: int, *, quoted: bool) -> Part:
        """Parse the expansion `${...}`, where `source` is its text with the braces."""
        inner = source[1:-1]
        found = _PARAMETER.match(inner)
        whole = f"${source}"
        if found is None or (found.end() < len(inner) and not found[3]) or self.depth >= MAX_NESTING:
            return Unreadable(source=whole, line=line, quoted=quoted)
        # The word after the operator has expansions of its own, in the quoting of the whole expansion.
        inside = _Reader(inner[found.end() :], line, self.depth + 1)
        other: list[Part] = []
        while inside.at < len(inside.text):
            if inside.peek() == '"':
                other += inside._double_quoted()
            elif inside.peek() == "'" and not quoted:
                other += inside._single_quoted()
            else:
                other += inside._inside_quotes()
        return Variable(
            name=found[1],
            source=whole,
            line=line,
            quoted=quoted,
            all_elements=found[2] is not None,
            operator=found[3] or "",
            other=_join_literals(other),
        )

    def _balanced(self, opening: str, closing: str) -> str:
        """Read from the opening bracket here to its closing bracket. Brackets in quotes and escapes do not count."""
        begin, depth, quote = self.at, 0, ""
        while self.at < len(self.text):
            char = self.take()
            if char == "\\" and quote != "'":
                self.take()
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if not depth:
                    break
        return self.text[begin : self.at]

    def _skip_blanks(self) -> None:
        """Skip blanks and continued lines."""
        while (char := self.peek()) and ((char.isspace() and char != "\n") or self.peek(2) == "\\\n"):
            self.take(1 if char != "\\" else 2)

    def _skip_comment(self) -> None:
        """Skip the rest of the line."""
        end = self.text.find("\n", self.at)
        self.at = end if end >= 0 else len(self.text)

    def _skip_redirection(self) -> None:
        """Skip a redirection and its target. The delimiter of a here-document is remembered."""
        if self.peek(2) in ("<(", ">("):
            self.take()
            self._balanced("(", ")")
            return
        operator = ""
        while self.peek() and self.peek() in "<>&|-":
            operator += self.take()
        self._skip_blanks()
        if self.peek() in ("", "\n", ";", ")"):
            return
        target = self.word()
        if operator.startswith("<<") and not operator.startswith("<<<"):
            self.documents.append("".join(part.text for part in target.parts if isinstance(part, Literal)))

    def _skip_documents(self) -> None:
        """Skip the here-documents that begin on this line."""
        for end in self.documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                row = self.take((stop + 1 if stop >= 0 else len(self.text)) - self.at)
                if row.strip() == end:
                    break
        self.documents = []


def _join_literals(parts: list[Part]) -> tuple[Part, ...]:
    """Join neighbouring literals that have the same line and the same quoting."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            isinstance(part, Literal)
            and isinstance(last, Literal)
            and (part.line, part.quoted) == (last.line, last.quoted)
        ):
            joined[-1] = Literal(text=last.text + part.text, line=part.line, quoted=part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
