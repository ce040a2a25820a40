"""The benchmark that kills nodes of a Ray cluster, one round of it with commands."""

from benchmarks.endurance import lost_node


def test_a_study_outlives_a_node(answered, monkeypatch):
    """A node that dies takes no finished trial with it: its trials run once more on others, none runs twice after it
    has ended, the study ends well, and what the dead node ran is gone.
    """
    monkeypatch.setattr(lost_node, "NODES", (0, 2, 2))
    monkeypatch.setattr(lost_node, "DONE_BEFORE", 1)  # of few trials several must be under way then

    told = answered(lost_node, "--rounds", "1", "--trials", "4", "--kinds", "command")

    assert told["violations"] == []
    assert [(row["kind"], row["status"], row["trials"]) for row in told["rounds"]] == [("command", 0, 4)]
    assert all(row["retried"] >= 1 and row["gone_s"] is not None for row in told["rounds"])
