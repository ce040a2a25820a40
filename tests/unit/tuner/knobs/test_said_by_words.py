"""Today's value of a known knob, read off the words of a user's command."""

import pytest

from tuner.knobs.catalog import find_known


@pytest.mark.parametrize(
    ("name", "words", "today"),
    [
        ("tp_comm_overlap", "run x.py --tp-comm-overlap --lr 1", True),
        ("tp_comm_overlap", "run x.py --lr 1", False),
        ("ddp_bucket_size", "run x.py --ddp-bucket-size 5000000", 5_000_000),
        ("ddp_bucket_size", "run x.py --ddp_bucket_size=10000000", 10_000_000),
        ("ddp_bucket_size", "run x.py", None),
        ("overlap_grad_reduce", "run x.py --overlap-grad-reduce", True),
    ],
)
def test_a_command_says_todays_value(name, words, today):
    """A switch is on where it stands, a number is that of the flag, and absence is the framework's default."""
    said = find_known("megatron", name).said_by(words.split())

    assert (said, type(said)) == (today, type(today))
