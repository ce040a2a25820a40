"""The benchmark of uneven stages: what it compares, its figures and the command line."""

import argparse
import json
import math

import pytest

from benchmarks.papers import uneven_stages
from benchmarks.papers.uneven_stages import Compared, _layouts, compared, summary
from costmodels.job.parallel_config import ParallelConfig
from tests.support.benchmark_runs import run_from_root
from tuner.planners.engine.outcome import Known


@pytest.fixture(scope="module")
def setting():
    """The study of the paper."""
    return _layouts(32, 8, [16])[0]


@pytest.fixture(scope="module")
def figures():
    """Figures of all layouts with 16 stages and few micro-batches."""
    return uneven_stages.measure(argparse.Namespace(batch=4, hosts=8, pp=[16], workers=1))


def test_the_best_stages_are_faster_than_even_ones_that_recompute_everything(setting):
    """In one layout of the paper's model they gain more than a tenth, by both models, and fit in the same memory."""
    found = compared(setting, ParallelConfig(pp=16, tp=4, zero_stage=1, sequence_parallel=True))

    assert found.known == Known.OPTIMAL
    assert found.even.recompute == "full"
    assert sum(found.best.assignment.layers) == 80
    assert 0 < sum(found.best.assignment.recomputed) < 80
    assert found.gain(simulated=False) > 0.1
    assert found.gain(simulated=True) > 0.1


def test_one_micro_batch_can_be_planned():
    """Stages that hold one micro-batch at most can be planned, though recomputation saves them nothing."""
    alone = _layouts(2, 8, [16])[0]
    found = compared(alone, ParallelConfig(pp=16, tp=4, mbs=2, zero_stage=1, sequence_parallel=True))

    assert found.known in (Known.OPTIMAL, Known.INFEASIBLE)
    assert found.best_s <= found.even_s


def test_what_fits_in_no_way_has_no_step_time(setting):
    """A layout that exceeds the memory however it is cut is proven to, and compared with nothing."""
    found = compared(setting, ParallelConfig(pp=2, dp=32, zero_stage=0))

    assert (found.even, found.best, found.known) == (None, None, Known.INFEASIBLE)
    assert found.even_s == found.best_s == (math.inf, math.inf)


def test_gains_are_of_layouts_whose_even_stages_fit():
    """A layout that fits with uneven stages alone may be the fastest, but has no gain."""
    one, other = ParallelConfig(pp=2), ParallelConfig(pp=4)
    gained = Compared(config=one, even=one, best=one, known=Known.OPTIMAL, even_s=(12.0, 12.0), best_s=(10.0, 11.0))
    only = Compared(
        config=other, even=None, best=other, known=Known.OPTIMAL, even_s=(math.inf, math.inf), best_s=(8.0, 9.0)
    )
    figures = summary([gained, only], tokens=100.0)

    assert figures["gains"]["closed_form"]["max"] == pytest.approx(0.2)
    assert (figures["even_fit"], figures["only_uneven_fit"]) == (1, 1)
    assert figures["fastest"]["closed_form"]["best"]["tokens_per_s_per_device"] == 12.5
    assert figures["gain_of_fastest"] == {"closed_form": pytest.approx(0.5), "simulator": pytest.approx(1 / 3)}


def test_every_optimum_is_that_of_the_other_solvers(figures):
    """Every layout is proven, and HiGHS and the best of all plans agree wherever they were asked."""
    assert figures["proven"] == figures["layouts"] > figures["even_fit"] > 0
    assert len(figures["exactness"]) >= 20
    for row in figures["exactness"]:
        assert (row["known"], row["highs"]) == ("OPTIMAL", "OPTIMAL")
        assert row["highs_over_ours"] == pytest.approx(1, rel=1e-6)
        assert row["every_plan_over_ours"] in (None, pytest.approx(1, rel=1e-9))


def test_the_figures_in_json_and_in_words(figures, capsys):
    """The object has gains, the fastest, the paper's figures and exactness; in words each has a title."""
    told = json.loads(json.dumps(figures))
    uneven_stages.show(figures)
    out = capsys.readouterr().out

    assert told.keys() >= {"settings", "paper", "layouts", "gains", "fastest", "gain_of_fastest", "top", "exactness"}
    assert "on 64 Ascend 910B, 32K tokens, batch 4" in out
    assert "ManuMatic's Table 3, tokens/s: ManuMatic + BMPipe 225" in out


def test_no_layout_that_fits_is_one_message():
    """`python -m benchmarks.papers.uneven_stages` works as documented, and says so where nothing fits."""
    done = run_from_root("papers.uneven_stages", "--pp", "80", "--hosts", "10", "--workers", "1")

    assert (done.returncode, done.stdout) == (2, "")
    assert "--pp" in done.stderr
    assert "Traceback" not in done.stderr
