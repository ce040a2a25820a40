"""Fuzzing without coverage, which needs no library of its own."""

import json
import resource
import time
from pathlib import Path

from benchmarks.endurance import fuzz
from benchmarks.support import fuzz_reader
from benchmarks.support.fuzz_tally import counted
from hardware.io.errors import ConfigError
from tests.fuzz.mutation import of_bytes
from tests.fuzz.target import Target


def test_inputs_are_counted(tmp_path, capsys):
    """A blind run reads as many inputs as it is told to, and finds nothing wrong."""
    options = ["--targets", "override", "--inputs", "30", "--blind", "3", "--folder", str(tmp_path), "--json"]

    assert fuzz.main(options) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["target"], row["inputs"], row["defects"]) == ("override", 30, [])


def _read(data, _folder):
    if data == b"slow":
        time.sleep(0.05)
    elif data == b"wrong":
        raise ValueError("no refusal")
    elif data == b"refused":
        raise ConfigError("is refused", key="input")


def test_defects_are_kept(tmp_path, monkeypatch):
    """A reader keeps the inputs that took too long or raised another error than a refusal, and counts all."""
    monkeypatch.setattr(fuzz_reader, "LIMIT_S", 0.04)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # this process goes on
    reader = fuzz_reader.Reader(Target(name="any", read=_read, mutation=of_bytes, seeds=lambda: (b"good",)), tmp_path)
    for data in (b"good", b"refused", b"wrong", b"slow"):
        reader.read(data)

    counts = counted(tmp_path / "tally")
    assert (counts.inputs, counts.accepted) == (4, 2)
    kept = {path.with_suffix(".input").read_bytes() for path in tmp_path.glob("defect-*.json")}
    assert kept == {b"wrong", b"slow"}


def test_an_input_that_ends_the_process_is_kept(tmp_path, monkeypatch):
    """The next process begins behind it, and the input counts as a crash."""
    calls = []

    def ended(_program, _name, options, folder):
        calls.append((options["first"], options["inputs"]))
        fuzz_reader.Tally(folder / "tally").add(accepted=True, took_s=0.0)
        if len(calls) == 1:
            (folder / "current").write_bytes(b"fatal")
        return int(len(calls) == 1), ""

    monkeypatch.setattr(fuzz, "_run", ended)
    row = fuzz.fuzzed("any", inputs=10, seconds=60, blind=7, folder=tmp_path)

    assert calls == [(0, 10), (2, 8)]
    ((path, kind),) = row.defects
    assert kind == "crash"
    assert Path(path).read_bytes() == b"fatal"
