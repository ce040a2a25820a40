"""The benchmark of uneven stages: what it compares, its figures and the command line."""

import argparse
import json

import pytest

from benchmarks.papers import uneven_stages
from benchmarks.papers.uneven_stages import _layouts, compared
from costmodels.job.parallel_config import ParallelConfig
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
