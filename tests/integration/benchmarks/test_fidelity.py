"""The programs of benchmarks/ that fit the cost model and quote its errors."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibration import fit_profiles
from benchmarks.calibration.noise_floor import noise_floor
from benchmarks.judges import fidelity
from costmodels.calibration.fidelity import GROUP, predict, settings_of
from costmodels.calibration.measured_runs import read_measured
from costmodels.job.runtime import catalog_path, find_prior, read_profile
from tests.support.studies.broken_studies import rows

KEYS = {
    "n",
    "num_groups",
    "median_ape",
    "mean_ape",
    "p90_ape",
    "median_tau",
    "median_regret",
    "mean_regret",
    "memory_median_ape",
    "ok_called_feasible",
    "failed_called_infeasible",
    "best_called_infeasible",
    "skipped",
}
LAYOUTS = ((8, 1, 1), (8, 1, 2), (4, 2, 1), (4, 2, 2), (2, 4, 1), (2, 4, 2))
TIMES_S = (1.50, 1.40, 1.20, 1.10, 1.00, 0.95)
RUNS = tuple(
    {"tp": tp, "dp": dp, "mbs": mbs, "step_seconds": seconds, "peak_mem_gib": 40}
    for (tp, dp, mbs), seconds in zip(LAYOUTS, TIMES_S, strict=True)
)
FAILED = {"tp": 1, "dp": 8, "seq_parallel": 0, "step_seconds": "", "notes": "FAILED: out of memory"}


@pytest.fixture
def quoted(answered):
    """Runs the benchmark; its object."""
    return partial(answered, fidelity)


def test_the_keys_of_the_json(quoted, write):
    """Groups, sources and the whole have the same figures; a group says what its runs share."""
    told = quoted("--quote", write("runs.csv", *RUNS, FAILED))

    assert told["overall"].keys() >= KEYS
    assert told["overall"]["noise_floor"].keys() >= {"median_ape", "median_tau", "median_regret", "mean_regret"}
    (group,), (source,) = told["groups"], told["by_source"]
    assert group.keys() >= KEYS | set(GROUP) | {"tau", "rank_of_best", "regret", "num_configs"}
    assert source.keys() >= KEYS - {"skipped"}
    assert (told["overall"]["n"], group["n"], group["num_configs"]) == (6, 6, 6)
    assert group["ok_called_feasible"] == told["overall"]["ok_called_feasible"] == 1.0
    assert told["fit"] == {}


def test_a_fit_lessens_the_error_on_other_models(quoted, write):
    """Runs that take half as long again as believed teach the profile, which then predicts another model better."""

    def slow(name, **model):
        """A file of runs half as slow again as the profile believes before any fit."""
        believed_of = write("believed.csv", *({**run, **model} for run in RUNS))
        runs = read_measured([believed_of], {}, Path())
        prior = find_prior("megatron-core")
        kept, settings, _ = settings_of(runs, {prior.name: prior}, prior.name)
        times = 1.5 * predict(kept, settings).step_time_s
        return write(name, *({**run, **model, "step_seconds": t} for run, t in zip(RUNS, times, strict=True)))

    fast, fit = write("fast.csv", *RUNS), slow("fit.csv")
    quote = slow("quote.csv", model="llama-half", layers=16)
    before, after = (quoted("--fit", file, "--quote", quote, "--runtime", "megatron-core") for file in (fast, fit))

    assert after["overall"]["median_ape"] < 0.5 * before["overall"]["median_ape"]
    assert after["overall"]["median_ape"] < 0.15


def test_tagged_rows_are_left_out_unless_raw(quoted, write):
    """OUTLIER, LOW-MFU and SUSPECT rows do not count, a failed one always does; `--raw` quotes all."""
    tagged = [{**RUNS[0], "notes": tag, "step_seconds": 50} for tag in ("OUTLIER", "LOW-MFU", "SUSPECT")]
    file = write("runs.csv", *RUNS, *tagged, {**FAILED, "notes": "FAILED; SUSPECT"})
    clean, raw = quoted("--quote", file), quoted("--quote", file, "--raw")

    assert (clean["overall"]["n"], clean["overall"]["unclean"]) == (6, 3)
    assert (raw["overall"]["n"], raw["overall"]["unclean"]) == (9, 0)
    assert clean["overall"]["failed_called_infeasible"] is not None


def test_runs_of_unknown_recomputation_are_quoted_as_ranges(quoted, write, capsys):
    """They are predicted in every mode and listed, in words too, and no figure, fit or count of others has them."""
    unstated = {**RUNS[0], "recompute": ""}
    plain, both = write("plain.csv", *RUNS), write("both.csv", *RUNS, unstated)
    before, after = quoted("--quote", plain), quoted("--quote", both)
    alone = quoted("--quote", write("alone.csv", unstated))
    (quote,) = after["unstated"]

    assert after["overall"] == before["overall"]
    assert alone["unstated"] == [{**quote, "place": "alone.csv:2"}]
    assert set(quote["predicted_s"]) == {"none", "selective", "full"}
    assert quote["measured_s"] == RUNS[0]["step_seconds"]
    assert quoted("--fit", both, "--quote", plain)["fit"] == quoted("--fit", plain, "--quote", plain)["fit"]
    capsys.readouterr()
    fidelity.main(["--quote", str(both)])
    assert "of 1 such runs took a step time inside their range" in capsys.readouterr().out


def test_the_simulator_stands_beside_the_closed_form(quoted, write):
    """Both are judged on the same runs; `--model simulator` alone has the figures that stand beside."""
    file = write("runs.csv", *RUNS, FAILED)
    plain, both, alone = (quoted("--quote", file, "--model", name) for name in ("closed_form", "both", "simulator"))

    assert both["by_source"] == plain["by_source"]
    assert "simulator" not in plain
    assert both["simulator"].keys() == {"groups", "overall", "by_source"}
    assert both["simulator"]["overall"] == alone["overall"]
    assert both["simulator"]["overall"]["median_ape"] != both["overall"]["median_ape"]
    # what fits and what it needs does not depend on the model of time
    assert both["simulator"]["overall"]["ok_called_feasible"] == both["overall"]["ok_called_feasible"]
    assert both["simulator"]["overall"]["memory_median_ape"] == both["overall"]["memory_median_ape"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "is a missing column"),
        ("a,b\n1,2\n", "is a missing column"),
        (rows(), "holds no measured run"),
        (rows({"zero_stage": ""}), "none of which has a complete"),
        (rows({"device": "Abacus-9000"}), "Abacus-9000"),
        (rows({"notes": "OUTLIER"}), "--raw"),
        (rows({"tp": "eight"}), "must be a number"),
        (rows(RUNS[0]) + "one,two\n", "has 2 cells"),
    ],
    ids=["missing", "empty", "other columns", "header only", "no configuration", "device", "tags", "text", "cells"],
)
def test_bad_files_are_one_message(tmp_path, capsys, content, words):
    """A file that cannot be quoted ends in one message that says why, status 2 and an empty stdout."""
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    status = fidelity.main(["--quote", str(path), "--json"])

    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert words in captured.err
    assert captured.err.count("fidelity: ") == 1


def test_the_floor_is_zero_without_noise(write):
    """A perfect model of measurements without noise has no error, no regret and a tau of one."""
    runs = read_measured([write("runs.csv", *RUNS)], {}, Path())
    floor = noise_floor(runs, 0.0, np.random.default_rng(0))

    assert (floor.median_ape, floor.median_regret, floor.mean_regret) == (0.0, 0.0, 0.0)
    assert floor.median_tau == pytest.approx(1.0)


def test_the_floor_of_the_error_is_that_of_the_lognormal(write):
    """The median of |exp(-sd z) - 1| is that of the noise alone, about 0.674 sd, and tau falls as noise grows."""
    runs = read_measured([write("runs.csv", *RUNS)], {}, Path())
    small, large = (noise_floor(runs, noise, np.random.default_rng(0)) for noise in (0.01, 0.3))

    assert small.mean_ape == pytest.approx(0.01 * math.sqrt(2 / math.pi), rel=0.05)
    assert large.median_tau < small.median_tau
    assert large.mean_regret > small.mean_regret


def test_a_refit_of_the_catalog_keeps_facts_and_guesses(write, tmp_path, monkeypatch, capsys):
    """The maintainers' program rewrites a profile that reads back with its facts, and a second fit begins anew."""
    source = catalog_path("megatron-core")
    copy = tmp_path / "megatron-core.yaml"
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(fit_profiles, "catalog_path", lambda _name: copy)
    arguments = [str(write("runs.csv", *RUNS))]

    assert fit_profiles.main(arguments) == 0
    first = copy.read_text(encoding="utf-8")
    fitted, before = read_profile(copy), read_profile(source)
    assert fit_profiles.main(arguments) == 0
    assert copy.read_text(encoding="utf-8") == first
    assert (fitted.rule_set, fitted.gradient_bucket) == (before.rule_set, before.gradient_bucket)
    assert fitted.matmul_efficiency != find_prior("megatron-core").matmul_efficiency
    assert "fitted_on: 6 runs of made up\n" in first
    assert "megatron-core: 6 runs of made up" in capsys.readouterr().out


def test_shipped_errors_of_memory_are_those_of_todays_model(tmp_path, monkeypatch):
    """`fit_profiles --peaks` would change no shipped profile: whoever changes the model of memory has run it."""
    copies = {}

    def copy_of(name):
        """Return a copy of the profile, made once."""
        if name not in copies:
            copies[name] = tmp_path / f"{name}.yaml"
            copies[name].write_text(catalog_path(name).read_text(encoding="utf-8"), encoding="utf-8")
        return copies[name]

    monkeypatch.setattr(fit_profiles, "catalog_path", copy_of)

    assert fit_profiles.main(["--peaks"]) == 0
    assert {"megatron-core", "nanotron", "mindspeed"} <= copies.keys()
    for name, copy in copies.items():
        found, shipped = (read_profile(path) for path in (copy, catalog_path(name)))
        assert found.memory_error == pytest.approx(shipped.memory_error, rel=0.01), name


UNLIKE = tuple(
    {
        **run,
        "source": "amp-test",
        "device": "mixed:12xV100-SXM-16+4xT4-16",
        "devices": 16,
        "precision": "fp16",
        "seq_parallel": 0,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "ffn": 4096,
        "layers": 24,
        "seq_len": 1024,
        "gbs": 32,
    }
    | {"tp": tp, "pp": pp, "dp": 16 // tp // pp, "mbs": mbs, "step_seconds": 1 + tp + pp / 10 + mbs / 100}
    for run in RUNS[:1]
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    for mbs in (1, 2)
)


def test_unlike_devices_have_a_table_of_their_own(quoted, write):
    """A group on unlike devices says what its hosts are, how its layouts were ranked, and in how many seconds."""
    told = quoted("--quote", write("runs.csv", *RUNS, *UNLIKE))

    (group,) = told["unlike"]
    assert group["hosts"] == ["3 x 4 V100-SXM-16", "1 x 4 T4-16"]
    assert group["num_configs"] == 18
    assert 1 <= group["rank_of_best"] <= 18
    assert -1 <= group["spearman"] <= 1
    assert group["regret"] >= 0
    assert group["rank_s"] > 0
    assert {each["device"] for each in told["groups"]} >= {group["device"]}


def test_layouts_that_state_their_cuts_are_ranked(quoted, write):
    """On unlike devices, too, where each of those layouts has a cluster and a runtime of its own."""
    cuts = {1: "26", 2: "14/12", 4: "8/7/7/4"}
    stated = [{**run, "notes": f"layers per stage incl. embedding(1)+head(1): {cuts[run['pp']]}"} for run in UNLIKE]
    (group,) = quoted("--quote", write("runs.csv", *stated))["unlike"]

    assert group["num_configs"] == len(stated)
