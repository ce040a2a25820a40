"""Tokenizer that splits a bash script into words and operators, without running or expanding anything.

A word is a sequence of parts: literal text, and expansions as they stand in the script. Each part has its line number.
Here-documents, redirections and comments are skipped.

Source of the grammar: the Bash Reference Manual 5.2, sections 3.1.2 (quoting), 3.5 (expansions) and 6.7 (arrays).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part of a word.

    Attributes:
        text: Literal text without its quotes, or the source text of an expansion.
        line: Line number in the script.
        quoted: Whether the part was quoted or escaped.
        expands: Whether the part is an expansion, such as `$NAME`, `${NAME:-default}`, `$((...))` or `$(command)`.
    """

    text: str
    line: int
    quoted: bool = False
    expands: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """Word of a script. In `NAME=(a b)` the parts are `NAME=`, and `array` contains a and b."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def bare(self) -> str:
        """Text of the word if the whole word is literal and unquoted, otherwise empty."""
        if self.array is not None or any(part.quoted or part.expands for part in self.parts):
            return ""
        return "".join(part.text for part in self.parts)


_BLANKS = re.compile(r"(?:[^\S\n]|\\\n)+")
_COMMENT = re.compile(r"#.*")
_REDIRECTION = re.compile(r"&>>?|[0-9]*(?:<<<|[<>]&|>>|<>|>\||[<>])")
_DOCUMENT = re.compile(r"[0-9]*<<-?[^\S\n]*[\"'\\]?(\w+)[\"']?")
_OPERATOR = re.compile(r"\n|&&|\|\||;;|[;&|()]")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>]+")
_CONTINUED = re.compile(r"\\\n")
_ESCAPED = re.compile(r"\\(.?)", re.S)
_SINGLE = re.compile(r"'([^']*)'?")
_IN_DOUBLE = re.compile(r"[^\"\\$`\n]*\n|[^\"\\$`\n]+")
_ESCAPED_IN_DOUBLE = re.compile(r"\\([\"$`\\]|)")
_IN_DEFAULT = re.compile(r"[^'\"\\$`\n]*\n|[^'\"\\$`\n]+")
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])?")
_BACKQUOTED = re.compile(r"`[^`]*`?")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")


def cut(text: str) -> Iterator[Word | str]:
    """Split a script into words, and the operators between commands, such as line breaks, `;` and `&&`."""
    reader = _Reader(text.replace("\r\n", "\n"), 1)
    while (token := reader.token()) is not None:
        yield token


def parts_of_default(text: str, line: int, *, quoted: bool) -> tuple[Part, ...]:
    """Split the text after the operator of `${NAME:-text}`, which begins on that line, into parts."""
    reader, parts = _Reader(text, line), list[Part]()
    while reader.at < len(text):
        parts += reader.parts(_IN_DOUBLE if quoted else _IN_DEFAULT, quoted=quoted) or []
    return tuple(parts)


class _Reader:
    """Position in the text, with methods that read from there on."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.documents: list[str] = []  # delimiters of the here-documents that begin after this line

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Advance behind the pattern, if the text here matches it with at least one character."""
        found = pattern.match(self.text, self.at)
        if found is None or not found[0]:
            return None
        self.at = found.end()
        self.line += found[0].count("\n")
        return found

    def token(self) -> Word | str | None:
        """Read the next word or operator. Return None at the end."""
        while self.at < len(self.text):
            if self.take(_BLANKS) or self.take(_COMMENT):
                continue
            line = self.line
            if self.text.startswith(("((", "<(", ">("), self.at):
                # An arithmetic command, or a file that is another command's output.
                part = Part(text=self._balanced("(", ")"), line=line, expands=True)
                return Word(parts=(part,), line=line)
            if found := self.take(_DOCUMENT):
                self.documents.append(found[1])
            elif self.take(_REDIRECTION):
                self.take(_BLANKS)
                self.word()  # its target
            elif found := self.take(_OPERATOR):
                for end in self.documents if found[0] == "\n" else ():
                    self.take(re.compile(rf".*?(?:^[ \t]*{end}[ \t]*(?:\n|\Z)|\Z)", re.S | re.M))
                self.documents = self.documents if found[0] != "\n" else []
                return found[0]
            else:
                return self.word()
        return None

    def word(self) -> Word:
        """Read the word that begins here."""
        read: list[Part] = []
        line = self.line
        while self.at < len(self.text):
            if (parts := self.parts(_PLAIN)) is not None:
                read += parts
            elif self.text[self.at] == "(" and _ASSIGNED.fullmatch(Word(parts=tuple(read), line=line).bare):
                return Word(parts=tuple(read), line=line, array=self._array())
            else:
                break
        return Word(parts=tuple(read), line=line)

    def parts(self, plain: re.Pattern[str], *, quoted: bool = False) -> list[Part] | None:
        """Read the next text, escape, quote or expansion; None at a character that begins none of them."""
        line = self.line
        if self.take(_CONTINUED):
            return []
        if found := self.take(plain):
            return [Part(text=found[0], line=line, quoted=quoted)]
        if found := self.take(_ESCAPED_IN_DOUBLE if quoted else _ESCAPED):
            # Between double quotes any other backslash stands for itself.
            return [Part(text=found[1] or found[0] if quoted else found[1], line=line, quoted=True)]
        if not quoted and (found := self.take(_SINGLE)):
            rows = found[1].splitlines(keepends=True) or [""]
            return [Part(text=row, line=line + number, quoted=True) for number, row in enumerate(rows)]
        return self._double_quoted() if self.text[self.at] == '"' else self._expansion(quoted=quoted)

    def _array(self) -> tuple[Word, ...]:
        """Read the elements of an array up to the closing bracket."""
        self.at += 1
        words = []
        while self.at < len(self.text):
            if self.take(_BLANKS) or self.take(_COMMENT):
                continue
            if found := self.take(_OPERATOR) or self.take(_REDIRECTION):
                if found[0] == ")":
                    break
                continue
            words.append(self.word())
        return tuple(words)

    def _double_quoted(self) -> list[Part]:
        """Read a text in double quotes, in which expansions are recognised."""
        read, line = list[Part](), self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            read += self.parts(_IN_DOUBLE, quoted=True) or []
        self.at += 1
        return read or [Part(text="", line=line, quoted=True)]

    def _expansion(self, *, quoted: bool) -> list[Part] | None:
        """Read the expansion that begins with `$` or a backquote; None if there is none here."""
        line, begin = self.line, self.at
        if self.text.startswith(("$(", "${"), begin):
            self.at += 1
            self._balanced(*("()" if self.text[self.at] == "(" else "{}"))
        elif self.take(_BACKQUOTED) is None and self.take(_NAME) is None:
            return None
        text = self.text[begin : self.at]
        return [Part(text=text, line=line, quoted=quoted, expands=text != "$")]

    def _balanced(self, opening: str, closing: str) -> str:
        """Read up to the bracket that closes the first opening one. Brackets in quotes and escapes do not count."""
        begin, depth, quote = self.at, 0, ""
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 2 if char == "\\" and quote != "'" else 1
            if quote or char in "'\"":
                quote = char if not quote else "" if char == quote else quote
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if not depth:
                    break
        read = self.text[begin : self.at]
        self.line += read.count("\n")
        return read
