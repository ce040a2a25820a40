"""Entries of the catalog of known knobs: sources, values, conditions, and how mistakes are refused."""

import importlib.util
from pathlib import Path

import pytest

from costmodels.job.fact_words import read_facts
from costmodels.job.facts import facts
from costmodels.job.runtime import find_runtime
from hardware.io.errors import ConfigError
from tests.unit.tuner.export.test_export import setting_of
from trials.knobs.condition import parse_condition
from tuner.knobs.catalog import FRAMEWORK_OF_RULE_SET, FRAMEWORKS, catalog_file, find_known, framework_of, known_knobs
from tuner.knobs.needs import NEEDS
from tuner.study_file.knob_keys import AFFECTED, TAKEN

ENTRIES = [(framework, name) for framework in FRAMEWORKS for name in known_knobs(framework)]


@pytest.mark.parametrize(("framework", "name"), ENTRIES)
def test_an_entry_is_complete(framework, name):
    """Each entry says what it is, cites a source, and has at least two values or the dimension that searches it."""
    known = known_knobs(framework)[name]

    assert known.text.endswith(".")
    assert known.source in catalog_file(framework).sources.values()
    assert known.dimension or known.name not in TAKEN
    assert bool(known.dimension) != (len(known.values) >= 2)
    assert set(known.affects) <= AFFECTED.keys()


@pytest.mark.parametrize(("framework", "name"), ENTRIES)
def test_a_condition_compares_what_stands_before(framework, name):
    """The condition of an entry reads the dimensions of layouts, and knobs of the file that stand before it."""
    known = known_knobs(framework)
    before = list(known)[: list(known).index(name)]
    values = {other: tuple(value.value for value in known[other].values) for other in before}
    text = known[name].when

    assert not text or parse_condition(text, values).comparisons


@pytest.mark.parametrize(("framework", "name"), ENTRIES)
def test_effects_on_memory_are_said(framework, name):
    """A knob with a value that moves memory by a share says that it affects memory."""
    known = known_knobs(framework)[name]

    assert "memory" in known.affects or not any(value.memory for value in known.values)


def test_sources_are_used():
    """No file lists a source that no entry cites."""
    for framework in FRAMEWORKS:
        file = catalog_file(framework)
        cited = {cited for entry in file.knobs.values() for cited in (entry.source, entry.basis)}

        assert set(file.sources) <= cited, framework


def test_needs_are_used():
    """Every need is that of some entry."""
    needed = {need for framework in FRAMEWORKS for knob in known_knobs(framework).values() for need in knob.needs}

    assert needed == set(NEEDS)


def test_today_follows_the_profile():
    """The value in use is the one whose facts the runtime's profile has, such as overlapped gradients."""
    setting = setting_of("llama3-8b")
    overlap = find_known("megatron", "overlap_grad_reduce")

    assert overlap.today(setting.job, find_runtime("megatron-core")) is True
    assert overlap.today(setting.job, find_runtime("megatron-lm-2021")) is False


def test_a_default_may_hold_whatever_the_profile_assumes():
    """Without being told, torchtitan compiles nothing, though its profile was fitted to compiled runs."""
    setting = setting_of("llama3-8b")

    assert find_known("torchtitan", "compile").today(setting.job, find_runtime("torchtitan")) == "none"


def test_an_unknown_knob_is_refused_with_the_nearest():
    """A misspelt name is refused, and the nearest knob of the framework is named."""
    with pytest.raises(ConfigError, match=r"no known knob of Megatron-LM.*tp_comm_overlap"):
        find_known("megatron", "tp_com_overlap")


def test_a_knob_of_another_framework_is_refused_with_the_reason():
    """A knob of torchtitan in a study of Megatron-LM is refused as what it is."""
    with pytest.raises(ConfigError, match="is a knob of torchtitan, and this study's framework is Megatron-LM"):
        find_known("megatron", "async_tp")


def test_the_framework_is_the_one_that_trials_name():
    """Flags or a log of a framework count more than the runtime that predicts; other frameworks have no knobs."""
    assert framework_of("megatron", "nemo") == "nemo"
    assert framework_of("megatron", None) == "megatron"
    assert framework_of("megatron", "nanotron") is None
    assert framework_of("paddle", None) is None
    assert set(FRAMEWORK_OF_RULE_SET.values()) <= set(FRAMEWORKS)


@pytest.mark.slow  # DeepSpeed is optional
def test_keys_of_deepspeed_exist():
    """Each key of DeepSpeed's ZeRO section is a field of its configuration, by name or alias."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DeepSpeed is not installed (make frameworks)")
    text = (Path(spec.origin).parent / "runtime/zero/config.py").read_text(encoding="utf-8")
    keys = [knob.key for knob in known_knobs("deepspeed").values() if knob.key.startswith("zero_optimization.")]

    assert keys
    for key in keys:
        name = key.removeprefix("zero_optimization.")
        assert f"    {name}: " in text or f'alias="{name}"' in text, key


NO_KNOBS = {
    "fused_activation": "an activation that is not fused is slower and larger everywhere",
    "attention": "kernels that are not fused are slower everywhere",
    "expert_imbalance": "routing that is balanced by force trains nothing",
    "sharding": "each of the two ways has layouts and stages of its own, so that a study has one of them",
    "vocabulary_multiple": "it changes the model",
    "muon_tp_mode": "it changes what Muon learns",
    "muon_splits_qkv": "it changes what Muon learns",
    "newton_schulz": "it changes what Muon learns",
    "newton_schulz_steps": "it changes what Muon learns",
}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_what_a_framework_can_be_told_is_a_knob(framework):
    """Each fact for which a framework has a word or a variable is stated by the values of one of its knobs."""
    stated = {name for known in known_knobs(framework).values() for value in known.values for name, _ in value.facts}
    told = {fact.name for fact in facts().values() if {framework, "environment"} & fact.written.keys()}
    missing = told - stated - NO_KNOBS.keys()

    # torchtitan 0.3 reduces gradients in float32 only
    assert missing <= ({"expandable_segments", "gradient_message_bytes"} if framework == "torchtitan" else set())


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_words_of_knobs_say_their_facts(framework):
    """The words of a knob's value are read as the facts that the value states."""
    for known in known_knobs(framework).values():
        for value in known.values:
            flag = f"{known.flag} {value.value}" if known.flag and value.value is not None else ""
            words = flag if value.words is None else value.words
            given = {}
            for part in words.split("--")[1:]:
                name, *values = part.split()
                given[f"--{name}"] = tuple(values)
            told, unclear = read_facts(framework, given)
            assert not unclear
            for name, held in value.facts:
                assert told.get(name, held) == held, (known.name, value.value)
