"""Measure regret and device-hours if all trials but three, or all, run on at most a quarter of the devices.

    python -m benchmarks.calibration.proxy_regret --measured A.csv [B.csv ...] [--seeds 10] [--share 64] [--json]

A group contains the measured runs of one job on one cluster. Its sibling is the same job on at most a quarter of the
devices, or one part in --share, the largest such group. A trial of a proxy job is answered by the sibling's run with
the candidate's tp, cp, up, ep, mbs, ZeRO stage and further dimensions and the nearest pp; dp follows. Layers and batch
are those of the full job, as they were measured: only the number of devices is smaller. As in a study, a proxy must
probably fit into memory. A candidate without such a run has no proxy.

At most --proxies trials are proxies, fewer if the study is confident that further ones would not help. Then three
trials run at full size. The first of them is the answer of a study without any (`full_trials: 0`), which is
extrapolated. The regret of these three is compared with as many trials in total, all at full size; with the prior's
first three, of which the first is `predicted` without any trial; and with three at random. Before the first trial, the
sampler knows as much as a study without history: a shipped profile of another runtime, see problems.py.
`NAME_failed.csv` beside `NAME.csv` is read too; a failed configuration is a candidate and costs a trial.

Regret is the slowdown of the best tried candidate, and that of the slowest candidate as long as none has run. A trial
costs its devices for --startup-s (assumed: 60 s) and seven steps, or for the start alone if it fails. Siblings have the
full batch, while the proxies of a study have a smaller one and cost less. Figures are means over seeds, then over
groups. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.support.device_hours import device_hours
from benchmarks.support.problems import Group, Problem, groups_of, problem_of, read_runs
from benchmarks.support.searchers import prior, run_trials, thompson, uniform
from benchmarks.support.timing import answer, count_at_least, reasons, searching, tell
from benchmarks.support.trial_metrics import regret_at
from benchmarks.support.workers import mapper
from costmodels.calibration.fidelity import GROUP
from costmodels.calibration.sources import setting_of
from costmodels.job.parallel_config import FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from trials.backend import Observation
from trials.trial_keys import ProxyOptions
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.proxy.proxy_trials import PROXY, Proxy, probably_fits
from tuner.search.sampler import ThompsonSampler
from tuner.space.enumeration import SpaceOptions

AT_FULL_SIZE = 3
"""Number of trials that may use all devices."""

SHARE = 4
"""Minimum ratio of a group's devices to those of its sibling."""

KEPT = ("tp", "cp", "up", "vpp", "ep", "mbs", *FURTHER_DIMENSIONS)
"""Dimensions that a proxy has in common with its candidate."""

DEVICES = GROUP.index("devices")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """A group and its sibling.

    Attributes:
        group: Group of the full job.
        sibling: Group of the same job on fewer devices.
        proxies: Proxy of each candidate, None if it has none [n].
        outcomes: Observation of a trial of each proxy.
    """

    group: Group
    sibling: Group
    proxies: tuple[Proxy | None, ...]
    outcomes: Mapping[Proxy, Observation]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("proxy_regret", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = searching("calibration.proxy_regret", __doc__)
    parser.add_argument("--seeds", type=count_at_least(1), default=10, help="runs on each group (10)")
    parser.add_argument("--proxies", type=count_at_least(1), default=12, help="maximum number of proxy trials (12)")
    parser.add_argument(
        "--share", type=count_at_least(2), default=SHARE, help="minimum ratio of a group's devices to its sibling's (4)"
    )
    parser.add_argument("--startup-s", type=float, default=60.0, help="time that a trial starts before its steps (60)")
    parser.add_argument(
        "--min-candidates", type=count_at_least(1), default=20, help="leave out groups with fewer candidates (20)"
    )
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: The arguments cannot be used.
    """
    runs, skipped = read_runs(given.measured)
    groups, left_out = groups_of(runs, given.min_candidates)
    pairs = pairs_of(groups, given.share)
    if not pairs:
        raise ConfigError(
            f"hold no two groups of one job, one on at most a part in {given.share} of the other's devices, with "
            f"{given.min_candidates} candidates or more each",
            key=", ".join(map(str, given.measured)),
            nearest=f"--min-candidates takes smaller ones; {reasons(skipped + left_out)}",
        )
    rows = []
    with mapper(given.workers) as each:
        figures = partial(_figures, num_proxies=given.proxies, seeds=given.seeds, startup_s=given.startup_s)
        for row in each(figures, pairs):
            rows.append(row)
            tell(f"{len(rows)} of {len(pairs)} groups: {row['model']} on {row['devices']} devices")
    names = rows[0]["mean_regret"]
    return {
        "groups": rows,
        "overall": {
            "mean_regret": {name: float(np.mean([row["mean_regret"][name] for row in rows])) for name in names},
            "median_regret": {name: float(np.median([row["mean_regret"][name] for row in rows])) for name in names},
            "mean_proxies": float(np.mean([row["mean_proxies"] for row in rows])),
            "mean_share_of_device_hours": {
                name: float(np.mean([row["share_of_device_hours"][name] for row in rows]))
                for name in rows[0]["share_of_device_hours"]
            },
        },
    }


def pairs_of(groups: Sequence[Group], share: int = SHARE) -> list[Pair]:
    """Return the groups that have a sibling, with the largest sibling of each on at most a part in `share`."""
    pairs = []
    for group in groups:
        siblings = [other for other in groups if _is_sibling(group, other, share)]
        if siblings:
            pairs.append(_pair(group, max(siblings, key=lambda other: other.runs[0].devices)))
    return pairs


def _is_sibling(group: Group, other: Group, share: int) -> bool:
    """Return whether the other group is the same job on at most a part in `share` of the devices."""
    same = all(
        one == another for name, one, another in zip(GROUP, group.key, other.key, strict=True) if name != "devices"
    )
    is_smaller = share * other.runs[0].devices <= group.runs[0].devices
    return same and is_smaller and group.runs[0].model == other.runs[0].model


def _pair(group: Group, sibling: Group) -> Pair:
    run = sibling.runs[0]
    devices_per_host = setting_of(group.runs[0], {}).setting.cluster.devices_per_host
    # Measured siblings keep layers and batch, unlike the proxies of a study, which may reduce them too.
    reduction = Reduction(
        hosts=run.devices // devices_per_host, layers=run.model.num_layers, global_batch_size=run.global_batch_size
    )
    smaller = [Proxy(reduction=reduction, config=run.config) for run in sibling.runs]
    return Pair(
        group=group,
        sibling=sibling,
        proxies=tuple(_nearest(run.config, smaller) for run in group.runs),
        outcomes=dict(zip(smaller, sibling.outcomes, strict=True)),
    )


def _nearest(config: ParallelConfig, smaller: Sequence[Proxy]) -> Proxy | None:
    """Return the proxy with the nearest pp among those that agree with the candidate in KEPT, or None."""
    # pp may differ, since fewer devices often leave no room for the candidate's own stages; the log makes 2x symmetric.
    alike = [proxy for proxy in smaller if proxy.config.values(KEPT) == config.values(KEPT)]
    return min(alike, key=lambda proxy: (abs(math.log(proxy.config.pp / config.pp)), proxy.config.pp), default=None)


def that_fit(pair: Pair, problem: Problem) -> Pair:
    """Return the pair with only those proxies that probably fit into memory."""
    setting = _setting(problem)
    fit = {proxy for proxy in pair.outcomes if probably_fits(proxy, setting, SpaceOptions())}
    return replace(pair, proxies=tuple(proxy if proxy in fit else None for proxy in pair.proxies))


def _figures(pair: Pair, num_proxies: int, seeds: int, startup_s: float) -> dict[str, Any]:
    """Compute the regrets and device-hours on one group."""
    group = pair.group
    problem = problem_of(group, ())
    pair = that_fit(pair, problem)
    times = group.step_time_s
    cost = partial(device_hours, startup_s=startup_s)
    regrets: dict[str, list[float]] = defaultdict(list)
    hours: dict[str, list[float]] = defaultdict(list)
    used = []
    for seed in range(seeds):
        smaller, at_full_size = run_with_proxies(pair, problem, num_proxies, seed)
        count = len(smaller)
        used.append(count)
        small_hours = sum(cost(pair.outcomes[proxy], proxy.config.num_devices) for proxy in smaller)
        for name, num_full in {"extrapolated": 0, "proxies": AT_FULL_SIZE}.items():
            regrets[name].append(regret_at(at_full_size, times, max(num_full, 1)))
            full_hours = sum(cost(group.outcomes[at], group.runs[at].devices) for at in at_full_size[:num_full])
            hours[name].append(small_hours + full_hours)
        for name, (make, num_trials) in {
            # The alternative gets the same number of trials, although each of them costs more devices.
            "all_at_full_size": (thompson, count + len(at_full_size)),
            "predicted": (prior, 1),
            "prior": (prior, AT_FULL_SIZE),
            "random": (uniform, AT_FULL_SIZE),
        }.items():
            # All alternatives are judged by the same regret on the same group and seed.
            found = run_trials(make(problem, seed), group.outcomes, times, num_trials)
            regrets[name].append(regret_at(found.order, times, num_trials))
            hours[name].append(sum(cost(group.outcomes[at], group.runs[at].devices) for at in found.order))
    mean_hours = {name: float(np.mean(values)) for name, values in hours.items()}
    return {
        **dict(zip(GROUP, group.key, strict=True)),
        "sibling_devices": pair.sibling.key[DEVICES],
        "num_candidates": len(times),
        "num_with_proxy": sum(proxy is not None for proxy in pair.proxies),
        "regret_of_best_with_proxy": _regret_of_best_with_proxy(pair),
        "runtime": problem.runtime,
        "mean_proxies": float(np.mean(used)),
        "mean_regret": {name: float(np.mean(values)) for name, values in regrets.items()},
        "mean_device_hours": mean_hours,
        "share_of_device_hours": {
            name: mean_hours[name] / mean_hours["all_at_full_size"] for name in ("extrapolated", "proxies")
        },
    }


def _regret_of_best_with_proxy(pair: Pair) -> float | None:
    """Return the slowdown of the best candidate that has a proxy; None if no such candidate ran."""
    times = pair.group.step_time_s
    # A lower bound on the regret of any choice that relies on proxies alone.
    with_proxy = [time_s for time_s, proxy in zip(times, pair.proxies, strict=True) if proxy is not None]
    best = min(with_proxy, default=math.inf)
    return float(best / times.min() - 1) if math.isfinite(best) else None


def run_with_proxies(pair: Pair, problem: Problem, num_proxies: int, seed: int) -> tuple[list[Proxy], list[int]]:
    """Run one study with proxies; return the proxies that ran, and then the candidates that ran at full size."""
    sampler = ThompsonSampler(problem.grid, problem.posterior, seed=seed, proxies=_plan(pair, problem, num_proxies))
    study = optuna.create_study(sampler=sampler)
    # The loop of a study, with answers from the measured group and its sibling in place of trials.
    ran: list[Proxy] = []
    at_full_size: list[int] = []
    while len(at_full_size) < min(AT_FULL_SIZE, len(pair.proxies)):
        observations = sampler.observations(study.get_trials(deepcopy=False))
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        assert position is not None, "the sampler names candidates only"
        proxy = sampler.proxy_for(observations, position)
        if proxy is None:
            at_full_size.append(position)
            outcome = pair.group.outcomes[position]
        else:
            ran.append(proxy)
            outcome = pair.outcomes[proxy]
            trial.set_user_attr(PROXY, proxy.as_json())
        trial.set_user_attr(OBSERVATION, outcome.as_json())
        trial.set_user_attr(STATUS, outcome.status)
        if proxy is None and outcome.step_time_s is not None:
            study.tell(trial, outcome.step_time_s)
        else:
            study.tell(trial, state=TrialState.FAIL if outcome.step_time_s is None else TrialState.PRUNED)
    return ran, at_full_size


def _plan(pair: Pair, problem: Problem, num_proxies: int) -> ProxyPlan:
    """Build a plan of proxies that are all known beforehand."""
    return ProxyPlan(
        options=ProxyOptions(hosts=1, layers="auto", full_trials=AT_FULL_SIZE),
        setting=_setting(problem),
        space=SpaceOptions(),
        grid=problem.grid,
        max_trials=num_proxies + AT_FULL_SIZE,
        confidence=0.95,
        known=dict(enumerate(pair.proxies)),
    )


def _setting(problem: Problem) -> Setting:
    """Return the setting of a group's full job."""
    assert problem.posterior.proxies is not None, "a group has one setting"
    return problem.posterior.proxies.measured.setting


def _print(result: Mapping[str, Any]) -> None:
    for row in result["groups"]:
        print(
            f"{row['model']} on {row['devices']} devices, proxies on {row['sibling_devices']}: "
            f"{row['num_with_proxy']} of {row['num_candidates']} candidates have one, "
            f"{row['mean_proxies']:.1f} ran; regret {_format_regrets(row['mean_regret'])}"
            + f"; of the device-hours {_format_regrets(row['share_of_device_hours'])}"
            + ("" if (best := row["regret_of_best_with_proxy"]) is None else f"; of the best with a proxy {best:.1%}")
        )
    print(f"All {len(result['groups'])} groups: mean {_format_regrets(result['overall']['mean_regret'])}")
    print(f"  median {_format_regrets(result['overall']['median_regret'])}")
    shares = _format_regrets(result["overall"]["mean_share_of_device_hours"])
    print(f"  of the device-hours of all at full size: {shares}")


def _format_regrets(regrets: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in regrets.items())


if __name__ == "__main__":
    sys.exit(main())
