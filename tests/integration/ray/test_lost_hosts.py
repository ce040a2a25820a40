"""The benchmark in which two of the four nodes that each trial occupies are killed, and others join."""

from benchmarks.endurance import lost_hosts


def test_a_study_follows_its_cluster(answered):
    """A study whose trials occupy four nodes goes on with two when two are killed, and on four when others join."""
    told = answered(lost_hosts, "--trials", "7", "--follow-after", "4")

    assert told["violations"] == []
    assert told["trials_on_two_hosts"] >= lost_hosts.DONE_BEFORE
    assert told["trials_on_four_hosts"] > lost_hosts.DONE_BEFORE
