"""Interpreter that finds the commands of a launch script without running any of them.

It follows assignments, arrays, defaults (`${TP:-4}`), simple arithmetic and simple conditions, arguments that
`set --` gives, and the text of `bash -c`. Values that depend on a run stay unknown, with the line and the reason:
arguments of the script, output of commands, loops, functions and environment variables. A variable that the script does
not set counts as unset if it has a default, and in `[ -z ... ]` and `[ -n ... ]`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tuner.imports.bash.arithmetic import compare, evaluate
from tuner.imports.bash.texts import Argument, Piece, Text, argument_of, split_words
from tuner.imports.bash.words import Arithmetic, Literal, Operator, Part, Unreadable, Variable, Word, cut

MAX_WORDS = 100_000
"""Limit on the words of a script; later ones are not read."""

MAX_PIECES = 2_000
"""Limit on the pieces of one variable, because a script may double a variable again and again."""


MAX_NESTED = 3
"""Limit on shells within shells; the text of deeper ones is not followed."""

MAX_NESTED_TEXT = 500_000
"""Limit on the text of all shells within a script [characters], because a script may hand one text to many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command with its words expanded as far as they are known."""

    words: tuple[Argument, ...]
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Script after it was read to its end.

    Attributes:
        commands: Commands that may run, in their order, without `export` and other declarations.
        variables: Final values of all variables, split into words.
        exported: Names of the exported variables, in their order.
        sourced: Paths of the scripts that are sourced, which are not read.
        defaulted: Names of the variables that have the default of an expansion such as `${TP:-4}`, because the script
            does not set them.
    """

    commands: tuple[Command, ...]
    variables: dict[str, tuple[Argument, ...]]
    exported: tuple[str, ...]
    sourced: tuple[Argument, ...]
    defaulted: tuple[str, ...] = ()


def read_script(text: str) -> Script:
    """Read a bash script. Every text is accepted, so that this function never fails."""
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
        defaulted=tuple(dict.fromkeys(reader.defaulted)),
    )


def with_arguments(text: str, arguments: Sequence[str]) -> str:
    """Return a script that has these arguments as `$1`, `$2` and `$@`. Its lines keep their numbers."""
    return f"set -- {shlex.join(arguments)}; {text}"


class _Runs(Enum):
    """Whether a command at this place would run."""

    YES = "yes"
    MAYBE = "maybe"
    NO = "no"


_BRANCHES = {True: _Runs.YES, False: _Runs.NO, None: _Runs.MAYBE}


@dataclass(slots=True)
class _Block:
    """Open `if`, condition, loop, case, function or group of commands.

    Attributes:
        kind: Word that opened the block; "condition" for the commands between `if` and `then`.
        outer: Whether a command before the block would run.
        runs: Whether a command in the current branch would run.
        taken: Whether one of the branches so far was taken; None if unknown.
        condition: Commands of a condition with the operators that follow them.
    """

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
    """Group tokens into simple commands: the words between two operators, with the operator after them."""
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
    """State of the interpretation at one place of the script: variables, open blocks, and commands found so far."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # number of shells around this one
        self.nested = [0]  # length of the texts of shells followed so far [characters]; shared by all shells
        self.variables: dict[str, Text | list[Text]] = {}
        self.exported: list[str] = []
        self.commands: list[Command] = []
        self.sourced: list[Argument] = []
        self.defaulted: list[str] = []
        self.blocks: list[_Block] = []
        self.only_if: bool | None = True  # whether `&&` or `||` before the command lets it run; None if unknown
        self.is_function = False

    @property
    def runs(self) -> _Runs:
        """Whether the next command would run."""
        here = self.blocks[-1].runs if self.blocks else _Runs.YES
        if here is _Runs.NO or self.only_if is False:
            return _Runs.NO
        return _Runs.MAYBE if here is _Runs.MAYBE or self.only_if is None else _Runs.YES

    def step(self, words: tuple[Word, ...], operator: str) -> None:
        """Interpret one simple command, or the words that open or close blocks before it."""
        while words and (rest := self._block(words)) is not None:
            words = rest
        if self.blocks and self.blocks[-1].kind == "condition":
            if words:
                self.blocks[-1].condition.append((words, operator))
            return
        truth: bool | None = True  # a command other than a test is assumed to succeed
        if words:
            truth = self._truth(words) if words[0].bare in _TESTS or words[0].bare == "!" else True
            self._command(words)
        elif operator == ")":
            self.is_function = True
        # `name ()` is a function; its body may begin on the next line
        if words or operator not in ("\n", "("):
            self.is_function = operator == ")" and not words
        self.only_if = self._and_then(truth, operator)

    def _and_then(self, truth: bool | None, operator: str) -> bool | None:
        """Return whether the command after the operator runs."""
        if operator == "&&":
            return truth if self.only_if is True else self.only_if
        if operator == "||":
            return None if truth is None or self.only_if is None else not (truth and self.only_if)
        return True

    # Blocks

    def _block(self, words: tuple[Word, ...]) -> tuple[Word, ...] | None:
        """Handle a word that opens or closes a block and return the words after it; return None for any other word."""
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
        """Open a block."""
        self.blocks.append(_Block(kind=kind, outer=self.runs, runs=runs))

    def _branch(self, truth: bool | None) -> None:
        """Enter a branch of the innermost `if`, whose condition is `truth`."""
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
        """Evaluate the last command of a condition, together with the commands joined to it by `&&` and `||`.

        The result follows three-valued logic: None is unknown.
        """
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
        """Evaluate one test. Return None if the result depends on a run."""
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
        return None if left is None or right is None else compare(left, kept[1].bare, right)

    def _known(self, word: Word, unset: str | None = None) -> str | None:
        """Return the text of a word, or None if a part is unknown.

        With `unset`, a word of variables that the script does not set has this text.
        """
        if unset is not None and len(word.parts) and all(self._is_unset(part) for part in word.parts):
            return unset
        text = self._text(word.parts)
        return None if any(piece.unknown for piece in text) else "".join(piece.text for piece in text)

    def _is_unset(self, part: Part) -> bool:
        """Return whether a part is empty, or a variable that the script does not set."""
        if isinstance(part, Variable):
            named = part.name.isidentifier() and not part.operator
            return named and part.name not in self.variables
        return isinstance(part, Literal) and not part.text

    # Commands

    def _command(self, words: tuple[Word, ...]) -> None:
        """Interpret a simple command: assign and export its variables, and record it if it starts a program."""
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
        if rest[0].bare in ("set", "shift"):
            self._set_arguments(rest[0].bare, fields[1:])
        elif rest[0].bare in ("source", "."):
            self.sourced += map(argument_of, fields[1:2])
        elif fields and rest[0].bare not in (*_SILENT, *_TESTS, ":"):
            self.exported += [name for word in words[:first] if (name := _name_of(word))]
            inner = _inner_text(fields)
            if inner is not None and self.depth < MAX_NESTED and self.nested[0] < MAX_NESTED_TEXT:
                self._follow(inner[0], keeps_all=inner[1])
            else:
                self.commands.append(Command(words=_inner_words(fields), line=rest[0].line))

    def _follow(self, text: Text, *, keeps_all: bool) -> None:
        """Interpret the known text of `bash -c` with the exported variables, or of `eval` with all variables."""
        source = "".join(piece.text for piece in text)
        self.nested[0] += len(source)
        inner = _Interpreter(depth=self.depth + 1)
        inner.nested = self.nested
        seen = self.variables if keeps_all else {name: self.variables.get(name) for name in self.exported}
        inner.variables = {name: value for name, value in seen.items() if value is not None}
        inner.exported = self.exported
        inner.blocks = [_Block(kind="{", outer=self.runs, runs=self.runs)]
        for words, operator in _simple_commands(cut(source, line=text[0].line)):
            inner.step(words, operator)
        self.commands += inner.commands
        self.sourced += inner.sourced
        self.defaulted += inner.defaulted
        if keeps_all:
            self.variables = inner.variables

    def _set_arguments(self, command: str, fields: Sequence[Text]) -> None:
        """Perform `set -- a b` or `shift`, which change `$1`, `$2` and `$@`."""
        now = self.variables.get("@")
        if command == "set" and (not fields or argument_of(fields[0]).text != "--"):
            return
        if command == "shift":
            if not isinstance(now, list):
                return
            by = argument_of(fields[0]).text if fields else "1"
            given = now[int(by) :] if by.isdigit() else []
        else:
            given = list(fields[1:])
        for name in [name for name in self.variables if not name.isidentifier()]:
            del self.variables[name]
        if self.runs is _Runs.YES:
            count = (Piece(text=str(len(given)), line=0),)
            numbered = {str(number): text for number, text in enumerate(given, 1)}
            self.variables |= {"@": given, "*": given, "#": count, **numbered}

    def _assigns(self, word: Word) -> bool:
        """Return whether a word is an assignment."""
        return bool(word.parts) and _assignment(word) is not None

    def _assign(self, word: Word) -> None:
        """Perform the assignment of a word, if it is one."""
        found = _assignment(word)
        if found is None:
            return
        name, is_added, parts = found
        value: Text | list[Text] = list(self._fields(word.array)) if word.array is not None else self._text(parts)
        before = self.variables.get(name)
        # If it is uncertain whether the assignment runs, the new value is unknown.
        if self.runs is _Runs.MAYBE:
            why = f"${name} is set on line {word.line} under a condition, in a loop or in a function"
            # `ARGS="$ARGS --more"` keeps what was known and adds something, as `+=` does.
            if isinstance(value, tuple) and isinstance(before, tuple) and before:
                value = tuple(piece for piece in value if piece.text)
                kept = len([piece for piece in before if piece.text])
                if value[:kept] == tuple(piece for piece in before if piece.text):
                    is_added, value = True, value[kept:]
            pieces = [piece for text in _elements(value) for piece in text]
            is_known = (is_added or before in (None, (), [])) and not any(piece.unknown for piece in pieces)
            added = " ".join(piece.text for piece in pieces) if is_known else ""
            unknown = (Piece(text=f"${name}", line=word.line, unknown=why, otherwise=added.strip()),)
            value = [unknown] if isinstance(value, list) else (Piece(text=" ", line=word.line), *unknown)
        if is_added and before is not None:
            if isinstance(before, list) or isinstance(value, list):
                value = [*_elements(before), *_elements(value)]
            else:
                value = (*before, *value)
        # Quoting protects blanks in an assignment only; the variable's own expansion may split at them.
        if not isinstance(value, list):
            value = tuple(replace(piece, is_whole=False) if piece.is_whole else piece for piece in value)
        if sum(map(len, _elements(value))) > MAX_PIECES:
            value = (Piece(text=f"${name}", line=word.line, unknown=f"${name} on line {word.line} is too long"),)
        self.variables[name] = value

    def _forget(self, name: str, line: int) -> None:
        """Mark the variable of a loop as unknown."""
        self.variables[name] = (
            Piece(text=f"${name}", line=line, unknown=f"${name} is set by the loop on line {line}"),
        )

    # Expansion

    def _fields(self, words: Iterable[Word]) -> Iterable[Text]:
        """Expand words and split the results into fields as bash does.

        The values of unquoted variables are split at blanks, and joined to the text before and after them.
        """
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
        """Return whether a word is an array without elements, which expands to no word even if quoted."""
        empty = [
            isinstance(one, Variable) and (one.all_elements or one.name in "@*") and not self._values(one)
            for one in word.parts
        ]
        return any(empty) and all(
            is_empty or (isinstance(one, Literal) and not one.text)
            for one, is_empty in zip(word.parts, empty, strict=True)
        )

    def _text(self, parts: Sequence[Part]) -> Text:
        """Expand parts into one text without splitting it into fields."""
        pieces: list[Piece] = []
        for part in parts:
            for number, (text, _) in enumerate(self._values(part)):
                pieces += ([Piece(text=" ", line=part.line)] if number else []) + list(text)
        return tuple(pieces)

    def _values(self, part: Part) -> list[tuple[Text, bool]]:
        """Expand a part into texts, each with whether blanks split it."""
        if isinstance(part, Literal):
            return [((Piece(text=part.text, line=part.line),), False)]
        if isinstance(part, Unreadable):
            why = f"{_short(part.source)} on line {part.line} can be evaluated only by a shell"
            return [((Piece(text=part.source, line=part.line, unknown=why),), False)]
        if isinstance(part, Arithmetic):
            number = self._arithmetic(part.text)
            why = "" if number is not None else f"$(({_short(part.text)})) on line {part.line} cannot be evaluated"
            text = f"$(({part.text}))" if number is None else str(number)
            return [((Piece(text=text, line=part.line, unknown=why),), False)]
        return self._variable(part)

    def _variable(self, part: Variable) -> list[tuple[Text, bool]]:
        """Expand a variable, with its default or replacement, into texts."""
        value = self.variables.get(part.name)
        is_set = value is not None and not (part.operator.startswith(":") and value in ((), []))
        if part.operator.endswith("+"):
            return [(self._text(part.other), not part.quoted)] if is_set else []
        if not is_set and part.operator:
            if value is None and part.name.isidentifier() and part.other:
                self.defaulted.append(part.name)
            # Expand each part once: with nested defaults, a second expansion would double the work per level.
            texts = [(one, self._text((one,))) for one in part.other]
            whole = tuple(replace(piece, is_whole=one.quoted) for one, text in texts for piece in text)
            if part.operator.endswith("=") and self.runs is _Runs.YES:
                self.variables[part.name] = tuple(piece for _, text in texts for piece in text)
            return [(whole, not part.quoted)]
        if value is None and part.name.isdigit() and "@" in self.variables:
            return [((), not part.quoted)]  # more arguments are known not to be given
        if value is None:
            why = _why_unset(part)
            return [((Piece(text=part.source, line=part.line, unknown=why),), False)]
        if isinstance(value, list):
            chosen = value if part.all_elements or part.name in "@*" else value[:1]
            return [(text, not part.quoted) for text in chosen]
        return [(value, not part.quoted)]

    def _arithmetic(self, text: str) -> int | None:
        """Evaluate an expression of integers, variables, + - * / % and brackets. Return None if a value is unknown."""
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
        return evaluate(values)


def _at_most_maybe(runs: _Runs) -> _Runs:
    """Return NO for NO and MAYBE otherwise, because loops and functions may not run."""
    return _Runs.NO if runs is _Runs.NO else _Runs.MAYBE


def _assignment(word: Word) -> tuple[str, bool, tuple[Part, ...]] | None:
    """Parse an assignment into its name, whether it is `+=`, and the parts of its value. Return None otherwise."""
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
    """Return the name of the variable that a word of `export` exports."""
    found = _assignment(word)
    return found[0] if found else word.bare if (word.bare or "").isidentifier() else None


def _elements(value: Text | list[Text]) -> list[Text]:
    """Return the elements of an array; a scalar is an array of one element."""
    return value if isinstance(value, list) else [value]


def _inner_text(fields: Sequence[Text]) -> tuple[Text, bool] | None:
    """Return the text that `bash -c` or `eval` in a command runs, and whether it is `eval`; None if it is not known."""
    names = [argument_of(text).text.rsplit("/", 1)[-1] for text in fields]
    at = next((at for at, name in enumerate(names) if name in ("eval", "bash", "sh")), len(names))
    is_eval = at < len(names) and names[at] == "eval"
    begin = at + 1 if is_eval else next((at + 1 for at in range(at + 1, len(names)) if names[at] == "-c"), len(names))
    # `eval` joins its words; the words behind the text of `bash -c` are its arguments
    inner = fields[begin:] if is_eval else fields[begin : begin + 1]
    pieces = tuple(piece for text in inner for piece in (*text, Piece(text=" ", line=0)))
    known = pieces and not any(piece.unknown for piece in pieces)
    return (pieces, is_eval) if known else None


def _inner_words(fields: Sequence[Text]) -> tuple[Argument, ...]:
    """Return the words of a command. The text of `bash -c "..."` and `eval "..."` is split into words."""
    names = [argument_of(text).text.rsplit("/", 1)[-1] for text in fields]
    first = next((at for at, name in enumerate(names) if name in ("eval", "bash", "sh")), len(names))
    inner = [word for text in fields[first:] for word in split_words(text)]
    return tuple(map(argument_of, (*fields[:first], *inner)))


def _why_unset(part: Variable) -> str:
    """Return the reason why a variable without a value is unknown."""
    if part.name.isdigit() or part.name in "@*#":
        return f"{part.source} on line {part.line} is given when the script is started"
    return f"{part.source} on line {part.line} is not set in the script"


def _short(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= 40 else f"{text[:37]}..."
