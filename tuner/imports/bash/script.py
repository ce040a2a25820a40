"""What a launch script would run, read without running anything.

Assignments, arrays, defaults (`${TP:-4}`), simple arithmetic and simple conditions are followed. What only a run could
tell (arguments of the script, output of commands, loops, functions, variables of the environment) stays unknown, with
the line and the reason. A variable that the script does not set counts as unset where a default stands beside it and
in `[ -z ... ]` and `[ -n ... ]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tuner.imports.bash.arithmetic import calculated, compared
from tuner.imports.bash.texts import Argument, Piece, Text, argument_of, split_words
from tuner.imports.bash.words import Arithmetic, Literal, Operator, Part, Unreadable, Variable, Word, cut

MAX_WORDS = 100_000
MAX_PIECES = 2_000
"""Pieces of one variable: a script that doubles a variable again and again is not followed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command with its words expanded, as far as they are known."""

    words: tuple[Argument, ...]
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What was read.

    Attributes:
        commands: The commands that may run, in their order; `export` and its like are none.
        variables: All variables, arrays word by word.
        exported: The names that the script exports, in their order.
        sourced: Other scripts that it reads, with the lines: these were not read.
    """

    commands: tuple[Command, ...]
    variables: dict[str, tuple[Argument, ...]]
    exported: tuple[str, ...]
    sourced: tuple[Argument, ...]


def read_script(text: str) -> Script:
    """Reads a bash script; every text is one, so that this never fails."""
    reader = _Interpreter()
    for command, operator in _simple_commands(cut(text)):
        reader.step(command, operator)
    return Script(
        commands=tuple(reader.commands),
        variables={
            name: tuple(argument for text in _elements(value) for argument in map(argument_of, split_words(text)))
            for name, value in reader.variables.items()
        },
        exported=tuple(dict.fromkeys(reader.exported)),
        sourced=tuple(reader.sourced),
    )


class _Runs(Enum):
    """Whether what stands here would run."""

    YES = "yes"
    MAYBE = "maybe"
    NO = "no"


_BRANCHES = {True: _Runs.YES, False: _Runs.NO, None: _Runs.MAYBE}


@dataclass(slots=True)
class _Block:
    """An open `if`, loop, case or function."""

    kind: str
    outer: _Runs
    runs: _Runs
    taken: bool | None = False
    condition: list[tuple[tuple[Word, ...], str]] = field(default_factory=list)


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.S)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
_SILENT = ("echo", "printf")
_LOOPS = ("for", "while", "until", "case", "select")


def _simple_commands(tokens: Iterable[Word | Operator]) -> Iterable[tuple[tuple[Word, ...], str]]:
    """The words between two operators, with the operator behind them."""
    words: list[Word] = []
    for number, token in enumerate(tokens):
        if number > MAX_WORDS:
            break
        if isinstance(token, Operator):
            yield tuple(words), token.text
            words = []
        else:
            words.append(token)
    yield tuple(words), "\n"


class _Interpreter:
    """The variables and open blocks at one place of the script."""

    def __init__(self) -> None:
        self.variables: dict[str, Text | list[Text]] = {}
        self.exported: list[str] = []
        self.commands: list[Command] = []
        self.sourced: list[Argument] = []
        self.blocks: list[_Block] = []
        self.only_if: bool | None = True  # what `&&` and `||` in front of the command say
        self.is_function = False

    @property
    def runs(self) -> _Runs:
        """Whether the next command would run."""
        here = self.blocks[-1].runs if self.blocks else _Runs.YES
        if here is _Runs.NO or self.only_if is False:
            return _Runs.NO
        return _Runs.MAYBE if here is _Runs.MAYBE or self.only_if is None else _Runs.YES

    def step(self, words: tuple[Word, ...], operator: str) -> None:
        """One simple command, or a word that opens or closes a block."""
        while words and (rest := self._block(words)) is not None:
            words = rest
        if self.blocks and self.blocks[-1].kind == "condition":
            if words:
                self.blocks[-1].condition.append((words, operator))
            return
        truth: bool | None = True
        if words:
            truth = self._truth(words) if words[0].bare in _TESTS or words[0].bare == "!" else True
            self._command(words)
        elif operator == ")":
            self.is_function = True
        if words or operator not in ("\n", "("):
            self.is_function = operator == ")" and not words
        self.only_if = self._and_then(truth, operator)

    def _and_then(self, truth: bool | None, operator: str) -> bool | None:
        """Whether what follows the operator runs."""
        if operator == "&&":
            return truth if self.only_if is True else self.only_if
        if operator == "||":
            return None if truth is None or self.only_if is None else not (truth and self.only_if)
        return True

    # Blocks

    def _block(self, words: tuple[Word, ...]) -> tuple[Word, ...] | None:
        """What is left behind a word that opens or closes a block; None where there is no such word."""
        word, rest = words[0].bare, words[1:]
        kind = self.blocks[-1].kind if self.blocks else ""
        if word == "if":
            self._open("if", self.runs)
            self._open("condition", self.runs)
        elif word == "then" and kind == "condition":
            self._branch(self._condition(self.blocks.pop().condition))
        elif word == "else" and kind == "if":
            self._branch(True)
        elif word == "elif" and kind == "if":
            self._open("condition", self.blocks[-1].outer)
        elif word in _LOOPS:
            if word in ("for", "select") and rest and rest[0].bare:
                self._forget(rest[0].bare, rest[0].line)
            self._open(word, _at_most_maybe(self.runs))
            rest = ()
        elif word in ("{", "function"):
            is_function = word == "function" or self.is_function
            self._open("{", _at_most_maybe(self.runs) if is_function else self.runs)
            self.is_function = False
            rest = tuple(one for one in rest if one.bare != "{")[1:] if word == "function" else rest
        elif word in ("fi", "done", "esac", "}"):
            self.blocks = self.blocks[:-1]
        elif word not in ("do", "then"):
            return None
        return rest

    def _open(self, kind: str, runs: _Runs) -> None:
        self.blocks.append(_Block(kind=kind, outer=self.runs, runs=runs))

    def _branch(self, truth: bool | None) -> None:
        """Enters a branch of the innermost `if`, whose condition is `truth`."""
        block = self.blocks[-1]
        if block.taken is True or block.outer is _Runs.NO:
            block.runs = _Runs.NO
        elif block.taken is None or block.outer is _Runs.MAYBE:
            block.runs = _Runs.NO if truth is False else _Runs.MAYBE
        else:
            block.runs = _BRANCHES[truth]
        if block.taken is not True:
            block.taken = truth if block.taken is False else (None if truth is not True else True)

    def _condition(self, commands: Sequence[tuple[tuple[Word, ...], str]]) -> bool | None:
        """The truth of the last command of a condition and those that `&&` and `||` join to it."""
        truth: bool | None = None
        joint = ""
        for words, operator in commands:
            one = self._truth(words)
            if joint == "&&":
                truth = False if False in (truth, one) else None if None in (truth, one) else True
            elif joint == "||":
                truth = True if True in (truth, one) else None if None in (truth, one) else False
            else:
                truth = one
            joint = operator
        return truth

    def _truth(self, words: tuple[Word, ...]) -> bool | None:
        """Of one test; None where only a run could tell."""
        if words and words[0].bare == "!":
            inner = self._truth(words[1:])
            return None if inner is None else not inner
        kept = [word for word in words if word.bare not in (*_TESTS, "]", "]]")]
        if len(kept) == 2 and kept[0].bare in ("-z", "-n"):
            text = self._known(kept[1], unset="")
            return None if text is None else (text == "") == (kept[0].bare == "-z")
        if len(kept) != 3 or kept[1].bare is None:
            return None
        left, right = self._known(kept[0]), self._known(kept[2])
        return None if left is None or right is None else compared(left, kept[1].bare, right)

    def _known(self, word: Word, unset: str | None = None) -> str | None:
        """The text of a word; None where a part is unknown."""
        if unset is not None and len(word.parts) and all(self._is_unset(part) for part in word.parts):
            return unset
        text = self._text(word.parts)
        return None if any(piece.unknown for piece in text) else "".join(piece.text for piece in text)

    def _is_unset(self, part: Part) -> bool:
        """Whether a part is nothing, or a variable of which the script says nothing."""
        if isinstance(part, Variable):
            named = part.name.isidentifier() and not part.operator
            return named and part.name not in self.variables
        return isinstance(part, Literal) and not part.text

    # Commands

    def _command(self, words: tuple[Word, ...]) -> None:
        if self.runs is _Runs.NO:
            return
        declares = words[0].bare in _DECLARING
        first = next((at for at, word in enumerate(words) if not self._assigns(word)), len(words))
        for word in words[: len(words) if declares else first]:
            self._assign(word)
        if declares:
            if words[0].bare == "export":
                self.exported += [name for word in words[1:] if (name := _name_of(word))]
            return
        rest = words[first:]
        if not rest:
            return
        if rest[0].bare == "unset":
            for word in rest[1:]:
                self.variables.pop(word.bare or "", None)
            return
        fields = list(self._fields(rest))
        if rest[0].bare in ("source", "."):
            self.sourced += map(argument_of, fields[1:2])
        elif fields and rest[0].bare not in (*_SILENT, *_TESTS, ":"):
            self.exported += [name for word in words[:first] if (name := _name_of(word))]
            self.commands.append(Command(words=_inner_words(fields), line=rest[0].line))

    def _assigns(self, word: Word) -> bool:
        return bool(word.parts) and _assignment(word) is not None

    def _assign(self, word: Word) -> None:
        found = _assignment(word)
        if found is None:
            return
        name, is_added, parts = found
        value: Text | list[Text] = list(self._fields(word.array)) if word.array is not None else self._text(parts)
        if self.runs is _Runs.MAYBE:
            why = f"${name} is set on line {word.line} under a condition, in a loop or in a function"
            unknown = (Piece(text=f"${name}", line=word.line, unknown=why),)
            value = [unknown] if isinstance(value, list) else unknown
        before = self.variables.get(name)
        if is_added and before is not None:
            if isinstance(before, list) or isinstance(value, list):
                value = [*_elements(before), *_elements(value)]
            else:
                value = (*before, *value)
        if not isinstance(value, list):
            value = tuple(replace(piece, is_whole=False) if piece.is_whole else piece for piece in value)
        if sum(map(len, _elements(value))) > MAX_PIECES:
            value = (Piece(text=f"${name}", line=word.line, unknown=f"${name} on line {word.line} is too long"),)
        self.variables[name] = value

    def _forget(self, name: str, line: int) -> None:
        self.variables[name] = (
            Piece(text=f"${name}", line=line, unknown=f"${name} is what the loop on line {line} sets"),
        )

    # Expansion

    def _fields(self, words: Iterable[Word]) -> Iterable[Text]:
        """The words that words become, as bash splits them."""
        for word in words:
            if self._is_nothing(word):
                continue
            fields: list[list[Piece]] = []
            is_open = False  # whether the next part continues the last field
            for part in word.parts:
                pieces = self._values(part)
                for number, (text, splits) in enumerate(pieces):
                    if number:
                        is_open = False
                    shares = split_words(text) if splits else [text]
                    leads = splits and bool(text) and text[0].text[:1].isspace()
                    for position, share in enumerate(shares):
                        if is_open and not (leads and position == 0) and position == 0:
                            fields[-1] += share
                        else:
                            fields.append(list(share))
                        is_open = True
                    if splits and text and text[-1].text[-1:].isspace():
                        is_open = False
            yield from (tuple(one) for one in fields)

    def _is_nothing(self, word: Word) -> bool:
        """Whether a word is an array without elements, which becomes no word at all, quoted or not."""
        empty = [isinstance(one, Variable) and one.all_elements and not self._values(one) for one in word.parts]
        return any(empty) and all(
            is_empty or (isinstance(one, Literal) and not one.text)
            for one, is_empty in zip(word.parts, empty, strict=True)
        )

    def _text(self, parts: Sequence[Part]) -> Text:
        """What parts become where nothing is split."""
        pieces: list[Piece] = []
        for part in parts:
            for number, (text, _) in enumerate(self._values(part)):
                pieces += ([Piece(text=" ", line=part.line)] if number else []) + list(text)
        return tuple(pieces)

    def _values(self, part: Part) -> list[tuple[Text, bool]]:
        """The texts that a part becomes, and whether blanks split them."""
        if isinstance(part, Literal):
            return [((Piece(text=part.text, line=part.line),), False)]
        if isinstance(part, Unreadable):
            why = f"{_short(part.source)} on line {part.line} is for a shell to find out"
            return [((Piece(text=part.source, line=part.line, unknown=why),), False)]
        if isinstance(part, Arithmetic):
            number = self._arithmetic(part.text)
            why = "" if number is not None else f"$(({_short(part.text)})) on line {part.line} cannot be calculated"
            text = f"$(({part.text}))" if number is None else str(number)
            return [((Piece(text=text, line=part.line, unknown=why),), False)]
        return self._variable(part)

    def _variable(self, part: Variable) -> list[tuple[Text, bool]]:
        value = self.variables.get(part.name)
        is_set = value is not None and not (part.operator.startswith(":") and value in ((), []))
        if part.operator.endswith("+"):
            return [(self._text(part.other), not part.quoted)] if is_set else []
        if not is_set and part.operator:
            # once: a default within a default doubles what is done for both
            texts = [(one, self._text((one,))) for one in part.other]
            whole = tuple(replace(piece, is_whole=one.quoted) for one, text in texts for piece in text)
            if part.operator.endswith("=") and self.runs is _Runs.YES:
                self.variables[part.name] = tuple(piece for _, text in texts for piece in text)
            return [(whole, not part.quoted)]
        if value is None:
            why = _why_unset(part)
            return [((Piece(text=part.source, line=part.line, unknown=why),), False)]
        if isinstance(value, list):
            chosen = value if part.all_elements else value[:1]
            return [(text, not part.quoted) for text in chosen]
        return [(value, not part.quoted)]

    def _arithmetic(self, text: str) -> int | None:
        """The value of an expression of whole numbers and variables with + - * / % and brackets."""
        tokens = re.findall(r"[0-9]+|\$?\{?[A-Za-z_]\w*\}?|[-+*/%()]|\S", text)
        values: list[str | int] = []
        for token in tokens:
            name = token.strip("${}")
            if token[0] in "0123456789":
                if len(token) > 15:
                    return None
                values.append(int(token))
            elif name.isidentifier():
                found = self._known(Word(parts=(Variable(name=name, source=token, line=0, quoted=True),), line=0))
                if found is None or not re.fullmatch(r"\s*-?[0-9]{1,15}\s*", found):
                    return None
                values.append(int(found))
            else:
                values.append(token)
        return calculated(values)


def _at_most_maybe(runs: _Runs) -> _Runs:
    return _Runs.NO if runs is _Runs.NO else _Runs.MAYBE


def _assignment(word: Word) -> tuple[str, bool, tuple[Part, ...]] | None:
    """Name, whether it adds, and the value's parts, if the word assigns."""
    first = word.parts[0] if word.parts else None
    if not isinstance(first, Literal) or first.quoted:
        return None
    found = _ASSIGNMENT.match(first.text)
    if found is None:
        return None
    rest = first.text[found.end() :]
    head = (Literal(text=rest, line=first.line, quoted=False),) if rest else ()
    return found[1], bool(found[2]), (*head, *word.parts[1:])


def _name_of(word: Word) -> str | None:
    """The variable that a word of `export` names."""
    found = _assignment(word)
    return found[0] if found else word.bare if (word.bare or "").isidentifier() else None


def _elements(value: Text | list[Text]) -> list[Text]:
    return value if isinstance(value, list) else [value]


def _inner_words(fields: Sequence[Text]) -> tuple[Argument, ...]:
    """The words of a command; those of `bash -c "..."` and `eval "..."` are cut apart."""
    names = [argument_of(text).text.rsplit("/", 1)[-1] for text in fields]
    first = next((at for at, name in enumerate(names) if name in ("eval", "bash", "sh")), len(names))
    cut_apart = [word for text in fields[first:] for word in split_words(text)]
    return tuple(map(argument_of, (*fields[:first], *cut_apart)))


def _why_unset(part: Variable) -> str:
    if part.name.isdigit() or part.name in "@*#":
        return f"{part.source} on line {part.line} is given when the script is started"
    return f"{part.source} on line {part.line} is not set in the script"


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
