"""Rehearsals of a JAX program: XLA compiles its step for all devices of the world, and nothing is computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.json_keys import JSON_KEYS
from tests.support.rehearsal import jax_study
from tests.support.rehearsal.jax_study import gpu_compiler, write_study
from tests.support.studies.command_line import in_process

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, FFN, BATCH = 3, 256, 1024, 64
SIZES = ("--layers", str(LAYERS), "--hidden", str(HIDDEN), "--ffn", str(FFN))
FP32 = 4
WEIGHTS = 2 * LAYERS * HIDDEN * FFN
"""Parameters of the program's model, by hand: each layer goes up and down."""


def rehearsed(study, *words, status=0):
    """The answers of a rehearsal."""
    done = in_process("rehearse", study, "--yes", "--json", *words, cwd=study.parent, timeout_s=600)
    assert done.status == status, done.err
    return done.json


def by_kind(answer):
    """Bytes that all runs of each collective of a rank have, by its name and ranks."""
    found = {}
    for one in answer["collectives"]:
        key = one["name"], tuple(one["ranks"])
        found[key] = found.get(key, 0) + one["count"] * one["size_bytes"]
    return found


def test_state_and_collectives_are_those_of_the_mesh(tmp_path):
    """Of dp=4, tp=2: weights and Adam's two states over tp; gradients and loss over dp, layers' outputs over tp."""
    study = write_study(tmp_path, *SIZES)
    (answer,) = rehearsed(study, "--config", "dp=4,tp=2", "--ranks", "0")["ranks"]

    assert (answer["verdict"], answer["framework"]) == ("accepted", "jax")
    assert answer["parameters"] == WEIGHTS // 2
    parts = answer["parts_bytes"]
    assert parts["weights"] == FP32 * WEIGHTS // 2
    assert parts["optimizer"] == 2 * parts["weights"]
    assert sum(parts.values()) == answer["peak_bytes"]
    values = FP32 * BATCH // 4 * HIDDEN
    sent = by_kind(answer)
    assert sent.keys() == {("all-reduce", (0, 2, 4, 6)), ("all-reduce", (0, 1))}
    assert sent["all-reduce", (0, 2, 4, 6)] == parts["weights"] + FP32
    # forwards every layer, backwards every layer; XLA may leave out what the first one hands to the batch
    assert sent["all-reduce", (0, 1)] in (2 * LAYERS * values, (2 * LAYERS - 1) * values)


def test_memory_is_that_of_the_program_with_data(tmp_path):
    """The program runs on eight virtual processors: XLA's analysis of its step gives the rehearsed peak.

    Beside the arguments the program still holds the loss of the step before.
    """
    program = Path(jax_study.__file__).with_name("jax_really.py")
    words = (sys.executable, str(program), "8", "--dp", "4", "--tp", "2", "--batch", str(BATCH), *SIZES)
    variables = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(words, capture_output=True, text=True, check=True, env=variables, timeout=300)
    analysis = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    study = write_study(tmp_path, *SIZES)
    (answer,) = rehearsed(study, "--config", "dp=4,tp=2", "--ranks", "0")["ranks"]

    if answer["compiled_for"] == "cpu":
        needed = analysis["argument"] + analysis["temp"] + analysis["output"] - analysis["alias"]
        assert answer["peak_bytes"] == needed + FP32
        assert answer["parts_bytes"]["activations"] == analysis["temp"]
    assert answer["parts_bytes"]["weights"] + answer["parts_bytes"]["optimizer"] == pytest.approx(
        analysis["argument"], rel=1e-2
    )


def test_every_rank_has_its_own_groups(tmp_path):
    """Ranks 0 and 7 of dp=4, tp=2: one program, whose groups are those of each."""
    study = write_study(tmp_path, *SIZES)
    first, last = rehearsed(study, "--config", "dp=4,tp=2", "--ranks", "0,7")["ranks"]

    assert {tuple(one["ranks"]) for one in first["collectives"]} == {(0, 1), (0, 2, 4, 6)}
    assert {tuple(one["ranks"]) for one in last["collectives"]} == {(6, 7), (1, 3, 5, 7)}
    assert first["peak_bytes"] == last["peak_bytes"]


def test_what_jax_refuses_is_refused_in_its_words(tmp_path):
    """A batch of 12 cannot be cut in eight: JAX's own error, with the line of the program, and status 1."""
    study = write_study(tmp_path, *SIZES, "--batch", "12")
    (answer,) = rehearsed(study, "--config", "dp=8,tp=1", "--ranks", "0", status=1)["ranks"]

    assert answer["verdict"] == "refused"
    assert "partitioned 8 times, but the dimension size is 12" in answer["error"]
    line = next(number for number, text in enumerate(jax_study.PROGRAM.open(), start=1) if "device_put" in text)
    assert any(f"train.py:{line} main" in place for place in answer["where"])


def test_a_large_model_takes_no_memory(tmp_path):
    """38 thousand million parameters, 430 GiB with Adam's states, are rehearsed on 64 devices below 2 GiB."""
    study = write_study(tmp_path, "--layers", "36", "--hidden", "8192", "--ffn", "65536", hosts=8)
    (answer,) = rehearsed(study, "--config", "dp=8,tp=8", "--ranks", "0")["ranks"]

    assert answer["verdict"] == "accepted", answer["error"]
    assert answer["parameters"] == 2 * 36 * 8192 * 65536 // 8
    assert answer["resident_bytes"] < 2 << 30


def test_four_thousand_devices(tmp_path):
    """A world of 4,096: XLA's compiler for GPUs takes it; that for CPUs does not, and it is told what does."""
    study = write_study(tmp_path, *SIZES, hosts=512, batch=4096)
    status = 0 if gpu_compiler() else 1
    (answer,) = rehearsed(study, "--config", "dp=512,tp=8", "--ranks", "0", status=status)["ranks"]

    if gpu_compiler():
        assert answer["verdict"] == "accepted"
        assert answer["parameters"] == WEIGHTS // 8
        assert {len(one["ranks"]) for one in answer["collectives"]} == {8, 512}
    else:
        assert answer["verdict"] == "unknown"
        assert "jax-cuda12-pjrt" in answer["error"]


def test_an_invented_loss_is_told(tmp_path):
    """The program prints its loss: a one, at the line that asked for it."""
    study = write_study(tmp_path, *SIZES)
    found = rehearsed(study, "--config", "dp=8,tp=1", "--ranks", "0")
    (answer,) = found["ranks"]

    assert "step 1: loss 1.0000" in answer["printed"]
    (place,) = answer["invented"]
    line = next(number for number, text in enumerate(jax_study.PROGRAM.open(), start=1) if "float(loss)" in text)
    assert place.endswith(f"train.py:{line}")
    assert found.keys() == JSON_KEYS["rehearse"][""].keys()
