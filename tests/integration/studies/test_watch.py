"""`meshtune watch` as a process: a file that grows, a hook, a kill, and a second watch."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.watch_process import LIMIT_S, ROOT, watching
from tuner.study_file.config import load_study

KEYS = {
    "name": "watched",
    "cluster": "{name: dgx-h100, hosts: 4}",
    "job": "{sequence_length: 4096, global_batch_size: 64}",
    "space": "{pp: [1, 2, 4], cp: [1], up: [1], vpp: [1], mbs: [1, 2]}",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a study of four hosts and the beginning of a trace."""
    (tmp_path / "study.yaml").write_text(study(**KEYS), encoding="utf-8")
    (tmp_path / "events.csv").write_text("time_s,link,share\n", encoding="utf-8")
    return tmp_path


def append(folder, text):
    """Let the trace grow."""
    with (folder / "events.csv").open("a", encoding="utf-8") as file:
        file.write(text)


def test_a_watch_follows_a_file_that_grows(folder):
    """A lost host is answered at once with a layout of the others, its return after the cluster has stood."""
    options = ("--hosts-from", "events.csv", "--settle", "3")
    with watching(
        folder, *options, "--hook", "sh -c 'cat >> hook.jsonl; echo $MESHTUNE_DECISION >> hook.txt'"
    ) as watch:
        first = watch.wait_for("stay", 0)
        append(folder, "100,h1,lo")  # a row that is still being written is no mistake
        time.sleep(1)
        append(folder, "st\n")
        lost = watch.wait_for("change", 1)
        append(folder, "1000,h1,back\n")
        watch.wait_for("settle", 2)
        back = watch.wait_for("change", 3)
        watch.process.send_signal(signal.SIGTERM)
        status = watch.process.wait(LIMIT_S)

    assert first["running"]["hosts"] == [0, 1, 2, 3]
    assert lost["forced"]
    assert 1 not in lost["best"]["hosts"]
    assert f"--tensor-model-parallel-size {lost['best']['config']['tp']}" in lost["flags"]["text"]
    assert lost["lost_work_s"] > 0
    assert back["best"]["hosts"] == [0, 1, 2, 3]
    assert back["time_s"] >= 1003
    assert back["running"]["config"] == lost["best"]["config"]
    assert [json.loads(line) for line in (folder / "hook.jsonl").read_text().splitlines()] == watch.answers()
    assert (folder / "hook.txt").read_text().split() == ["stay", "change", "settle", "change"]
    assert status == 75


def test_a_change_goes_through_the_checkpoint_of_the_training(folder):
    """The hook of a study whose trials run inside of a training is told what to load, also while a state cannot be
    read, which is told once.
    """
    trial = "{backend: command, command: [train, '{tp}', '{checkpoint}', '{new_checkpoint}'], training: {folder: kept}}"
    (folder / "study.yaml").write_text(study(**KEYS, trial=trial), encoding="utf-8")
    training = load_study(folder / "study.yaml").trials.backend.training
    saved = training.place_of(3)
    saved.mkdir(parents=True)
    (saved / "step-7").mkdir()
    training.advance(training.progress(), saved, steps=7, trial=3, layout="tp=8")
    hook = "sh -c 'echo $MESHTUNE_STEP $MESHTUNE_CHECKPOINT >> hook.txt'"
    with watching(folder, "--hosts-from", "events.csv", "--hook", hook) as watch:
        watch.wait_for("stay", 0)
        append(folder, "100,h1,lost\n")
        lost = watch.wait_for("change", 1)
        (folder / "kept" / "progress.json").write_text("{", encoding="utf-8")
        append(folder, "200,h2,lost\n")
        again = watch.wait_for("change", 2)

    assert (lost["in_training"]["step"], lost["in_training"]["checkpoint"]) == (7, str(saved))
    assert (folder / "hook.txt").read_text().splitlines()[1] == f"7 {saved}"
    assert again["in_training"] is None
    assert watch.err.read_text(encoding="utf-8").count("cannot be read") == 1


def test_a_killed_watch_goes_on(folder):
    """After SIGKILL the same command knows which layout runs, since when, and what the cluster did meanwhile."""
    options = ("--hosts-from", "events.csv", "--settle", "3000", "--horizon", "36000")
    with watching(folder, *options) as watch:
        watch.wait_for("stay", 0)
        append(folder, "100,h1,lost\n")
        lost = watch.wait_for("change", 1)
    append(folder, "5000,h1,back\n")
    with watching(folder, *options) as watch:
        again = watch.wait_for("settle", 2)
        append(folder, "5001,h2,lost\n")
        still = watch.wait_for("change" if 2 in lost["best"]["hosts"] else "settle", 3)

    assert again["running"]["config"] == lost["best"]["config"]
    assert again["running"]["since_s"] == pytest.approx(lost["time_s"])
    assert still["running"]["hosts"] == lost["best"]["hosts"]


def test_a_refused_change_is_asked_for_again(folder):
    """If the hook fails, the running layout stays the running one, and the change is asked for later."""
    options = ("--hosts-from", "events.csv", "--settle", "1")
    with watching(folder, *options, "--hook", "sh -c 'test $MESHTUNE_DECISION != change || test -e ready'") as watch:
        watch.wait_for("stay", 0)
        append(folder, "100,h1,lost\n")
        watch.wait_for("change", 1)
        again = watch.wait_for("change", 2)
        (folder / "ready").touch()
        deadline_s = time.monotonic() + LIMIT_S
        while json.loads((folder / "watched.watch.json").read_text())["running"]["setup"]["hosts"] == [0, 1, 2, 3]:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    assert again["running"]["hosts"] == [0, 1, 2, 3]
    assert "the change was not made: the hook ended with status 1" in watch.err.read_text()


def test_one_watch_for_a_state(folder):
    """A second watch with the same state ends with a message; a broken trace keeps the first one where it is."""
    options = ("--hosts-from", "events.csv", "--settle", "1")
    with watching(folder, *options) as watch:
        watch.wait_for("stay", 0)
        second = subprocess.run(
            [sys.executable, "-m", "tuner", "watch", "study.yaml", *options, "--once"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        append(folder, "100,h9,lost\n")
        deadline_s = time.monotonic() + LIMIT_S
        while "h9" not in watch.err.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        (folder / "events.csv").write_text("time_s,link,share\n100,h3,lost\n", encoding="utf-8")
        lost = watch.wait_for("change", 1)

    assert second.returncode == 2
    assert "in use by another `meshtune watch`" in second.stderr
    assert 3 not in lost["best"]["hosts"]
