"""The benchmark of the operators' surrogate, and the measured operators that it is judged by."""

import json

import numpy as np
import pytest

from benchmarks.calibration import operator_calibration
from benchmarks.calibration.measured_operators import FILES, OPERATORS, read_operators
from benchmarks.calibration.operator_calibration import CHOSEN_ON, HeldOut, by_kind, figures, held_out, ranges
from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.surrogates.operator_surrogate import Form

MEASURED = [kind for kind in OpKind if kind is not OpKind.SCAN]
"""Kinds of operators with published times; nobody has published those of scans by size."""

FIGURES = {"n", "coverage", "prior", "surrogate", "width", "score"}


@pytest.fixture(scope="module")
def operators():
    """All measured operators that are shipped."""
    return read_operators()


@pytest.fixture(scope="module")
def quoted(operators):
    """Held-out operators of the devices that nothing was chosen on."""
    some = [each for each in operators if each.device not in CHOSEN_ON and len(each.shape) >= 16]
    return held_out(some, 64, as_unlisted=True)


def test_shipped_operators_are_small_and_cover_every_kind(operators):
    """The files stay below 300 KB together, hold every kind of operator, and are described in the README."""
    readme = (OPERATORS.parent / "README.md").read_text(encoding="utf-8")

    assert sum((OPERATORS / name).stat().st_size for name in FILES) < 300_000
    assert {each.kind for each in operators} == set(MEASURED)
    assert {each.phase for each in operators} == set(Phase)
    assert all(f"ops/{name}" in readme for name in FILES)
    assert all(f"`{source}`" in readme for source in {each.source for each in operators})


def test_the_cost_model_is_in_the_neighbourhood_of_every_operator(operators):
    """No kernel's time is off by a factor of 4, and no collective's by 20, as units taken for others would be.

    Collectives of a box without peer-to-peer transfers, or with a slower network than its device has in the catalog,
    take up to 17 times as long.
    """
    for each in operators:
        most = 20 if each.kind in COLLECTIVES else 4
        for predicted_s in (each.predicted_s, each.unlisted_s):
            error = np.abs(np.log(each.measured_s / predicted_s))
            assert error.max() < np.log(most), (each.source, each.device, each.kind)


def test_held_out_shapes_are_whole_ranges(operators):
    """The shapes of one range of one size are held out together; every shape is held out once for each size."""
    products = next(each for each in operators if each.kind is OpKind.MATMUL)
    weights = products.shape[:, 1] * products.shape[:, 2]

    held = list(ranges(OpKind.MATMUL, products.shape))

    assert len(held) == 6
    assert np.array_equal(np.sum(held, axis=0), np.full(len(products.shape), 2))
    low, middle, high = (weights[part] for part in held[:3])
    assert low.max() < middle.min()
    assert middle.max() < high.min()


@pytest.mark.parametrize("kind", MEASURED)
def test_intervals_hold_on_devices_that_nothing_was_chosen_on(quoted, kind):
    """At least 90% of each kind's held-out times lie in the 95% interval."""
    assert figures([each for each in quoted if each.key[0] is kind])["coverage"] >= 0.90


def test_the_surrogate_is_closer_than_the_prior(quoted):
    """The median error of held-out times falls to less than half of the prior's."""
    found = figures(quoted)

    assert found["surrogate"] < 0.5 * found["prior"]


def test_logarithms_are_better_held_out_than_the_papers_form(operators, quoted):
    """On the same held-out times the paper's form covers less and gives them a lower density."""
    some = [each for each in operators if each.device not in CHOSEN_ON and len(each.shape) >= 16]

    ours, papers = figures(quoted), figures(held_out(some, 64, as_unlisted=True, form=Form.RELATIVE))

    assert ours["score"] > papers["score"]
    assert abs(ours["coverage"] - 0.95) < abs(papers["coverage"] - 0.95)


@pytest.mark.parametrize("form", list(Form))
def test_densities_are_densities(form):
    """The densities of all log times under one prediction integrate to one."""
    log_error = np.linspace(-3, 3, 20_001)
    one = HeldOut(
        device="any",
        key=(OpKind.MATMUL, Phase.FORWARD),
        log_error=log_error,
        mean=np.full_like(log_error, 0.2),
        deviation=np.full_like(log_error, 0.15),
        form=form,
    )

    assert np.exp(one.log_density).sum() * (log_error[1] - log_error[0]) == pytest.approx(1.0, abs=1e-3)


def test_coverage_is_that_of_a_normal_distribution():
    """Errors drawn from what was predicted are covered 95% of the time; from twice the width, two thirds of it."""
    rng = np.random.default_rng(0)

    def coverage(spread):
        log_error = spread * rng.standard_normal(20_000)
        flat = np.zeros(20_000)
        one = HeldOut(device="any", key=(OpKind.NORM, None), log_error=log_error, mean=flat, deviation=flat + 0.1)
        return by_kind([one])[-1]["coverage"]

    assert coverage(0.1) == pytest.approx(0.95, abs=0.01)
    assert coverage(0.2) == pytest.approx(0.673, abs=0.01)


def test_the_program_prints_its_tables(capsys, monkeypatch):
    """`--json` gives every table: measured and simulated, by kind, and both forms."""
    few = [each for each in read_operators() if each.kind in (OpKind.NORM, OpKind.SEND_RECV)]
    monkeypatch.setattr(operator_calibration, "read_operators", lambda: few)

    assert operator_calibration.main(["--measured", "16", "--seeds", "1", "--trials", "3", "--json"]) == 0

    tables = json.loads(capsys.readouterr().out)
    assert set(tables) == {
        "quoted",
        "quoted_with_shipped_constants",
        "chosen_on",
        "forms",
        "simulated_operators",
        "simulated_steps",
    }
    assert {row["kind"] for row in tables["quoted"]} == {"norm", "send_recv", "all"}
    assert all(set(row) >= FIGURES for name in ("quoted", "forms", "simulated_operators") for row in tables[name])
    assert [row["form"] for row in tables["simulated_steps"]] == list(Form)


def test_operators_of_some_trials_tell_of_those_of_others():
    """In a simulated world, three trials bring the median error of unseen operators and of whole steps below a third of
    the prior's, with at least 90% in the 95% interval.
    """
    tables = operator_calibration.simulated_tables(1, 3)

    unseen, steps = tables["simulated_operators"][-1], tables["simulated_steps"][0]
    assert unseen["surrogate"] < unseen["prior"] / 3
    assert steps["surrogate"] < steps["prior"] / 3
    assert min(unseen["coverage"], steps["coverage"], steps["coverage_of_pairs"]) >= 0.90
