"""The measured runs in configs/measured/kinds, their models and the table of them in its README."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.judges.kinds_of_blocks import KINDS_FOLDER, kinds_of_models
from costmodels.calibration.fidelity import settings_of
from costmodels.calibration.measured_runs import read_measured_and_unstated
from costmodels.calibration.sources import is_known_source
from hardware.device import find_devices
from hardware.io.config_file import read_mapping

FILES = sorted(KINDS_FOLDER.glob("*.csv"))
NOT_MODELLED = "recomputation of a kind that the cost model does not know"


def rows_of(path):
    """The cells of each row."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


ROWS = [(f"{path.name}:{line}", row) for path in FILES for line, row in enumerate(rows_of(path), start=2)]


def test_a_row_is_a_run_or_waits_for_a_reader_of_its_model():
    """Nothing else is skipped, devices and sources are known, and the README counts the rows of each file."""
    runs, unstated, skipped = read_measured_and_unstated(FILES, KINDS_FOLDER)
    _, _, unknown = settings_of([*runs, *(each.run for each in unstated)], {})
    text = (KINDS_FOLDER / "README.md").read_text(encoding="utf-8")
    counted = dict(re.findall(r"^\| `([\w.-]+\.csv)` \| (\d+) \|", text, re.MULTILINE))

    assert unknown == Counter()
    assert not [why for why in skipped if why != NOT_MODELLED and not why.startswith("no reader for ")]
    assert all(is_known_source(row["source"]) and find_devices(row["device"]) for _, row in ROWS)
    assert counted == {path.name: str(len(rows_of(path))) for path in FILES}


def test_each_model_is_used_and_has_kinds_and_a_source():
    """models.yaml lists the models of all rows and no others, and every file in models/ is one of them."""
    named = {Path(row["architecture"]) for _, row in ROWS}
    kinds = kinds_of_models()

    assert {path.stem for path in named} == set(kinds)
    assert {path.name for path in named if path.parts[0] == "models"} == {
        path.name for path in (KINDS_FOLDER / "models").iterdir()
    }
    assert all(kinds.values())
    assert all(len(entry["source"]) > 20 for entry in read_mapping(KINDS_FOLDER / "models.yaml").values())


def agrees(row):
    """Whether degrees multiply to the devices, the batch divides, and both figures of throughput are one."""
    at = {name: int(row[name]) for name in ("devices", "tp", "pp", "cp", "up", "dp", "gbs", "mbs", "seq_len")}
    printed = float(row["tokens_per_s_per_device"] or "nan")
    tokens = at["gbs"] * at["seq_len"] / at["devices"] / float(row["step_seconds"])
    return (
        at["tp"] * at["pp"] * at["cp"] * at["up"] * at["dp"] == at["devices"]
        and at["gbs"] % (at["dp"] * at["mbs"]) == 0
        and not abs(tokens / printed - 1) > 0.02
    )


def test_the_figures_of_a_row_agree():
    """Of every row; a step of 0.57 s is printed to 2% alone."""
    assert [place for place, row in ROWS if not agrees(row)] == []


@pytest.mark.parametrize(
    ("model", "devices", "device", "step_s"),
    [
        ("gpt-oss-120b", "64", "H100-SXM-80", 16.66493),
        ("gpt-oss-120b", "64", "GB200", 4.99563),
        ("gpt-oss-120b", "64", "GB300", 2.48114),
        ("nemotron-3-nano-30b-a3b", "16", "H100-SXM-80", 0.65742),
        ("deepseek-v3", "256", "GB200", 13.84118),
        ("qwen3-next-80b-a3b", "64", "GB200", 6.68),
    ],
)
def test_published_step_times_are_there(model, devices, device, step_s):
    """Megatron-Bridge's cards (model_verification_cards), its study of recomputation, and pull request 3168."""
    found = [
        float(row["step_seconds"])
        for _, row in ROWS
        if (Path(row["architecture"]).stem, row["devices"], row["device"]) == (model, devices, device)
    ]

    assert step_s in found


@pytest.mark.parametrize(
    ("model", "printed_gflops"), [("deepseek-v3-without-mtp", 249.6), ("qwen3-235b-a22b", 148.0), ("qwen3-8b", 49.0)]
)
def test_printed_flops_per_token_are_those_of_the_architecture(model, printed_gflops):
    """Megatron counts causal attention by half; so does this, and its tables then print what the sizes give."""
    paths = [path for path in FILES if path.name.startswith("megatron")]
    runs, unstated, _ = read_measured_and_unstated(paths, KINDS_FOLDER)
    run = next(run for run in (*runs, *(each.run for each in unstated)) if Path(run.architecture).stem == model)
    printed = dict(ROWS)[run.place]
    tokens = run.global_batch_size * run.sequence_length
    per_token = float(printed["tflops_per_device"]) * run.step_time_s * run.devices / tokens * 1e3
    spec, whole = run.model, run.model.model_flops_per_token(run.sequence_length)
    widths = spec.plain.num_heads * (spec.plain.head_dim + spec.plain.value_head_dim)
    halved = 3 * spec.num_layers * run.sequence_length * widths

    assert per_token == pytest.approx(printed_gflops, rel=0.01)
    assert (whole - halved) / 1e9 == pytest.approx(printed_gflops, rel=0.01)
