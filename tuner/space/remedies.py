"""What to change in a study whose configurations all need more memory than there is.

Each change is tried before it is told: further dimensions are opened to all that the runtime offers, and lists of
degrees are left out, one at a time and then as few together as help; at last the number of hosts is doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from costmodels.job.parallel_config import DEGREES
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from tuner.space.dimensions import SEARCHED
from tuner.space.enumeration import Space, SpaceOptions, active_rules, build_space

MOST_DOUBLINGS = 6
"""Most times that the number of hosts is doubled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """Change of one key of `space:`.

    Attributes:
        name: Name of the dimension.
        codes: Codes that it may take; None leaves the key out.
    """

    name: str
    codes: tuple[int, ...] | None

    @property
    def option(self) -> str:
        """Option of the command line that makes the change."""
        values = "~" if self.codes is None else f"[{', '.join(map(SEARCHED[self.name].show, self.codes))}]"
        return f"--set 'space.{self.name}={values}'"


def remedy_in_words(setting: Setting, options: SpaceOptions) -> str:
    """Return what to add to the command, or to `space:`, so that some configuration fits, or at least may fit."""
    changes = (*_offered(setting, options), *_freed(options))
    tried: dict[tuple[_Change, ...], Space | None] = {}

    def space_with(chosen: tuple[_Change, ...]) -> Space | None:
        if chosen not in tried:
            tried[chosen] = _space(setting, _with(options, chosen))
        return tried[chosen]

    helping = _fewest(changes, lambda chosen: _has_fitting(space_with(chosen), options))
    if helping is not None:
        return f"some configurations may fit with {_options(helping)}"
    nothing = f"nothing that {setting.runtime.name} offers within the job lets any fit"
    helping = _fewest(changes, lambda chosen: space_with(chosen) is not None)
    if helping is not None:
        nothing += f" (with {_options(helping)} some have a chance of less than one half)"
    cluster = setting.cluster
    if cluster.is_mixed:
        return f"{nothing} on this cluster"
    for doubling in range(1, MOST_DOUBLINGS + 1):
        hosts = cluster.num_hosts << doubling
        space = _space(replace(setting, cluster=cluster.with_hosts(hosts)), options)
        if _has_fitting(space, options):  # as `--hosts` asks, and not only perhaps
            return f"{nothing}; some do on more hosts: `meshtune rank STUDY --hosts {hosts}`"
    return f"{nothing}, on {hosts:,} hosts neither"


def _fewest(
    changes: tuple[_Change, ...], is_enough: Callable[[tuple[_Change, ...]], bool]
) -> tuple[_Change, ...] | None:
    """Return the first change that is enough alone, or else as few as are enough together; None if all are not."""
    alone = next(((change,) for change in changes if is_enough((change,))), None)
    if alone is not None or not is_enough(changes):
        return alone
    helping = changes
    for change in changes:
        fewer = tuple(each for each in helping if each is not change)
        helping = fewer if is_enough(fewer) else helping
    return helping


def _has_fitting(space: Space | None, options: SpaceOptions) -> bool:
    """Return whether the runtime's own profile predicts that a configuration fits."""
    return space is not None and bool(space.memory.fits(options.memory_headroom).any())


def _options(changes: Iterable[_Change]) -> str:
    return " ".join(change.option for change in changes)


def _space(setting: Setting, options: SpaceOptions) -> Space | None:
    """Return the configurations that may fit; None where there are none, or too many to enumerate."""
    try:
        space = build_space(setting, options.with_equal_layers(), current=None)
    except ConfigError:
        return None
    return space if len(space.grid) else None


def _offered(setting: Setting, options: SpaceOptions) -> Iterator[_Change]:
    """Yield a change for each further dimension of which the runtime offers more than the space has."""
    rules, allowed = {rule.name for rule in active_rules(setting, options)}, dict(options.allowed)
    fixed = setting.job.fixed_values(sequence_parallel=setting.runtime.sequence_parallel)
    for name, dimension in SEARCHED.items():
        if dimension.offered is None or f"no_{name}" in rules:
            continue
        codes = set(map(dimension.code_of, dimension.offered(setting.runtime)))
        own = allowed[name] if name in options.opened else (dimension.code_of(fixed[name]),)
        if not codes <= set(own):
            yield _Change(name=name, codes=tuple(sorted({*codes, *own})))


def _freed(options: SpaceOptions) -> Iterator[_Change]:
    """Yield a change for each degree whose values the study lists."""
    return (_Change(name=name, codes=None) for name, _ in options.allowed if name in DEGREES)


def _with(options: SpaceOptions, changes: Sequence[_Change]) -> SpaceOptions:
    allowed: dict[str, tuple[int, ...] | None] = {
        **dict(options.allowed),
        **{each.name: each.codes for each in changes},
    }
    opened = [each.name for each in changes if each.codes is not None]
    return replace(
        options,
        allowed=tuple((name, codes) for name in SEARCHED if (codes := allowed.get(name)) is not None),
        opened=tuple(dict.fromkeys((*options.opened, *opened))),
    )
