"""A few of the variants that `python -m benchmarks.judges.sane_numbers` checks, drawn anew by Hypothesis."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from benchmarks.judges import sane_numbers
from benchmarks.judges.sane_numbers import Figures, checked, cluster_labels, drawn, share_of_peak
from costmodels.job.model_catalog import model_names
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.step_time import estimate_step, model_flops_utilisation


@settings(max_examples=6)
@given(st.sampled_from(model_names()), st.sampled_from(cluster_labels()), st.integers(0, 10**6), st.booleans())
def test_predictions_of_any_model_on_any_cluster_are_numbers(model, cluster, seed, is_deep):
    """Times, memory, shares, errors, terms, stages, proxies and simulated steps are finite, of the right sign, and sums
    of their parts, for whatever the catalogs combine to.
    """
    variant = drawn(model, cluster, default_rng(seed))

    found = checked(variant, is_deep, most=60, some=4)

    assert found.violations == ()
    assert found.numbers > 0 or not found.candidates


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([1.0, np.nan], {}),
        ([1.0, np.inf], {}),
        ([1.0, -1.0], {"least": 0.0}),
        ([1.0, 0.0], {"above": 0.0}),
        ([1.0, 1.1], {"most": 1.0}),
    ],
    ids=["nan", "infinity", "negative", "zero", "too large"],
)
def test_what_is_no_number_is_found(values, limits):
    """A wrong number among right ones is a violation, and the right ones alone are none."""
    figures = Figures()

    figures.look("a time", values[:1], **limits)
    assert figures.wrong == []
    figures.look("a time", values, **limits)

    assert len(figures.wrong) == 1
    assert figures.wrong[0].startswith("a time: ")
    assert figures.count == 3


def test_an_exception_is_a_violation(monkeypatch):
    """A prediction that raises, or warns, is told with its place, and ends no sweep."""

    def broken(*_arguments):
        return np.array([1.0]) / np.array([0.0])

    monkeypatch.setattr(sane_numbers, "enumerate_space", broken)

    found = checked(drawn("llama3-8b", "dgx-h100", default_rng(0)))

    assert [violation.partition(":")[0] for violation in found.violations] == ["FloatingPointError"]


def test_mfu_counts_the_masked_half():
    """At 131,072 tokens MFU as PaLM counts it passes 1 where attention is fast, and the work that is done does not."""
    variant = drawn("llama3-8b", "l20", default_rng(0))
    job = {"sequence_length": 131072, "global_batch_size": 8, "precision": "bf16", "recompute": "selective"}
    setting = replace(variant, hosts=1, runtime="megatron-core", job=tuple(job.items())).setting
    grid = ConfigGrid.from_configs([ParallelConfig(dp=4, cp=2)])

    step_s = estimate_step(setting, grid).step_time_s

    assert model_flops_utilisation(setting.job, setting.cluster, step_s)[0] > 1
    assert 0.5 < share_of_peak(setting, step_s)[0] < 1


def test_sweep_prints_one_object(answered):
    """The program tells what it has looked at, and that nothing is violated."""
    told = answered(sane_numbers, "--only", "gpt-22b", "--clusters", "l20", "--variants", 1, "--workers", 1)

    assert (told["pairs"], told["variants"], told["violations"]) == (1, 1, [])
    assert told["predicted"] <= told["candidates"]
    assert json.dumps(told, allow_nan=False)
