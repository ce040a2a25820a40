import gzip
import json
import re

import pytest

from tests.support.studies.broken_studies import study


def test_simulation_adds_up(meshtune, simulated):
    """`simulate` has the keys of `predict`; its parts sum up, and the closed form beside it is what `predict` says."""
    config = ("--config", "pp=2,tp=2,dp=2,vpp=2")
    told, closed = (meshtune(command, simulated, *config, "--json") for command in ("simulate", "predict"))

    assert told.status == 0, told.err
    assert sum(told.json["breakdown_s"].values()) == pytest.approx(told.json["step_time_s"])
    assert sum(told.json["memory_bytes"].values()) == pytest.approx(told.json["peak_memory_bytes"], abs=20)
    assert told.json["breakdown_s"].keys() == closed.json["breakdown_s"].keys()
    assert told.json["memory_bytes"] == closed.json["memory_bytes"]
    assert told.json["predicted_step_time_s"] == closed.json["step_time_s"]
    assert told.json["step_time_s"] == pytest.approx(closed.json["step_time_s"], rel=0.1)
    assert told.json["step_time_s"] != closed.json["step_time_s"]
    assert told.json["operator_events"] > 1000
    assert [stage["stage"] for stage in told.json["stages"]] == [0, 1]
    assert all(0 < stage["idle_share"] < 1 for stage in told.json["stages"])
    assert "trace" not in told.json


def test_schedules_differ_in_time_and_memory(meshtune, simulated):
    """Zero-bubble is faster than 1F1B, and gpipe keeps the activations of more micro-batches."""
    steps = {
        schedule: meshtune("simulate", simulated, "--config", "pp=4,tp=2", "--schedule", schedule, "--json").json
        for schedule in ("1f1b", "gpipe", "zero-bubble")
    }

    assert steps["zero-bubble"]["step_time_s"] < steps["1f1b"]["step_time_s"]
    assert steps["gpipe"]["memory_bytes"]["activations"] > 2 * steps["1f1b"]["memory_bytes"]["activations"]
    assert {step["schedule"] for step in steps.values()} == steps.keys()


def test_a_trace_is_in_the_trace_event_format(meshtune, simulated, tmp_path):
    """Every event of a trace has its time and its place, every place a name, and nothing ends after the step."""
    told = meshtune("simulate", simulated, "--config", "pp=2,tp=4", "--trace", "step.json", "--json").json
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))

    assert told["trace"] == "step.json"
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(complete) + len(metadata) == len(trace["traceEvents"])
    assert len(complete) > told["operator_events"]  # and the passes
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    assert min(event["dur"] for event in complete) >= 0
    assert min(event["ts"] for event in complete) >= 0
    assert max(event["ts"] + event["dur"] for event in complete) <= told["step_time_s"] * 1e6
    named = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    assert named.keys() == {event["pid"] for event in complete} == {0, 1}
    threads = {(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= threads


def test_a_compressed_trace_is_the_same(meshtune, simulated, tmp_path):
    """A name that ends in .gz gives the same trace compressed, and the same bytes each time."""
    for name in ("plain.json", "first.json.gz", "second.json.gz"):
        assert meshtune("simulate", simulated, "--config", "tp=8", "--trace", name, "--json").status == 0

    first = (tmp_path / "first.json.gz").read_bytes()
    assert gzip.decompress(first) == (tmp_path / "plain.json").read_bytes()
    assert first == (tmp_path / "second.json.gz").read_bytes()


def test_simulation_in_words(meshtune, simulated):
    """`simulate` shows both models part by part, a line of passes for each stage, the memory, and the broken rules."""
    done = meshtune("simulate", simulated, "--config", "pp=4,tp=2,recompute=full", "--trace", "step.json")

    assert done.status == 0, done.err
    assert "Simulated for pp=4,tp=2,dp=1,cp=1,up=1,vpp=1,ep=1,mbs=1,recompute=full, 1f1b" in done.out
    assert re.search(r"part +simulated \[s\] +share +predicted \[s\] +share", done.out)
    assert re.search(r"compute +[\d.]+ +\d+\.\d% +[\d.]+ +\d+\.\d%", done.out)
    lines = re.findall(r"^  stage (\d) +\d+\.\d% idle  ([FBO. ]+)$", done.out, re.M)
    assert [stage for stage, _ in lines] == ["0", "1", "2", "3"]
    assert len({len(drawn) for _, drawn in lines}) == 1
    assert lines[0][1].startswith("F")
    assert "GiB per device" in done.out
    assert "step.json; ui.perfetto.dev opens it" in done.err


def test_unlike_replicas_are_told_apart(meshtune, tmp_path):
    """Where replicas run on unlike devices, each kind has its own stages."""
    path = tmp_path / "unlike.yaml"
    cluster = "{groups: [{name: dgx-a100, hosts: 1}, {name: dgx-h100, hosts: 1}]}"
    path.write_text(study(cluster=cluster), encoding="utf-8")

    told, shown = (meshtune("simulate", path, "--config", "tp=8,dp=2", *more) for more in (("--json",), ()))

    assert [(row["replica"], row["stage"]) for row in told.json["stages"]] == [(0, 0), (1, 0)]
    assert told.json["stages"][0]["device"] != told.json["stages"][1]["device"]
    assert "replica 1 stage 0" in shown.out
