import json
import shlex

import pytest

from costmodels.job.parallel_config import ParallelConfig
from tests.unit.tuner.export.test_export import setting_of
from trials.knobs.knob import Knob
from trials.knobs.places import Place, split_words
from tuner.export import find_exporter
from tuner.export.knob_export import with_knobs

KNOBS = (
    Knob(name="overlap", values=(True, False), today=True, place=Place(flag="--overlap-grad-reduce")),
    Knob(name="bucket", values=(None, 5), today=None, place=Place(flag="--ddp-bucket-size")),
    Knob(name="kind", values=("a", "b"), today="a", place=Place(flags=split_words({"b": "--kind b --more 'x y'"}))),
    Knob(name="cuda", values=(1, 8), today=1, place=Place(environment="CUDA_DEVICE_MAX_CONNECTIONS")),
    Knob(
        name="reduce", values=(1, 2), today=1, place=Place(file="deepspeed", key="zero_optimization.reduce_bucket_size")
    ),
    Knob(name="mine", values=(1, 2), today=1),
)


def exported(target, **knobs):
    """An export with values of knobs."""
    config = ParallelConfig(tp=2, dp=32, knobs=tuple(knobs.items()))
    return with_knobs(find_exporter(target)(setting_of("llama3-8b"), config), KNOBS, config)


def test_flags_of_knobs_replace_those_of_the_exporter():
    """A switch that is off takes the exporter's flag away, and other flags stand once, with their values quoted."""
    export = exported("megatron", overlap=False, bucket=5, kind="b", cuda=8)
    inside = export.text.partition("=(\n")[2].partition("\n)")[0]
    words = [word for line in inside.splitlines() for word in shlex.split(line)]

    assert "--overlap-grad-reduce" not in words
    assert tuple(words) == export.arguments
    assert words[words.index("--kind") :][:4] == ["--kind", "b", "--more", "x y"]
    assert export.text.count("CUDA_DEVICE_MAX_CONNECTIONS") == 1
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=8" in export.text
    assert dict(export.environment)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_what_flags_cannot_hold_is_a_note():
    """Keys of files and placeholders are comments of the flags, and notes."""
    export = exported("megatron", reduce=2, mine=2)

    assert "# reduce: zero_optimization.reduce_bucket_size is 2 in the file deepspeed" in export.text
    assert "mine: {mine} in the command is 2" in export.notes


def test_keys_of_a_file_enter_the_exported_file():
    """DeepSpeed's configuration has the key, beside those of its exporter, and the other knobs are notes."""
    export = exported("deepspeed", reduce=2)
    zero = json.loads(export.text)["zero_optimization"]

    assert zero["reduce_bucket_size"] == 2
    assert zero["stage"] == 1
    assert any(note.startswith("cuda: ") for note in export.notes)


@pytest.mark.parametrize("target", ["megatron", "deepspeed", "torchtitan", "nanotron", "nemo"])
def test_without_knobs_nothing_changes(target):
    """An export of a study without knobs is the exporter's own."""
    config = ParallelConfig(tp=2, dp=32)
    export = find_exporter(target)(setting_of("llama3-8b"), config)

    assert with_knobs(export, (), config) is export
