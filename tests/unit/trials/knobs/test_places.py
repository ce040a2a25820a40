import pytest

from costmodels.job.parallel_config import ParallelConfig
from trials.knobs.condition import parse_condition
from trials.knobs.knob import (
    Knob,
    active_knobs,
    knob_environment,
    knob_file_keys,
    knob_words,
    today_of,
    without_knob_flags,
)
from trials.knobs.places import Place, split_words, text_of, without_flags

OVERLAP = Knob(name="overlap", values=(False, True), today=True, place=Place(flag="--overlap"))
BUCKET = Knob(
    name="bucket",
    values=(None, 1000, 2e6),
    today=None,
    place=Place(flag="--bucket-size"),
    when=parse_condition("dp > 1 and overlap == true", {"overlap": OVERLAP.values}),
)
DISPATCHER = Knob(
    name="dispatcher",
    values=("a2a", "flex"),
    today="a2a",
    place=Place(flags=split_words({"a2a": "--dispatcher alltoall", "flex": "--dispatcher flex --deepep"})),
)
ALGORITHM = Knob(name="algorithm", values=(None, "Ring"), today=None, place=Place(environment="NCCL_ALGO"))
STAGE = Knob(name="fraction", values=(0.5, 1.0), today=1.0, place=Place(file="ds", key="zero.fraction"))
KNOBS = (OVERLAP, BUCKET, DISPATCHER, ALGORITHM, STAGE)


def config(dp=4, **knobs):
    """A configuration with values of knobs."""
    return ParallelConfig(dp=dp, knobs=tuple(knobs.items()))


def test_flags_follow_the_values():
    """A switch stands alone where it is true, other flags have their value, and null leaves a flag out."""
    assert knob_words(KNOBS, config(overlap=True, bucket=2e6, dispatcher="flex")) == [
        *("--overlap", "--bucket-size", "2000000", "--dispatcher", "flex", "--deepep")
    ]
    assert knob_words(KNOBS, config(overlap=True, bucket=None)) == ["--overlap", "--dispatcher", "alltoall"]
    assert Place(flag="--size=").words(3) == ("--size=3",)


def test_a_knob_whose_condition_does_not_hold_is_not_set():
    """Neither a layout nor another knob that a condition rules out sets the knob."""
    assert BUCKET not in [knob for knob, _ in active_knobs(KNOBS, config(dp=1, overlap=True, bucket=1000))]
    assert "--bucket-size" not in knob_words(KNOBS, config(overlap=False, bucket=1000))


def test_missing_values_are_those_of_today():
    """A configuration from before there were knobs runs as it did."""
    assert active_knobs(KNOBS, ParallelConfig(dp=4)) == [(knob, knob.today) for knob in KNOBS]
    assert today_of(KNOBS)["fraction"] == 1.0


def test_variables_and_keys_of_files():
    """Variables keep null, which removes them, and keys are grouped by their file."""
    assert knob_environment(KNOBS, config(algorithm="Ring")) == [("NCCL_ALGO", "Ring")]
    assert knob_environment(KNOBS, config()) == [("NCCL_ALGO", None)]
    assert knob_file_keys(KNOBS, config(fraction=0.5)) == {"ds": {"zero.fraction": 0.5}}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--a", "1", "--overlap", "--b", "2"], ["--a", "1", "--b", "2"]),
        (["--bucket-size", "-5", "--b"], ["--b"]),
        (["--bucket-size=7", "--bucket-size-other", "1"], ["--bucket-size-other", "1"]),
        (["train", "--overlap"], ["train"]),
        (["--b", "--overlap", "activation-checkpoint:full"], ["--b", "activation-checkpoint:full"]),
    ],
)
def test_flags_of_a_framework_make_way(arguments, left):
    """A flag that a knob sets is taken out with its values, and no other."""
    assert without_flags(arguments, frozenset({"--overlap", "--bucket-size"})) == left
    assert without_knob_flags(arguments, KNOBS, config(overlap=True)) == left


def test_texts_are_those_of_commands():
    """True and false are small, whole floats have no dot, and null is nothing."""
    assert [text_of(value) for value in (True, False, 3, 2.5, 5e8, "x", None)] == [
        *("true", "false", "3", "2.5", "500000000", "x", "")
    ]
