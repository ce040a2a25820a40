"""A user's own command, in which only what a configuration changes is exchanged, in place.

The words of a command say a configuration already: today's. A trial of another configuration differs from it by the
flags of a framework whose values differ. Those are exchanged where they stand; every other word stays as it is, and a
trial of today's configuration starts exactly the command.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trials.framework_flags import WordRules
from trials.knobs.subcommands import SUBCOMMANDS, subcommand_of

_KEY = re.compile(r"(?:\+{0,2}|~)[A-Za-z_][\w./-]*=")
"""Beginning of an override such as `model.tensor_model_parallel_size=2`, as Hydra takes it."""
_PROGRAM = re.compile(r"(?:^|/)(?:python[0-9.]*|torchrun)$|\.py$")
_VARIABLE = "-x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Flag of a command with the words of its values; the words before the first flag are one without a name.

    A subcommand is one too, with all words behind it, which belong to it.

    Attributes:
        name: Name of the flag with dashes in place of underscores; empty for words that belong to no flag.
        words: Its words as they stand in the command.
    """

    name: str
    words: tuple[str, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """Values of the flag, whether they stand behind it or behind its equals sign; a subcommand's colon is one."""
        _, equals, value = self.words[0].partition(":" if subcommand_of(self.words[0]) else "=")
        return ((value,) if equals else ()) + self.words[1:]


def segments_of(words: Sequence[str]) -> list[Segment]:
    """Split a command into its flags with their values.

    A flag begins with a dash and is no negative number, or is an override `KEY=VALUE`. The words up to the next flag
    are its values, except for the program behind a launcher's last flag. mpirun's `-x` has a variable as its value.
    """
    found: list[Segment] = []
    for number, word in enumerate(words):
        if subcommand := subcommand_of(word):
            return [*found, Segment(name=subcommand, words=tuple(words[number:]))]
        is_variable = bool(found) and found[-1].words == (_VARIABLE,)
        name = "" if is_variable else flag_of(word)
        is_program = bool(_PROGRAM.search(word)) and bool(found) and bool(found[-1].values)
        if name or is_program or not found:
            found.append(Segment(name=name, words=(word,)))
        else:
            found[-1] = replace(found[-1], words=(*found[-1].words, word))
    return found


def flag_of(word: str) -> str:
    """Return the name of the flag that a word begins, with dashes in place of underscores; empty if it is none."""
    is_number = word.lstrip("-").replace(".", "", 1).isdigit()
    if (word.startswith("-") and len(word) > 1 and not is_number) or _KEY.match(word):
        return word.partition("=")[0].lstrip("+~").replace("_", "-")
    return ""


def exchange_words(
    words: Sequence[str], now: Sequence[str], then: Sequence[str], rules: WordRules, refused: Collection[str] = ()
) -> list[str]:
    """Return a command with the flags in which two configurations differ exchanged, each where it stands.

    Flags of one group are exchanged together: `--num-layers-per-virtual-pipeline-stage` goes where a pipeline layout
    comes. New flags come last, but for a subcommand.

    Args:
        words: Words of the command.
        now: Flags of the configuration that the command says.
        then: Flags of the wanted one, as the same exporter writes them.
        rules: Groups of flags, and those that are never added or removed.
        refused: Flags of the command that the wanted configuration cannot have.
    """
    found = [segment for segment in segments_of(words) if segment.name not in refused]
    old, new = _by_group(segments_of(now), rules), _by_group(segments_of(then), rules)
    groups = dict.fromkeys((*old, *new))
    changed = {group for group in groups if old.get(group, ()) != new.get(group, ())}
    for group in groups:
        if group in changed or not changed.isdisjoint(rules.follows.get(group, ())):
            found = _exchanged(found, group, new.get(group, ()), rules)
    return [word for segment in found for word in segment.words]


def _by_group(segments: Sequence[Segment], rules: WordRules) -> Mapping[str, tuple[Segment, ...]]:
    groups: dict[str, tuple[Segment, ...]] = {}
    for segment in segments:
        group = rules.group(segment.name)
        groups[group] = (*groups.get(group, ()), segment)
    return groups


def _exchanged(found: list[Segment], group: str, after: Sequence[Segment], rules: WordRules) -> list[Segment]:
    """Return the segments of a command with those of one group exchanged."""
    own = [segment for segment in found if rules.group(segment.name) == group]
    if _said(own) == _said(after):
        return found  # in words of its own
    stays = not after and group in rules.never_removed
    if stays or (not own and group in rules.never_added):
        return found
    if not own:
        end = len(found) - 1 if found and found[-1].name in SUBCOMMANDS and group not in SUBCOMMANDS else len(found)
        return [*found[:end], *after, *found[end:]]
    first = next(number for number, segment in enumerate(found) if segment is own[0])
    rest = [segment for segment in found[first:] if not any(segment is one for one in own)]
    return [*found[:first], *after, *rest]


def _said(segments: Sequence[Segment]) -> dict[str, tuple[str, ...]]:
    """Return the values of flags by their names; of a flag that is given twice the last counts."""
    return {segment.name: segment.values for segment in segments}
