"""Known knobs that are recommended, and why others are not."""

from dataclasses import replace

import numpy as np

from hardware.cluster_file import find_cluster
from tests.unit.tuner.export.test_export import setting_of
from tuner.knobs import recommended
from tuner.knobs.catalog import known_knobs
from tuner.knobs.recommended import judge_knobs, leading_layouts
from tuner.space.enumeration import SpaceOptions, build_space


def verdicts(setting, framework="megatron", *, opened=()):
    """Verdicts on the knobs of a framework, by name."""
    options = SpaceOptions(opened=opened)
    grid = build_space(setting, options, current=None).grid
    leaders = leading_layouts(setting, grid, options.memory_headroom)
    return {one.known.name: one for one in judge_knobs(list(known_knobs(framework).values()), leaders)}


def test_what_the_study_lacks_is_not_recommended():
    """A dense model on Hopper gets no knob of experts and none of Blackwell, for the reason that is told."""
    found = verdicts(setting_of("llama3-8b"))

    assert found["moe_dispatcher"].reason == "needs a model with experts"
    assert "Blackwell" in found["cuda_device_max_connections_blackwell"].reason
    assert "dimension" in found["optimizer_offload"].reason
    assert not found["recompute_modules"].is_recommended


def test_knobs_that_alter_results_are_not_recommended():
    """No recommended knob changes the numbers that training computes with."""
    for framework in ("megatron", "torchtitan", "deepspeed"):
        found = verdicts(setting_of("llama3-8b"), framework)

        assert not any(one.is_recommended and one.known.alters_results for one in found.values())


def test_a_gain_is_told_apart_from_a_trifle():
    """A recommended knob may save at least LEAST_GAIN of the step, and all others less, or they are told why not."""
    found = verdicts(setting_of("mixtral-8x7b"), opened=("recompute",))

    assert any(one.is_recommended for one in found.values())
    for one in found.values():
        assert one.is_recommended <= (one.gain >= recommended.LEAST_GAIN)
        assert one.is_recommended or one.reason != f"may save {one.gain:.1%} of the step"


def test_the_cluster_decides():
    """Overlapped tp communication pays more on slow links inside hosts than on fast ones, where both have NVLink."""
    fast = setting_of("llama3-8b")
    slow = replace(fast, cluster=find_cluster("dgx-a100", fast.cluster.num_hosts))

    assert verdicts(slow)["tp_comm_overlap"].gain != verdicts(fast)["tp_comm_overlap"].gain


def test_conditions_on_recommended_knobs_hold():
    """A knob that needs another one's value is recommended only beside it: async TP beside compilation."""
    found = verdicts(setting_of("llama3-8b"), "torchtitan", opened=("zero_stage",))

    assert found["compile"].is_recommended
    assert found["async_tp"].is_recommended


def test_without_the_knob_that_it_needs_none_is_recommended(monkeypatch):
    """If only the best knob may stay, async TP goes with the compilation that it needs."""
    monkeypatch.setattr(recommended, "MOST_RECOMMENDED", 1)
    found = verdicts(setting_of("llama3-8b"), "torchtitan", opened=("zero_stage",))
    kept = [name for name, one in found.items() if one.is_recommended]

    assert len(kept) <= 1
    assert kept != ["async_tp"]
    assert any("others may save more" in one.reason for one in found.values())


def test_freed_memory_counts():
    """Recomputing other modules is recommended where a faster layout then fits."""
    setting = replace(setting_of("mixtral-8x7b"), cluster=find_cluster("dgx-h100", 2))
    found = verdicts(setting, opened=("recompute",))["recompute_modules_moe"]

    assert found.is_recommended
    assert "of the memory" in found.reason


def test_no_layout_is_said():
    """Where no layout is possible nothing is recommended, and the reason is that."""
    setting = setting_of("llama3-8b")
    grid = build_space(setting, SpaceOptions(), current=None).grid.take(np.array([], dtype=np.int64))
    found = judge_knobs(list(known_knobs("megatron").values()), leading_layouts(setting, grid, 0.08))

    assert not any(one.is_recommended for one in found)
    assert any(one.reason == "no layout is possible" for one in found)
