"""Planned layers as a pipeline: sums by hand, recomputation, and best stages beside equal ones."""

import math

import pytest

from benchmarks.papers.layer_figures import LayerFigures, Share
from benchmarks.papers.layer_pipelines import pipeline_of_figures, with_best_stages, with_equal_shares
from tuner.planners.engine.outcome import Limits

FIGURES = LayerFigures(
    layer=Share(
        forward_s=1.0,
        backward_s=2.0,
        once_s=0.25,
        synced_s=0.5,
        state_bytes=10.0,
        gradient_bytes=3.0,
        partial_gradient_bytes=5.0,
        kept_bytes=4.0,
    ),
    first=Share(forward_s=0.1, backward_s=0.2, state_bytes=7.0),
    last=Share(forward_s=0.5, backward_s=1.0, synced_s=0.125, state_bytes=7.0, kept_bytes=2.0),
    entry_bytes=1.0,
    working_bytes=6.0,
)


def pipeline(*, pp=1, m=1, capacity=math.inf, may_recompute=False, figures=FIGURES):
    """Eight layers."""
    return pipeline_of_figures(
        figures, num_layers=8, pp=pp, num_micro_batches=m, capacity_bytes=capacity, may_recompute=may_recompute
    )


def test_one_stage_adds_up():
    """Three micro-batches are three times all layers and both ends, and what runs once a step once."""
    score = with_equal_shares(pipeline(m=3), FIGURES, recomputes=False)

    assert score.step_s == pytest.approx(3 * (8 * 3.0 + 0.3 + 1.5) + 8 * 0.75 + 0.125)
    assert score.peak_bytes == pytest.approx(8 * (10 + 5 + 4) + 7 + 7 + 2 + 6)


def test_stages_wait_for_each_other():
    """Four stages and eight micro-batches: seven times the slowest, and once through all."""
    score = with_equal_shares(pipeline(pp=4, m=8), FIGURES, recomputes=False)

    stages = [6.3, 6.0, 6.0, 7.5]
    assert score.step_s == pytest.approx(7 * 7.5 + sum(stages) + 2 * 0.75 + 0.125)


def test_best_stages_are_no_slower_and_fit():
    """Planned stages recompute less and are faster where equal shares must recompute everything to fit."""
    problem = pipeline(pp=2, m=8, capacity=95.0, may_recompute=True)
    equal = with_equal_shares(problem, FIGURES, recomputes=True)
    best = with_best_stages(problem, FIGURES, limits=Limits())

    assert equal.fits
    assert best.fits
    assert best.is_proven
    assert best.step_s < equal.step_s
    assert sum(best.recomputed) < sum(equal.recomputed) == 8
