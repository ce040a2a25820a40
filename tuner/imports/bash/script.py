"""Reader that finds the commands of a simple launch script without running any of them.

It follows assignments, arrays, defaults (`${TP:-4}`), simple arithmetic, and the arguments that `set --` gives. It
evaluates no condition: what stands in an `if`, a loop, a function or behind `&&` may run or not. Values that depend on
that, or on a run, stay unknown, with the line and the reason. A variable that the script does not set counts as unset
where the script gives it a default. Variables that Slurm sets from the `#SBATCH` lines are known from the first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hardware.io.errors import shorten
from hardware.io.secret_texts import hide_command
from tuner.capture.slurm import header_words, stated_variables
from tuner.imports.bash.arithmetic import evaluate
from tuner.imports.bash.texts import Argument, Piece, Text, argument_of, split_words
from tuner.imports.bash.words import Part, Word, cut, parts_of_default

MAX_PIECES = 1_000
"""Limit on the pieces of one variable, because a script may double a variable again and again."""

MAX_WORK = 60_000
"""Limit on the words and pieces that are read and expanded; real scripts have some thousands. The rest is not read."""

MAX_TEXT = 50_000
"""Limit on the words that may stand in a variable under some condition [characters]."""

UNDER_A_CONDITION = "under a condition, in a loop or in a function"
"""Reason why a variable that the script sets is not known."""

MAX_NESTED = 20
"""Limit on the expansions within a default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command with its words expanded as far as they are known.

    Attributes:
        words: Words of the command.
        line: Line of its first word.
        outer: Words before the shell that runs the command after others, such as srun with its options.
        own: Variables that are set before the command and for it alone, with their values.
    """

    words: tuple[Argument, ...]
    line: int
    outer: tuple[Argument, ...] = ()
    own: tuple[tuple[str, Argument], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Script after it was read to its end.

    Attributes:
        commands: Commands that may run, in their order, without `export` and other declarations.
        variables: Final values of all variables, split into words.
        header: Words of the `#SBATCH` lines.
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
    header: tuple[str, ...] = ()


def read_script(text: str) -> Script:
    """Read a bash script. Every text is accepted, so that this function never fails."""
    header = header_words(text)
    reader, words = _Reader(stated_variables(header)), list[Word]()
    for token in cut(text):
        reader.work += 1
        if reader.work > MAX_WORK:
            break
        if isinstance(token, Word):
            words.append(token)
        else:
            reader.step(tuple(words), token)
            words = []
    reader.step(tuple(words), "\n")
    return Script(
        commands=tuple(reader.commands),
        variables={name: tuple(map(argument_of, split_words(_split(text)))) for name, text in reader.variables.items()},
        exported=tuple(dict.fromkeys(reader.exported)),
        sourced=tuple(reader.sourced),
        defaulted=tuple(dict.fromkeys(reader.defaulted)),
        header=tuple(header),
    )


def with_arguments(text: str, arguments: Sequence[str]) -> str:
    """Return a script that has these arguments as `$1`, `$2` and `$@`. Its lines keep their numbers."""
    return f"set -- {shlex.join(arguments)}; {text}"


_BLANK = (Piece(text=" ", line=0),)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.S)
_PARAMETER = re.compile(r"\$\{?([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?-)(.*))?\}?", re.S)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OPENING = ("if", "for", "while", "until", "case", "select", "{")
_CLOSING = ("fi", "done", "esac", "}")
_BETWEEN = ("then", "else", "elif", "do", "!", "time")
_SETTING = ("read", "readarray", "mapfile", "let", "getopts", "unset")
"""Commands whose arguments name variables that they change."""
_SILENT = ("echo", "printf", "set", ":", "[", "[[", "test")
_ENVIRONMENTS = re.compile(r"(set_?env|activate|conda|bashrc|profile|modules?|vars)[\w.-]*$")
"""Ends of the paths of sourced scripts that set up a machine and no training."""


class _Reader:
    """State at one place of the script: variables, open blocks, and commands found so far."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Begin with the variables that the script is given, which nothing but an assignment changes."""
        self.given = frozenset(given)
        # elements of arrays are whole pieces, with blanks between them
        self.variables: dict[str, Text] = {name: (Piece(text=text, line=0),) for name, text in given.items()}
        self.exported: list[str] = []
        self.commands: list[Command] = []
        self.sourced: list[Argument] = []
        self.defaulted: list[str] = []
        self.blocks: list[str] = []
        self.is_joined = False  # whether `&&` or `||` before the command may keep it from running
        self.work = 0  # number of words and pieces so far
        self.unsettled = ""  # reason why any variable may have another value than the script says

    @property
    def is_sure(self) -> bool:
        """Whether the next command surely runs, and here only."""
        return not self.blocks and not self.is_joined

    def step(self, words: tuple[Word, ...], operator: str) -> None:
        """Read one simple command, and the words that open or close blocks before it."""
        while words and (rest := self._block(words)) is not None:
            words = rest
        is_pattern = operator == ")" and self.blocks[-1:] == ["case"]
        if words and not is_pattern:
            self._command(words)
        if operator == "(":
            self.blocks.append("(")
        elif operator == ")" and self.blocks[-1:] == ["("]:
            self.blocks.pop()
        self.is_joined = operator in ("&&", "||")

    def _block(self, words: tuple[Word, ...]) -> tuple[Word, ...] | None:
        """Handle a word that opens or closes a block and return the words after it; return None for any other word."""
        word, rest = words[0].bare, words[1:]
        if word in _OPENING:
            self.blocks.append(word)
            if word in ("for", "select") and rest:
                self._forget(rest[0].bare, f"is set by the loop on line {rest[0].line}", rest[0].line)
            return () if word in ("for", "select", "case") else rest
        if word in _CLOSING:
            self.blocks = self.blocks[:-1]
        elif word == "function":
            return rest[1:]
        elif word not in _BETWEEN:
            return None
        return rest

    def _forget(self, name: str, why: str, line: int) -> None:
        """Mark a variable as unknown."""
        self.variables[name] = (Piece(text=f"${name}", line=line, unknown=f"${name} {why}"),)

    def _forget_all(self, command: str, line: int) -> None:
        """Mark all variables as unknown behind a command that may set any of them."""
        self.unsettled = f"may be set by `{shorten(hide_command(command), 40)}` on line {line}, which is not read"
        self.work += len(self.variables)
        for name in self.variables:
            if name.isidentifier() and name not in self.given:
                self._forget(name, self.unsettled, line)

    # Commands

    def _command(self, words: tuple[Word, ...]) -> None:
        """Read a simple command: assign and export its variables, and record it if it starts a program."""
        declares = words[0].bare in _DECLARING
        first = next((at for at, word in enumerate(words) if _assignment(word) is None), len(words))
        set_before = [found for word in words[:first] if (found := _assignment(word)) and not found[1]]
        own = tuple((name, argument_of(_split(self._text(parts)))) for name, _, parts in set_before)
        for word in words[: len(words) if declares else first]:
            self._assign(word)
        if declares:
            if words[0].bare == "export":
                self.exported += [name for word in words[1:] if (name := _name_of(word))]
            return
        rest, fields = words[first:], list(self._fields(words[first:]))
        if fields and not self._builtin(rest, fields) and rest[0].bare not in _SILENT:
            first_inner, *others = self._inner_commands(fields)
            self.commands.append(Command(words=first_inner, line=rest[0].line, own=own))
            outer = tuple(takewhile(lambda word: not _is_shell(word), first_inner))
            self.commands += [Command(words=inner, line=rest[0].line, outer=outer, own=own) for inner in others]

    def _builtin(self, words: tuple[Word, ...], fields: Sequence[Text]) -> bool:
        """Perform a command that changes variables; return whether it is one and nothing else."""
        name, line = words[0].bare, words[0].line
        prints = name == "printf" and [word.bare for word in words[1:2]] == ["-v"]
        if prints or name in _SETTING or words[0].parts[0].text.startswith("(("):
            source = " ".join(part.text for word in words for part in word.parts)
            for changed in re.findall(r"[A-Za-z_]\w*", source):
                self._forget(changed, f"is set by a command on line {line}", line)
        elif name == "set" and words[1:] and words[1].bare == "--":
            self._set_arguments(fields[2:])
        elif name == "shift":
            now = self.variables.get("@")
            self._set_arguments(split_words(now)[1:] if now is not None and len(fields) == 1 else None)
        elif name in ("source", "."):
            path = argument_of(fields[1] if len(fields) > 1 else ())
            self.sourced.append(replace(path, line=line))
            if not _ENVIRONMENTS.search(path.text):
                self._forget_all(f"source {path.text}", line)
        elif name == "eval" and not any("--" in piece.text for text in fields for piece in text):
            self._forget_all("eval", line)
        else:
            return False
        return True

    def _inner_commands(self, fields: Sequence[Text]) -> list[tuple[Argument, ...]]:
        """Return the words of a command, and those of the commands in the text of `bash -c "..."` or `eval "..."`.

        A word of such a text that the inner shell would expand or unquote is unknown, unless it is a variable.
        """
        words = list(map(argument_of, fields))
        names = [word.text.rsplit("/", 1)[-1] for word in words]
        shell = next((at for at, word in enumerate(words) if _is_shell(word)), len(names))
        begin = shell + 1 if names[shell : shell + 1] == ["eval"] else len(names)
        begin = names.index("-c", shell) + 1 if "-c" in names[shell:] else begin
        found = [words[:begin]]
        skips = False
        for word in (argument_of(share) for text in fields[begin:] for share in split_words(_split(text))):
            if skips or re.match(r"[0-9&]*[<>]", word.text):
                skips = not skips and word.text.endswith((">", "<"))  # the file behind it is no argument
            elif re.fullmatch(r"[;&|]+", word.text):
                found.append([])
            elif not word.unknown and re.fullmatch(r"\$\w+|\$\{\w+\}", word.text):
                part = Part(text=word.text, line=word.line, expands=True)
                found[-1] += map(argument_of, self._fields([Word(parts=(part,), line=word.line)]))
            else:
                is_plain = word.unknown or not re.search(r"[$`'\"\\]", word.text)
                why = word.unknown if is_plain else _only_a_shell(word)
                found[-1].append(replace(word, text=word.text.rstrip(";"), unknown=why))
                found += [[]] if word.text.endswith(";") else []
        return [tuple(words) for words in found if words]

    def _set_arguments(self, given: Sequence[Text] | None) -> None:
        """Set `$1`, `$2`, `$@` and `$#`; None leaves them unknown."""
        self.variables = {name: value for name, value in self.variables.items() if name.isidentifier()}
        if given is not None and self.is_sure:
            numbered = {str(number): _split(text) for number, text in enumerate(given, 1)}
            count = (Piece(text=str(len(given)), line=0),)
            self.variables |= {"@": _array(given), "*": _array(given), "#": count, **numbered}

    def _assign(self, word: Word) -> None:
        """Perform the assignment of a word, if it is one."""
        found = _assignment(word)
        if found is None:
            return
        name, is_added, parts = found
        is_array = word.array is not None
        value = _array(self._fields(word.array)) if word.array is not None else _split(self._text(parts))
        before = self.variables.get(name, ())
        if is_array and before and not any(piece.is_whole for piece in before):
            before = _array([before])  # a scalar becomes the first element
        if value and not is_added and _is_known(value) and [one.text for one in value] == [one.text for one in before]:
            return  # `NGPU="$NGPU" program` changes nothing, also where it may not run
        if not self.is_sure:
            # `ARGS="$ARGS --more"` keeps what was known and adds something, as `+=` does.
            if before and not is_array and value[: len(before)] == before:
                is_added, value = True, value[len(before) :]
            unknown = _uncertain(name, value if is_added else (*before, *_BLANK, *value), word.line)
            value = _array([unknown]) if is_array else unknown
        if is_added:
            separates = before and value and (is_array or not self.is_sure)
            value = (*before, *(_BLANK if separates else ()), *value)
        self.variables[name] = value
        if len(value) > MAX_PIECES:
            self._forget(name, f"on line {word.line} is too long", word.line)
        elif word.array is None and any(piece.is_whole for piece in before):
            self._forget(name, f"on line {word.line} is a part of an array", word.line)
            self.variables[name] = _array([self.variables[name]])

    # Expansion

    def _fields(self, words: Iterable[Word]) -> Iterable[Text]:
        """Expand words into fields as bash does: values of unquoted expansions are split at their blanks."""
        for word in words:
            yield from split_words(self._text(word.parts))

    def _text(self, parts: Sequence[Part], *, splits: bool = False) -> Text:
        """Expand parts into one text, in which whole pieces do not split words; with `splits` unquoted literals do."""
        pieces: list[Piece] = []
        for part in parts:
            text = self._values(part)
            takes_all = part.expands and re.match(r"\$(@|\{@|\{\w+\[@)", part.text) is not None
            if part.quoted and not takes_all:
                # A quoted text is a word even if it is empty.
                text = text or (Piece(text="", line=part.line),)
            if not (part.expands or splits) or (part.quoted and not (takes_all and any(one.is_whole for one in text))):
                text = tuple(replace(piece, is_whole=True) for piece in text)
            pieces += text
        self.work += len(pieces)
        return tuple(pieces)

    def _values(self, part: Part) -> Text:
        """Expand a part."""
        if not part.expands:
            return (Piece(text=part.text, line=part.line),)
        found = _PARAMETER.fullmatch(part.text)
        if part.text.startswith("$((") and (number := self._arithmetic(part.text[3:-2])) is not None:
            return (Piece(text=str(number), line=part.line),)
        if found is None or part.text.count("$") > MAX_NESTED:
            return (Piece(text=part.text, line=part.line, unknown=_only_a_shell(part)),)
        return self._variable(part, found)

    def _variable(self, part: Part, found: re.Match[str]) -> Text:
        """Expand a variable, with its default."""
        name, takes_all, operator, other = found[1], found[2] or found[1] in "@*", found[3] or "", found[4] or ""
        # Arguments within a function are its own.
        knows = name.isidentifier() or "{" not in self.blocks
        value = self.variables.get(name) if knows else None
        is_set = value is not None and not (operator.startswith(":") and value == ())
        if value is None and self.unsettled:
            operator, why = "", f"{hide_command(part.text)} on line {part.line} {self.unsettled}"
        elif name.isidentifier():
            why = f"{hide_command(part.text)} on line {part.line} is not set in the script"
        else:
            why = f"{hide_command(part.text)} on line {part.line} is given when the script is started"
        inner = parts_of_default(other.removesuffix("}"), part.line, quoted=part.quoted) if operator else ()
        if operator and value is None and name.isidentifier() and inner:
            self.defaulted.append(name)
        if operator and not is_set:
            return self._text(inner, splits=True)
        if value is None and knows and name.isdigit() and "@" in self.variables:
            return ()  # more arguments are known not to be given
        if value is None:
            return (Piece(text=part.text, line=part.line, unknown=why),)
        if not takes_all and value and value[0].is_whole:
            value = tuple(takewhile(lambda piece: piece not in _BLANK, value))  # an array's first element
        return value if part.quoted else _split(value)

    def _arithmetic(self, text: str) -> int | None:
        """Evaluate an expression of whole numbers and variables. Return None if a value is unknown."""

        def number(found: re.Match[str]) -> str:
            pieces = self.variables.get(found[1], ())
            return "?" if any(piece.unknown for piece in pieces) else "".join(piece.text for piece in pieces) or "?"

        return evaluate(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", number, text))


def _is_known(value: Text) -> bool:
    return not any(piece.unknown for piece in value)


def _assignment(word: Word) -> tuple[str, bool, tuple[Part, ...]] | None:
    """Parse an assignment into its name, whether it is `+=`, and the parts of its value. Return None otherwise."""
    first = word.parts[0] if word.parts else None
    if first is None or first.quoted or first.expands or (found := _ASSIGNMENT.match(first.text)) is None:
        return None
    rest = first.text[found.end() :]
    return found[1], bool(found[2]), (*((replace(first, text=rest),) if rest else ()), *word.parts[1:])


def _name_of(word: Word) -> str:
    """Return the name of the variable that a word of `export` exports, or nothing."""
    found = _assignment(word)
    return found[0] if found else word.bare if word.bare.isidentifier() else ""


def _split(text: Text) -> Text:
    """Return a text as the value of a variable: quotes around it did not become part of it, so that it may split."""
    return tuple(replace(piece, is_whole=False) for piece in text if piece.text)


def _array(elements: Iterable[Text]) -> Text:
    """Return the value of an array with these elements."""
    empty = (Piece(text="", line=0),)
    pieces = [
        piece for text in elements for piece in (*(replace(one, is_whole=True) for one in text or empty), *_BLANK)
    ]
    return tuple(pieces[:-1])


def _uncertain(name: str, may_be: Text, line: int) -> Text:
    """Return the value of a variable that an assignment sets which may not run, by all that it may be then."""
    words = map(argument_of, split_words(_split(may_be)))
    # A word that is unknown stays one word.
    held = " ".join(re.sub(r"\s", "", word.text) if word.otherwise is None else word.otherwise for word in words)
    why = f"${name} is set on line {line} {UNDER_A_CONDITION}"
    return (Piece(text=f"${name}", line=line, unknown=why, otherwise=held if len(held) < MAX_TEXT else None),)


def _is_shell(word: Argument) -> bool:
    return word.text.rsplit("/", 1)[-1] in ("eval", "bash", "sh")


def _only_a_shell(part: Part | Piece) -> str:
    """Return the reason why a part is unknown that must be evaluated."""
    return f"{shorten(hide_command(part.text), 40)} on line {part.line} can be evaluated only by a shell"
