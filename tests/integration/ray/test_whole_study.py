"""Run one whole study on a local Ray, from the study file to the flags: the quick lane's only test that starts Ray."""

from tests.support.studies.command_line import FASTEST, MEASURED, in_process, write_replay


def test_a_study_runs_ends_and_hands_over_its_answer(tmp_path):
    """A replay of three rows, of which one fails, runs on Ray to its end; another process exports its best as flags."""
    study, storage = write_replay(tmp_path, MEASURED[5:8]), f"sqlite:///{tmp_path / 'study.db'}"

    ran = in_process("run", study, "--storage", storage, "--json", cwd=tmp_path, timeout_s=240)
    flags = in_process("export", study, "--storage", storage, "--to", "megatron", cwd=tmp_path, timeout_s=240)

    assert ran.status == 0, ran.err
    assert FASTEST.items() <= ran.json["best"].items()
    assert ran.json["source"] == "measured"
    assert (flags.status, "predicted" in flags.err) == (0, False)
    assert "--tensor-model-parallel-size 2" in flags.out
