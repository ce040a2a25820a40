"""Run one whole study on a local Ray, from the study file to the flags: the quick lane's only test that starts Ray."""

from tests.support.studies.command_line import FASTEST, in_process, write_replay


def test_a_study_runs_ends_and_hands_over_its_answer(tmp_path):
    """A replayed study runs on Ray to its end; other processes then read its best, report it and export its flags."""
    study, storage = write_replay(tmp_path), f"sqlite:///{tmp_path / 'study.db'}"

    ran = in_process("run", study, "--storage", storage, "--json", cwd=tmp_path, timeout_s=240)
    best = in_process("best", study, "--storage", storage, "--json", cwd=tmp_path, timeout_s=240)
    report = in_process("report", study, "--storage", storage, "--out", "report.html", cwd=tmp_path, timeout_s=240)
    flags = in_process("export", study, "--storage", storage, "--to", "megatron", cwd=tmp_path, timeout_s=240)

    assert ran.status == 0, ran.err
    assert FASTEST.items() <= ran.json["best"].items()
    assert FASTEST.items() <= best.json["config"].items()
    assert best.json["source"] == "measured"
    assert report.status == 0, report.err
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "--tensor-model-parallel-size 2" in flags.out
