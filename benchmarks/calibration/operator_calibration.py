"""Measure the calibration of the operators' surrogate: FlexParallel's Figure 7 as a table, by kind of operator.

    python -m benchmarks.calibration.operator_calibration [--measured 64] [--seeds 5] [--trials 6] [--json]

On public measurements, a surrogate sees up to `--measured` shapes of one source and device. It then predicts the shapes
in a third of a size's range of which it saw nothing: large products after small ones, groups of eight after two and
four. Features and priors were chosen on some devices and are quoted on others, which were visible during the choice
(see configs/measured/README.md). The prior is quoted twice: as shipped, with constants and tables of kernels that were
made from some of these very rows, and as for a device without any measurements. The surrogate's form in the paper is
compared on the same shapes.

In simulated worlds, operators of some trials predict those of all other configurations, and their composition predicts
whole steps, one by one and in pairs.

Columns: coverage is the share inside the 95% interval, with 0.90 to 0.98 as the target. prior and surrogate are median
relative errors. width is the median width of the interval in units of the log. score is the mean log density of log
times; larger is better.

Letters: s shapes, d sizes of a shape, h held-out operators, M draws, n configurations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibration.measured_operators import MeasuredOperators, read_operators
from benchmarks.support.timing import publish, tell
from costmodels.blocks.operator import COLLECTIVES, OpKind
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.error_terms import step_terms
from costmodels.surrogates.operator_surrogate import (
    Form,
    Key,
    OperatorErrors,
    OperatorSurrogate,
    compose,
    fit_operators,
    key_of,
    timing_variance,
)
from hardware.arrays import FloatArray
from trials.simulated.backend import ERRING_PARTS, SimulatedBackend
from tuner.study_file.config import load_study

STUDY = Path(__file__).parents[2] / "configs" / "studies" / "flexparallel" / "gpt-13b-32.yaml"

CHOSEN_ON = frozenset({"V100-SXM-32", "A100-SXM-40", "A100-SXM-80", "A100-PCIe-80", "L40S"})
"""Devices on which features, priors and widths were chosen; the others are quoted."""

FEWEST_MEASURED = 16
"""Minimum number of operators of a kind; sources with fewer say little about any range of sizes."""

NUM_RANGES = 3
TIMING_VARIANCE = 0.01**2
"""Variance of the log of a published time, which is a mean over many executions (assumed)."""

IN_95_PERCENT = 1.96
NUM_DRAWS = 400
NUM_OTHERS = 40
"""Number of untried configurations whose operators are evaluated; steps are evaluated in all of them."""

NUM_PAIRS = 4000
"""Number of pairs of configurations whose difference is predicted."""

RANGES: dict[OpKind, dict[str, Callable[[FloatArray], FloatArray]]] = {
    OpKind.MATMUL: {"weights": lambda s: s[1] + s[2], "tokens": lambda s: s[0]},
    OpKind.GROUPED_MATMUL: {"weights": lambda s: s[2] + s[3], "tokens": lambda s: s[1] - s[0]},
    OpKind.ATTENTION: {"length": lambda s: s[2], "heads": lambda s: s[0] + s[1]},
    OpKind.NORM: {"hidden": lambda s: s[1], "tokens": lambda s: s[0]},
    OpKind.ELEMENTWISE: {"elements": lambda s: s[0]},
    **{kind: {"message": lambda s: s[0], "group": lambda s: s[1]} for kind in COLLECTIVES},
}
"""Sizes whose ranges are held out, as functions of the logarithms of a shape's sizes [d, s] -> [s]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Held-out operators of one kind and phase, h of them.

    Attributes:
        device: Name of the measured device.
        key: Kind and phase of the operators.
        log_error: log(measured / predicted), the error of the prior [h].
        mean: The surrogate's mean of the log error [h].
        deviation: The surrogate's standard deviation, including that of the measurement [h].
        form: Quantity that the surrogate learned.
    """

    device: str
    key: Key
    log_error: FloatArray
    mean: FloatArray
    deviation: FloatArray
    form: Form = Form.LOG

    @property
    def errors(self) -> FloatArray:
        """Errors of the surrogate in standard deviations, of the quantity that its form considers normal [h]."""
        if self.form is Form.LOG:
            return (self.log_error - self.mean) / self.deviation
        return np.asarray(np.expm1(self.log_error - self.mean) / self.deviation)

    @property
    def log_density(self) -> FloatArray:
        """Log density of the logarithm of each time [h]."""
        density = -0.5 * self.errors**2 - np.log(self.deviation) - 0.5 * np.log(2 * np.pi)
        if self.form is Form.RELATIVE:  # the density is one of e, and d e / d log(1 + e) = 1 + e
            density = density + self.log_error - self.mean
        return np.asarray(density)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    given = _arguments(argv)
    found = measured_tables(given.measured) | simulated_tables(given.seeds, given.trials)
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, rows in found.items():
        print(f"\n{name.replace('_', ' ')}")
        publish(rows, as_json=False)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration.operator_calibration", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--measured", type=int, default=64, help="maximum number of shapes that a surrogate sees (64)")
    parser.add_argument("--seeds", type=int, default=5, help="simulated worlds (5)")
    parser.add_argument("--trials", type=int, default=6, help="trials in each simulated world (6)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def measured_tables(most_measured: int) -> dict[str, list[dict[str, Any]]]:
    """Compute the tables of held-out public measurements."""
    operators = [each for each in read_operators() if len(each.shape) >= FEWEST_MEASURED]
    chosen_on = [each for each in operators if each.device in CHOSEN_ON]
    quoted = [each for each in operators if each.device not in CHOSEN_ON]
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, some, as_unlisted in (
        ("quoted", quoted, True),
        ("quoted_with_shipped_constants", quoted, False),
        ("chosen_on", chosen_on, True),
    ):
        tell(f"{name}: {sum(len(each.shape) for each in some)} operators")
        tables[name] = by_kind(held_out(some, most_measured, as_unlisted=as_unlisted))
    tables["forms"] = [
        {"form": str(form), **figures(held_out(quoted, most_measured, as_unlisted=True, form=form))} for form in Form
    ]
    return tables


def held_out(
    operators: Sequence[MeasuredOperators], most_measured: int, *, as_unlisted: bool, form: Form = Form.LOG
) -> list[HeldOut]:
    """Predict every operator once for each range of sizes in which it lies, from operators outside of that range."""
    found = []
    for each in operators:
        log_error = np.log(each.measured_s / (each.unlisted_s if as_unlisted else each.predicted_s))
        rng = np.random.default_rng(0)
        for held in ranges(each.kind, each.shape):
            # A random subset covers all sizes that may be seen.
            seen = rng.permutation(np.flatnonzero(~held))[:most_measured]
            surrogate = fit_operators(
                [
                    OperatorErrors(
                        kind=each.kind,
                        phase=each.phase,
                        shape=each.shape[seen],
                        log_error=log_error[seen],
                        variance=np.full(len(seen), TIMING_VARIANCE),
                    )
                ],
                form,
            )
            mean, deviation = surrogate.mean_and_deviation(each.kind, each.phase, each.shape[held])
            found.append(
                HeldOut(
                    device=each.device,
                    key=key_of(each.kind, each.phase),
                    log_error=log_error[held],
                    mean=mean,
                    deviation=np.sqrt(deviation**2 + TIMING_VARIANCE),
                    form=form,
                )
            )
    return found


def ranges(kind: OpKind, shape: FloatArray) -> Iterator[NDArray[np.bool_]]:
    """Yield for each size and each third of its range which shapes lie in it [s]; of two values, each is a range."""
    for size_of in RANGES[kind].values():
        size = size_of(np.log2(shape.T))
        if len(np.unique(size)) < NUM_RANGES:
            part = np.unique(size, return_inverse=True)[1]
        else:
            # Equal numbers of shapes in each third, whatever the distribution of sizes.
            part = np.searchsorted(np.quantile(size, np.arange(1, NUM_RANGES) / NUM_RANGES), size, side="right")
        for index in np.unique(part):
            if not np.all(part == index):
                yield part == index


def by_kind(found: Sequence[HeldOut]) -> list[dict[str, Any]]:
    """Compute one row of figures for each kind and phase, and one for all."""
    keys = sorted({each.key for each in found}, key=str)
    rows = [_row(key, [each for each in found if each.key == key]) for key in keys]
    return [*rows, {"kind": "all", "phase": "", **figures(found)}]


def _row(key: Key, found: Sequence[HeldOut]) -> dict[str, Any]:
    return {"kind": str(key[0]), "phase": str(key[1] or ""), **figures(found)}


def figures(found: Sequence[HeldOut]) -> dict[str, Any]:
    """Summarise some held-out operators."""
    # All held-out operators count alike, whatever their source and range.
    log_error, mean, deviation, errors, density = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("log_error", "mean", "deviation", "errors", "log_density")
    )
    return {
        "n": len(log_error),
        "coverage": float(np.mean(np.abs(errors) < IN_95_PERCENT)),
        "prior": float(np.median(np.abs(np.expm1(log_error)))),
        "surrogate": float(np.median(np.abs(np.expm1(log_error - mean)))),
        "width": float(np.median(2 * IN_95_PERCENT * deviation)),
        "score": float(np.mean(density)),
    }


def simulated_tables(num_seeds: int, num_trials: int) -> dict[str, list[dict[str, Any]]]:
    """Compute the tables of held-out operators and steps of simulated worlds."""
    study = load_study(STUDY)
    space = study.problem.space().grid
    found: list[HeldOut] = []
    steps: dict[Form, list[dict[str, float]]] = {form: [] for form in Form}
    for seed in range(num_seeds):
        tell(f"world {seed} of {num_seeds}")
        world = SimulatedBackend(
            job=study.problem.setting.job,
            cluster=study.problem.setting.cluster,
            runtime=study.problem.setting.runtime,
            seed=seed,
        )
        # Only configurations that run in this world have operators to sample.
        grid = space.take(np.flatnonzero(world.hidden_memory(space).fits(0.0)))
        order = np.random.default_rng(seed).permutation(len(grid))
        trials, others = order[:num_trials], order[num_trials:]
        errors = [some for index in trials for some in sampled(world, grid.config(int(index)))]
        surrogate = fit_operators(errors)
        found += held_out_samples(world, surrogate, errors, [grid.config(int(index)) for index in others[:NUM_OTHERS]])
        for form in Form:
            steps[form].append(composed(world, fit_operators(errors, form), grid.take(others), seed))
    return {
        "simulated_operators": by_kind(found),
        "simulated_steps": [
            {"form": str(form), **{name: float(np.mean([row[name] for row in rows])) for name in rows[0]}}
            for form, rows in steps.items()
        ],
    }


def sampled(world: SimulatedBackend, config: ParallelConfig) -> list[OperatorErrors]:
    """Return the operators of one trial with their errors, where predictions are those of a world without errors."""
    # The cost model's predictions are those of the same world without its errors.
    believed = replace(world, operator_error=0.0, noise=0.0)
    pairs = zip(
        world.measure(config, trial_number=0).operator_samples,
        believed.measure(config, trial_number=0).operator_samples,
        strict=True,
    )
    return [
        OperatorErrors(
            kind=seen.kind,
            phase=seen.phase,
            shape=np.array([seen.shape], dtype=np.float64),
            log_error=np.log([seen.time_s / expected.time_s]),
            variance=timing_variance(np.array([seen.count])),
        )
        for seen, expected in pairs
    ]


def held_out_samples(
    world: SimulatedBackend,
    surrogate: OperatorSurrogate,
    errors: Sequence[OperatorErrors],
    others: Sequence[ParallelConfig],
) -> list[HeldOut]:
    """Predict noise-free operators of other configurations, of shapes that no trial has run."""
    # A shape that a trial has run is known and would flatter the surrogate.
    seen = {(*key_of(some.kind, some.phase), tuple(some.shape[0])) for some in errors}
    unseen: dict[Key, dict[tuple[float, ...], float]] = {}
    for config in others:
        for some in sampled(replace(world, noise=0.0), config):
            key, sizes = key_of(some.kind, some.phase), tuple(some.shape[0])
            if surrogate.knows(*key) and (*key, sizes) not in seen:
                unseen.setdefault(key, {})[sizes] = float(some.log_error[0])
    found = []
    for key, log_errors in unseen.items():
        mean, deviation = surrogate.mean_and_deviation(*key, np.array(list(log_errors)))
        found.append(
            HeldOut(
                device=world.cluster.devices[0].name,
                key=key,
                log_error=np.array(list(log_errors.values())),
                mean=mean,
                deviation=deviation,
            )
        )
    return found


def composed(world: SimulatedBackend, surrogate: OperatorSurrogate, grid: ConfigGrid, seed: int) -> dict[str, float]:
    """Compare draws of whole steps with the change that operators cause in this world, one by one and in pairs."""
    believed = replace(world, operator_error=0.0)
    predicted, hidden = believed.hidden_step(grid), world.hidden_step(grid)
    # other parts err too in this world, but operators cannot explain their errors
    # A step with this world's errors in the operators' parts alone, so that only their effect is compared.
    moved_s = [
        predicted.breakdown_s[part] if part in ERRING_PARTS else seconds for part, seconds in hidden.breakdown_s.items()
    ]
    change = np.log(np.sum(moved_s, axis=0) / predicted.step_time_s)
    terms = step_terms(world.setting, grid, memory=world.hidden_memory(grid))
    rng = np.random.default_rng(seed)
    # Draws of operators' errors are propagated through the elasticities of the step time to its terms.
    composition = compose(terms, surrogate, NUM_DRAWS, rng)
    drawn = composition.mean + composition.deviation
    # A tuner compares configurations; errors common to both cancel in the difference.
    left, right = rng.integers(0, len(grid), (2, NUM_PAIRS))
    return {
        "prior": float(np.median(np.abs(np.expm1(change)))),
        "surrogate": float(np.median(np.abs(np.expm1(change - composition.mean)))),
        **_cover(drawn, change, ""),
        **_cover(drawn[:, left] - drawn[:, right], change[left] - change[right], "_of_pairs"),
    }


def _cover(drawn: NDArray[np.floating], truth: FloatArray, suffix: str) -> dict[str, float]:
    """Measure how well draws [M, n] cover the truth [n]; the density is a normal's with their mean and deviation."""
    # The interval comes from the draws themselves, so that it need not be symmetric.
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    deviation = drawn.std(axis=0)
    apart = deviation > 0  # a configuration paired with itself has no deviation
    errors = (truth - drawn.mean(axis=0))[apart] / deviation[apart]
    # Log density of a normal distribution.
    density = -0.5 * errors**2 - np.log(deviation[apart]) - 0.5 * np.log(2 * np.pi)
    return {
        f"coverage{suffix}": float(np.mean((truth >= low) & (truth <= high))),
        f"width{suffix}": float(np.median(high - low)),
        f"score{suffix}": float(np.mean(density)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
