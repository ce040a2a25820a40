"""`meshtune place` for files of operators."""

import json

import pytest

from tests.support.settings.placements import PLACEMENTS

FILE = str(PLACEMENTS / "operators-4.yaml")


def test_prints_a_schedule_for_people(meshtune):
    """The table names every operator with its devices, and below it stand transfers, ends, bound and baselines."""
    told = meshtune("place", FILE)

    assert told.status == 0, told.err
    for word in (
        *("contrastive: image_mlp", "split in 2", "experts: combine", "over nvlink", "3: host 1 V100-PCIe-32 |"),
        *("Ends: contrastive", "lower bound", "one device", "heft", "highs", "Memory [GiB]: device 0"),
    ):
        assert word in told.out


def test_json_and_trace_hold_the_same_schedule(meshtune, tmp_path):
    """The makespan is the last end, the weighted sum that of the models' ends, and the trace has every event."""
    trace = tmp_path / "step.json"
    found = meshtune("place", FILE, "--trace", str(trace), "--json").json
    drawn = [row for row in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if row["ph"] == "X"]

    assert found["makespan_s"] == max(one["end_s"] for one in found["operators"])
    assert found["cost_s"] == pytest.approx(sum(one["weight"] * one["end_s"] for one in found["graphs"]))
    assert found["lower_bound_s"] <= found["cost_s"] <= min(one["cost_s"] or 1e9 for one in found["baselines"])
    assert len(drawn) == len(found["timeline"]) > len(found["operators"])
    assert max(row["ts"] + row["dur"] for row in drawn) == pytest.approx(found["makespan_s"] * 1e6, abs=0.01)


@pytest.mark.slow
def test_two_processes_prove_the_same_optimum(meshtune):
    """With `--gap 0` the schedule is proven, by one process and by two, at one cost."""
    alone, together = (
        meshtune("place", FILE, "--gap", "0", "--workers", workers, "--json").json for workers in ("1", "2")
    )

    assert alone["known"] == together["known"] == "optimal"
    assert together["cost_s"] == pytest.approx(alone["cost_s"])


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (FILE, ["--export", "verl"], "--export = 'verl': is for files of modules"),
        (FILE, ["--workers", "0"], "--workers"),
        (str(PLACEMENTS / "ppo-7b-16.yaml"), ["--workers", "2"], "--workers = '2': is for files of operators"),
    ],
)
def test_an_option_of_the_other_kind_of_file_is_refused(meshtune, file, options, message):
    """Frameworks run modules, and processes search operators together; the other way round is one message."""
    told = meshtune("place", file, *options)

    assert told.status == 2
    assert message in told.err


@pytest.mark.parametrize(("keys", "has"), [("graph: {}", "none"), ("graphs: {}\nmodules: {}", "both")])
def test_a_file_holds_modules_or_operators(meshtune, tmp_path, keys, has):
    """A file with neither of the two, or with both, is told of the other by one message."""
    path = tmp_path / "file.yaml"
    path.write_text(f"cluster: {{name: v100-pcie}}\n{keys}\n", encoding="utf-8")
    told = meshtune("place", str(path))

    assert told.status == 2
    assert (
        f"has either `modules`, which are jobs of whole models, or `graphs`, which are operators; this one has {has}"
        in told.err
    )


def test_says_where_nothing_fits(meshtune, tmp_path):
    """Operators that fit one by one but not together end with a sentence and the status of nothing found."""
    text = """
    cluster: {name: v100-pcie, devices_per_host: 1}
    graphs:
      one:
        operators:
          a: {moved_gib: 1, memory_gib: 20}
          b: {moved_gib: 1, memory_gib: 20, inputs_gib: {a: 1}}
    """
    path = tmp_path / "large.yaml"
    path.write_text(text, encoding="utf-8")
    told, as_json = meshtune("place", str(path)), meshtune("place", str(path), "--json")

    assert told.status == as_json.status == 1
    assert "No schedule fits: there is no solution" in told.err
    assert as_json.json["known"] == "infeasible"
    assert as_json.json["makespan_s"] is None
