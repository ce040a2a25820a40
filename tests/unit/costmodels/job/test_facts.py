"""Table of the facts of a run: its rows, their values, and what they set in a profile."""

from dataclasses import fields, replace
from typing import get_type_hints

import pytest

from costmodels.job.facts import facts, find_fact, parse_facts, profile_fields, shown, under_profile, with_facts
from costmodels.job.runtime import RuntimeProfile, find_runtime, runtime_names
from costmodels.job.setting import Setting
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.settings.random_settings import job_of

MEGATRON = find_runtime("megatron-core")


def test_rows_set_fields_of_a_profile():
    """Every value of every fact is one that its fields may have, and a profile that has it is told so."""
    hints = get_type_hints(RuntimeProfile)
    for fact in facts().values():
        for value in fact.values or fact.bounds:
            for name, held in fact.fields_of(value).items():
                assert name in hints
                assert isinstance(held, int | float | str)
            own = with_facts(MEGATRON, ((fact.name, value),))
            assert fact.fields_of(fact.holds_in(own)) == fact.fields_of(value)


def test_all_that_a_runtime_does_is_a_fact():
    """Fields of a profile that are true or false are rows, or parts of the values of one."""
    hints = get_type_hints(RuntimeProfile)
    held = {name for fact in facts().values() for value in fact.values for name in fact.fields_of(value)}
    plain = {field.name for field in fields(RuntimeProfile) if hints[field.name] is bool}

    assert plain - {"knows_cluster", "knows_memory", "whole_experts", "fsdp2_mixed"} <= held


@pytest.mark.parametrize("runtime", runtime_names())
def test_a_profile_has_a_value_of_every_fact(runtime):
    """What the catalog says of a runtime can be said of a run."""
    profile = find_runtime(runtime)
    for fact in facts().values():
        held = fact.holds_in(profile)
        assert held is not None
        assert fact.value_of(shown(held)) == held


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dispacher": "alltoall"}, r"facts\.dispacher: is no fact of a run; did you mean 'dispatcher'"),
        ({"dispatcher": "deep"}, r"facts\.dispatcher = 'deep': is not among its values; did you mean 'deepep'"),
        ({"overlaps_experts": "maybe"}, r"facts\.overlaps_experts = 'maybe': .*valid: false, true"),
        ({"gradient_bytes": 9}, r"facts\.gradient_bytes = 9: must be a whole number from 1 to 8; 8"),
        ({"gradient_bytes": 2.5}, r"facts\.gradient_bytes = 2\.5: must be a whole number"),
        ({"first_moment_bytes": 3}, r"facts\.first_moment_bytes = '3': is not among its values"),
        ({"expert_imbalance": True}, r"facts\.expert_imbalance = True: must be a number from 0 to 10"),
        ({"offload_share": "nan"}, r"facts\.offload_share = 'nan': must be a number from 0 to 1"),
        ({"loss_chunks": "9" * 30}, r"facts\.loss_chunks = '9+': must be a whole number"),
    ],
)
def test_what_is_no_fact_is_told(given, message):
    """An unknown fact, or a value that it cannot have, comes with the nearest valid choice."""
    with pytest.raises(ConfigError, match=message):
        parse_facts(given)


def test_spellings_do_not_matter():
    """Case and dashes are free, and the names of earlier tables still count."""
    assert parse_facts({"dispatcher": "Hybrid-EP", "captured_graph": True}) == (
        ("captured_graph", "full"),
        ("dispatcher", "hybridep"),
    )


def test_the_more_exact_fact_counts():
    """A fact that is one field goes before one that sets several."""
    told = parse_facts({"deduplicates_tokens": True, "dispatcher": "alltoall"})

    assert profile_fields(told) == {"gathers_tokens": False, "deduplicates_tokens": True}


def test_a_later_level_goes_before_an_earlier_one():
    """What is said last replaces all that was said of the same fields, however exact that was."""
    script = with_facts(MEGATRON, parse_facts({"deduplicates_tokens": False, "gradient_bytes": 2}))
    study = with_facts(script, parse_facts({"dispatcher": "hybridep"}))

    assert study.deduplicates_tokens
    assert study.stated == (("dispatcher", "hybridep"), ("gradient_bytes", 2))


def test_facts_hold_under_every_profile():
    """Another profile predicts the run with the facts that are stated of it, and with its own otherwise."""
    told = parse_facts({"dispatcher": "hybridep", "layer_split": "balanced"})
    setting = Setting(job=job_of(batch=8), cluster=find_cluster("dgx-a100"), runtime=with_facts(MEGATRON, told))
    other = find_runtime("nanotron")

    found = setting.predicted_by(other).runtime
    assert (found.name, found.deduplicates_tokens, found.layer_split) == ("nanotron", True, "balanced")
    assert found.fused_accumulation == other.fused_accumulation
    assert under_profile(other, ()) == replace(other, stated=())
    with pytest.raises(ConfigError, match="is no fact of a run"):
        find_fact("nothing")
