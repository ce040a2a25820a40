"""Cuts the text of a bash script into words and operators, without running or expanding anything.

A word is a row of parts: literal text, variables, arithmetic, and what only a shell could tell. Each part knows its
line. Here-documents, redirections and comments are passed over.

Source of the grammar: the Bash Reference Manual 5.2, sections 3.1.2 (quoting), 3.5 (expansions) and 6.7 (arrays).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NESTING = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Literal:
    """Text that stands for itself."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """`$NAME`, `${NAME}`, `${NAME[@]}` or `${NAME:-default}`.

    Attributes:
        name: The variable, or a positional or special parameter such as 1, @ or #.
        source: As the script has it.
        line: Where it stands.
        quoted: Whether it stands in double quotes.
        all_elements: Whether it asks for all elements of an array.
        operator: Of `:-`, `-`, `:=`, `=`, `:+`, `+`, or empty.
        other: What stands behind the operator.
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
    """`$((...))`."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """What only a shell could tell: a command's output, or an expansion of a kind that is not read."""

    source: str
    line: int
    quoted: bool


Part = Literal | Variable | Arithmetic | Unreadable


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One word; in `NAME=(a b)` the parts are `NAME=` and `array` holds the others."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def bare(self) -> str | None:
        """Its text where it is literal and unquoted, else None."""
        if self.array is None and all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What separates commands: a line break, `;`, `&`, `&&`, `|`, `||`, `(` or `)`."""

    text: str
    line: int


_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(:?[-=+])?", re.S)
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATORS = ";&|()"


def cut(text: str) -> Iterator[Word | Operator]:
    """The words and operators of a script, in their order."""
    reader = _Reader(text.replace("\r\n", "\n"), 1)
    while (token := reader.token()) is not None:
        yield token


class _Reader:
    """A place in the text, and what is read from there on."""

    def __init__(self, text: str, line: int, depth: int = 0) -> None:
        self.text, self.at, self.line, self.depth = text, 0, line, depth
        self.documents: list[str] = []  # ends of here-documents that begin after this line

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        taken = self.peek(count)
        self.at += count
        self.line += taken.count("\n")
        return taken

    def token(self) -> Word | Operator | None:
        """The next word or operator; None at the end."""
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
                    continue  # the number of a file that is redirected
                return word
        return None

    def word(self) -> Word:
        """The word that begins here."""
        parts: list[Part] = []
        line = self.line
        while self.at < len(self.text):
            char = self.peek()
            if char.isspace() or char in "<>":
                break
            if char == "(" and self._is_assignment(parts):
                return Word(parts=_joined(parts), line=line, array=self._array())
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
        return Word(parts=_joined(parts), line=line)

    def _is_assignment(self, parts: list[Part]) -> bool:
        text = Word(parts=tuple(parts), line=self.line).bare
        return text is not None and _ASSIGNED.fullmatch(text) is not None

    def _array(self) -> tuple[Word, ...]:
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
        self.take()
        end = self.text.find("'", self.at)
        parts = self._lines(self.take((end if end >= 0 else len(self.text)) - self.at))
        self.take()
        return parts

    def _lines(self, text: str) -> list[Part]:
        """Quoted text, a part for each of its lines, where `self` stands behind it."""
        first = self.line - text.count("\n")
        return [
            Literal(text=line, line=first + number, quoted=True)
            for number, line in enumerate(text.splitlines(keepends=True) or [""])
        ]

    def _double_quoted(self) -> list[Part]:
        self.take()
        parts: list[Part] = [Literal(text="", line=self.line, quoted=True)]
        while self.at < len(self.text) and self.peek() != '"':
            parts += self._inside_quotes()
        self.take()
        return parts

    def _inside_quotes(self) -> list[Part]:
        """What stands next between double quotes."""
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
        """What `${...}` means; `source` has the braces."""
        inner = source[1:-1]
        found = _PARAMETER.match(inner)
        whole = f"${source}"
        if found is None or (found.end() < len(inner) and not found[3]) or self.depth >= MAX_NESTING:
            return Unreadable(source=whole, line=line, quoted=quoted)
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
            other=_joined(other),
        )

    def _balanced(self, opening: str, closing: str) -> str:
        """From the opening bracket that stands here to the one that closes it; quotes and escapes are heeded."""
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
        while (char := self.peek()) and ((char.isspace() and char != "\n") or self.peek(2) == "\\\n"):
            self.take(1 if char != "\\" else 2)

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = end if end >= 0 else len(self.text)

    def _skip_redirection(self) -> None:
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
        """Passes over the here-documents that begin on this line."""
        for end in self.documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                row = self.take((stop + 1 if stop >= 0 else len(self.text)) - self.at)
                if row.strip() == end:
                    break
        self.documents = []


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbouring literals of one line and one kind of quoting as one."""
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
