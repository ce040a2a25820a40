"""Facts of a run in the words of frameworks."""

import pytest

from costmodels.job.fact_words import all_names, has_words, names_of, read_facts, written_words
from costmodels.job.facts import facts

FRAMEWORKS = ("megatron", "mindspeed", "torchtitan", "deepspeed", "nanotron", "environment")


def given(words):
    """Words of a command by their names."""
    found = {}
    for word in words:
        name, *values = word.split() if word.startswith("--") else word.split("=", 1)
        found[name] = tuple(values)
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_written_is_read(framework):
    """The words of every value of every fact say that value, and so does their absence."""
    for fact in facts().values():
        numbers = tuple({fact.bounds[0], fact.bounds[1]}) if not fact.values else ()
        for value in (*fact.values, *map(fact.value_of, numbers)):
            if framework in fact.written and has_words(framework, fact.name, value):
                words = written_words(framework, [(fact.name, value)])
                told, unclear = read_facts(framework, given(words))
                assert told[fact.name] == value, (fact.name, words)
                assert fact.name not in unclear


def test_every_spelling_means_its_value():
    """All words of a table row are read as the value that they stand by."""
    for fact in facts().values():
        for framework, choices in fact.written.items():
            for text, spellings in choices.items():
                for words in spellings if text != "{}" else ():
                    parts = [f"--{part}" for part in words.split("--")[1:]] or words.split()
                    assert read_facts(framework, given(parts))[0][fact.name] == fact.value_of(text), words


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--moe-token-dispatcher-type flex", "dispatcher", "deepep"),
        ("--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend deepep", "dispatcher", "alltoall"),
        ("", "dispatcher", "allgather"),
        ("", "overlaps_gradients", False),
        ("--use-precision-aware-optimizer", "first_moment_bytes", 4),
        ("--main-grads-dtype torch.bfloat16", "gradient_bytes", 2),
        ("--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "gradient_bytes", 2),
        ("--attention-backend AttnBackend.unfused", "attention", "unfused"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", "captured_graph", "attention+mlp"),
        ("--optimizer-offload-fraction 0.25", "offload_share", 0.25),
        ("--moe-router-force-load-balancing", "expert_imbalance", 0.0),
        ("--no-check-for-nan-in-loss-and-grad --cuda-graph-scope full", "captured_graph", "none"),
        ("--cross-entropy-fusion-impl te", "cross_entropy", "eager"),
        ("--cross-entropy-loss-fusion", "cross_entropy", "native"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "cross_entropy", "te"),
    ],
)
def test_megatrons_flags_and_its_defaults(words, name, value):
    """Flags are read as scripts and logs spell them, and what is absent is as Megatron-LM has it."""
    parts = [f"--{part}".strip() for part in words.split("--")[1:]]

    assert read_facts("megatron", given(parts))[0][name] == value


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--moe-token-dispatcher-type mine", "dispatcher"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep", "dispatcher"),
        ("--exp-avg-dtype $TYPE", "first_moment_bytes"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules moe", "captured_graph"),
        ("--optimizer-offload-fraction 2", "offload_share"),
    ],
)
def test_what_is_not_understood_is_told(words, name):
    """A flag of a fact with a value that the table lacks says nothing, and its words are returned."""
    told, unclear = read_facts("megatron", given([f"--{part}".strip() for part in words.split("--")[1:]]))

    assert name not in told
    assert unclear[name].split()[0] in words


def test_an_option_among_others_of_a_variable_is_read():
    """The allocator's variable has several options."""
    variables = {"PYTORCH_ALLOC_CONF": ("max_split_size_mb:64,expandable_segments:True",)}

    assert read_facts("environment", variables)[0] == {"expandable_segments": True}
    assert read_facts("environment", {"PYTORCH_ALLOC_CONF": ("max_split_size_mb:64",)})[0] == {}


def test_words_are_written_once():
    """Facts that share a flag write it once."""
    words = written_words("megatron", [("first_moment_bytes", 2), ("second_moment_bytes", 2), ("gradient_bytes", 4)])

    assert words == ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16")
    assert set(names_of(facts()["dispatcher"], "megatron")) <= all_names("megatron")
