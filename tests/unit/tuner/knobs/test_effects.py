"""Expected effects of known knobs on layouts, by the cost model and by shares of parts."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.facts import with_facts
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tests.unit.tuner.export.test_export import setting_of
from tuner.knobs.catalog import FRAMEWORKS, find_known, known_knobs
from tuner.knobs.effects import effects_of, predict, share_of, width_of
from tuner.knobs.known_knob import KnownKnob, KnownValue
from tuner.knobs.needs import unmet_needs
from tuner.space.enumeration import SpaceOptions, build_space

SETTING = setting_of("llama3-8b")
GRID = build_space(SETTING, SpaceOptions(opened=("recompute",)), current=None).grid
PREDICTED = predict(SETTING, GRID.take(np.arange(0, len(GRID), max(len(GRID) // 60, 1))))


def effects(known):
    """Effects of all values of a knob, relative to the one in use."""
    values = [value.value for value in known.values]
    return effects_of(known, values, known.today(SETTING.job, SETTING.runtime), PREDICTED)


def test_a_fact_is_predicted_anew():
    """Overlapping tp collectives is expected to do what the cost model says of a runtime that overlaps them."""
    known = find_known("megatron", "tp_comm_overlap")
    changed = replace(SETTING, runtime=replace(SETTING.runtime, overlaps_tensor=True))
    expected = np.log(estimate_step(changed, PREDICTED.grid).step_time_s / PREDICTED.unstalled_s)

    found = effects(known).step

    assert np.allclose(found[:, 1], expected)
    assert found[:, 1].min() < -0.01
    assert not found[:, 0].any()


@pytest.mark.parametrize("framework", ["megatron", "nemo"])
def test_the_scaling_of_fp8_is_predicted_anew(framework):
    """Current scaling is expected to do what the fact does, and where the fact is stated it is today's value."""
    known = find_known(framework, "fp8_recipe")
    delayed = replace(SETTING, job=replace(SETTING.job, precision="fp8"))
    current = replace(delayed, runtime=with_facts(delayed.runtime, (("fp8_recipe", "tensorwise"),)))
    predicted = predict(delayed, PREDICTED.grid)
    expected = np.log(estimate_step(current, PREDICTED.grid).step_time_s / predicted.unstalled_s)

    found = effects_of(known, ["delayed", "tensorwise", "blockwise"], "delayed", predicted).step

    assert np.allclose(found[:, 1], expected)
    assert found[:, 1].min() > 0
    assert found[:, 1].max() > 0.05
    assert (known.today(delayed.job, delayed.runtime), known.today(current.job, current.runtime)) == (
        "delayed",
        "tensorwise",
    )


def test_recomputed_modules_are_counted_by_the_memory_model():
    """Recomputing MLPs frees the memory that the memory model says it does, where a layout recomputes selectively."""
    known = find_known("megatron", "recompute_modules")
    changed = replace(SETTING, job=replace(SETTING.job, recompute_modules=("mlp",)))
    expected = np.log(estimate_memory(changed, PREDICTED.grid).needed_bytes / PREDICTED.memory.needed_bytes)

    found = effects(known).memory[:, [value.value for value in known.values].index("mlp")]

    assert np.allclose(found, expected)
    assert found.min() < -0.01


def test_a_share_changes_its_part():
    """A value that halves the optimizer's states frees half of their part of the needed memory."""
    known = KnownKnob(
        name="halved",
        framework="megatron",
        text="",
        values=(KnownValue(value=False), KnownValue(value=True, memory=(("optimizer", -0.5),), step=(("dp", 1.0),))),
        source="",
        basis="",
        affects=("dp communication", "memory"),
        width=0.2,
    )
    memory = PREDICTED.memory
    freed = 0.5 * memory.parts_bytes["optimizer"] / memory.needed_bytes

    found = effects(known)

    assert np.allclose(np.exp(found.memory[:, 1]), 1 - freed)
    share = PREDICTED.estimate.breakdown_s["dp"] / PREDICTED.estimate.step_time_s
    assert np.allclose(np.exp(found.step[:, 1]), 1 + share)
    assert np.allclose(share_of(known, PREDICTED), share)
    assert np.allclose(width_of(known, PREDICTED), 0.2 * share)


def test_effects_are_relative_to_today():
    """The effects relative to another value in use differ by the effect of that value."""
    known = find_known("torchtitan", "compile")
    values = [value.value for value in known.values]

    of_none = effects_of(known, values, "none", PREDICTED).step
    of_model = effects_of(known, values, "model", PREDICTED).step

    assert np.allclose(of_model, of_none - of_none[:, [1]])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_effects_are_finite(framework):
    """Every value of every knob that suits the model has a finite expected effect on each layout."""
    for known in known_knobs(framework).values():
        if known.dimension or unmet_needs(SETTING, known.needs):
            continue
        found = effects(known)

        assert np.isfinite(found.step).all(), known.name
        assert np.isfinite(found.memory).all(), known.name
        assert np.abs(found.step).max() < 3, known.name
