"""Rehearsals of Megatron-LM itself: megatron-core's wheel above Transformer Engine's Python code, without a device."""

from __future__ import annotations

import socket
import sys

import pytest

from docs.site.json_keys import JSON_KEYS
from tests.support.rehearsal.megatron_study import ENGINE, FLAGS, needs_megatron, write_study
from tests.support.studies.command_line import in_process

pytestmark = [pytest.mark.slow, needs_megatron()]

SIMULATED = "trial: {backend: simulated}\n"
HIDDEN, LAYERS, VOCABULARY, FFN, KEYS = 512, 8, 32_000, 1408, 256
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN + 2 * HIDDEN
"""Parameters of a layer, by hand: projections of attention, the gated MLP, two norms."""
SPLIT = LAYER - 2 * HIDDEN
"""Those of them that tp splits."""


def rehearsed(study, *words, status=0, packages=None):
    """The answers of a rehearsal."""
    done = in_process("rehearse", study, "--yes", "--json", *words, cwd=study.parent, timeout_s=600, packages=packages)
    assert done.status == status, done.err
    return done.json


def test_every_stage_holds_what_the_model_and_the_optimizer_are(tmp_path):
    """Of pp=2, tp=2, dp=2: parameters by hand; 2 bytes a weight, 4 a gradient, 12 of the optimizer over dp."""
    found = rehearsed(write_study(tmp_path), "--config", "pp=2,tp=2,dp=2,mbs=1")

    assert [one["verdict"] for one in found["ranks"]] == ["accepted"] * 2
    assert [one["rank"] for one in found["ranks"]] == [0, 4]
    layers = LAYERS // 2 * (SPLIT // 2 + 2 * HIDDEN)
    table = VOCABULARY // 2 * HIDDEN
    assert [one["parameters"] for one in found["ranks"]] == [layers + table, layers + table + HIDDEN]
    for one in found["ranks"]:
        parts, parameters = one["parts_bytes"], one["parameters"]
        assert parts["weights"] == pytest.approx(2 * parameters, rel=1e-3)
        assert parts["gradients"] == pytest.approx(4 * parameters, rel=1e-3)
        assert parts["optimizer"] == pytest.approx(12 * parameters / 2, rel=1e-3)
        assert sum(parts.values()) == one["peak_bytes"]


def test_the_answer_has_the_documented_keys(tmp_path):
    """docs/commands.md names the keys of `--json`, and no others are there."""
    found = rehearsed(write_study(tmp_path), "--config", "dp=8,mbs=1", "--ranks", "0")

    assert found.keys() == JSON_KEYS["rehearse"][""].keys()


def test_recomputation_needs_less_and_sends_more(tmp_path):
    """The first stage keeps less activations with full recomputation, and gathers its inputs once more."""
    study = write_study(tmp_path)
    layout = "pp=2,tp=2,dp=2,mbs=1"
    none, full = (
        rehearsed(study, "--config", f"{layout},recompute={mode}", "--ranks", "0")["ranks"][0]
        for mode in ("none", "full")
    )

    def gathers(answer):
        return sum(one["count"] for one in answer["collectives"] if one["name"] == "_allgather_base_")

    assert full["parts_bytes"]["activations"] < 0.6 * none["parts_bytes"]["activations"]
    assert gathers(full) > gathers(none)


def test_messages_between_stages_have_their_bytes_and_peers(tmp_path):
    """Each micro-batch of 1,024 tokens crosses once each way, as half of its hidden values: tp=2 splits them."""
    found = rehearsed(write_study(tmp_path), "--config", "pp=2,tp=2,dp=2,mbs=1")

    micro_batches, size = 8 // 2, 1024 * HIDDEN * 2 // 2
    first, last = (
        {(one["name"], one["peer"], one["size_bytes"]): one["count"] for one in answer["collectives"]}
        for answer in found["ranks"]
    )
    assert first["send", 4, size] == first["recv_", 4, size] == micro_batches
    assert last["send", 0, size] == last["recv_", 0, size] == micro_batches


SCHEDULES = {
    "1F1B": ("pp=2,tp=4,dp=1,mbs=1", (), 3),
    "1F1B with full recomputation": ("pp=4,tp=2,dp=1,mbs=1,recompute=full", (), 5),
    "interleaved": ("pp=2,tp=4,dp=1,mbs=1", ("--num-layers-per-virtual-pipeline-stage", "2"), 4),
    "no pipeline": ("tp=4,dp=2,mbs=1", (), 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_whole_step_follows_from_few_micro_batches(tmp_path, name):
    """Peak and parts to the last byte, operators, and each collective's count are those of a step that makes all."""
    layout, flags, made = SCHEDULES[name]
    study = write_study(tmp_path, *flags, "--global-batch-size", "16")
    some, whole = (rehearsed(study, "--config", layout, *words)["ranks"] for words in ((), ("--all-micro-batches",)))

    of_step = some[0]["micro_batches"][1]
    assert some[0]["micro_batches"] == [made, of_step]
    assert [one["micro_batches"] for one in whole] == [[of_step, of_step]] * len(whole)
    for one, other in zip(some, whole, strict=True):
        assert one["is_whole_step"]
        for key in ("verdict", "parameters", "peak_bytes", "parts_bytes", "operators"):
            assert one[key] == other[key], key
        assert by_kind(one) == by_kind(other)


def by_kind(answer):
    """Number of each kind of collective."""
    return {
        (one["name"], one["size_bytes"], tuple(one["ranks"]), one["peer"]): one["count"]
        for one in answer["collectives"]
    }


def test_experts_get_equal_tokens_and_that_is_told(tmp_path):
    """Of 8 experts over ep=4, a rank holds two; the counts of tokens are told as invented."""
    flags = ("--num-experts", "8", "--moe-router-topk", "2", "--moe-grouped-gemm", "--expert-model-parallel-size", "4")
    study = write_study(tmp_path, *flags, "--moe-token-dispatcher-type", "alltoall")
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=1", "--ranks", "5")["ranks"]

    experts = LAYERS * 2 * 3 * HIDDEN * FFN
    others = LAYERS * (LAYER - 3 * HIDDEN * FFN + 8 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN
    assert answer["verdict"] == "accepted"
    assert answer["parameters"] == experts + others
    assert any("tokens of each expert" in place for place in answer["invented"])
    assert any("alltoall" in one["name"] and len(one["ranks"]) == 4 for one in answer["collectives"])


def test_what_megatron_refuses_is_refused_in_its_words(tmp_path):
    """A model of 8 heads in 3 groups: Megatron-LM's own error, with its file and line, and status 1."""
    study = write_study(tmp_path, "--num-query-groups", "3")
    (answer,) = rehearsed(study, "--config", "tp=2,dp=4,mbs=1", status=1)["ranks"]

    assert answer["verdict"] == "refused"
    assert "num_query_groups" in answer["error"]
    assert any("megatron/" in line for line in answer["where"])


def test_what_the_environment_lacks_is_unknown(tmp_path):
    """A package that is not installed says nothing of the layout, and is named."""
    study = write_study(tmp_path, program="import a_package_of_nobody\n")
    (answer,) = rehearsed(study, "--config", "tp=2,dp=4,mbs=1", status=1)["ranks"]

    assert answer["verdict"] == "unknown"
    assert "a_package_of_nobody" in answer["error"]


def test_exported_flags_of_a_study_without_a_command_are_run(tmp_path):
    """A simulated study's configuration trains as it is exported, with overlap."""
    (tmp_path / "study.yaml").write_text(write_study(tmp_path).read_text().split("trial:")[0] + SIMULATED)
    program = f"{sys.executable} pretrain.py {' '.join(FLAGS)}"
    words = ("--export", "megatron", "--program", program, "--config", "pp=2,tp=2,dp=2,mbs=1")
    found = rehearsed(tmp_path / "study.yaml", *words, packages=ENGINE)

    assert [one["verdict"] for one in found["ranks"]] == ["accepted"] * 2
    assert found["exported"]["target"] == "megatron"
    assert "--overlap-grad-reduce" in found["exported"]["arguments"]
    assert found.keys() == (JSON_KEYS["rehearse"][""] | JSON_KEYS["rehearse"]["with `--export`, also"]).keys()


def test_a_step_is_replayed_from_all_stages(tmp_path):
    """Both predictions of a small step agree within a quarter; it is as long as its longest rank, and overheads."""
    study = write_study(tmp_path)
    found = rehearsed(study, "--config", "pp=2,tp=2,dp=2,mbs=1", "--time")

    assert found.keys() == (JSON_KEYS["rehearse"][""] | JSON_KEYS["rehearse"]["with `--time`, also"]).keys()
    assert found["step_s"] == pytest.approx(found["predicted_step_s"], rel=0.25)
    assert found["step_s"] > max(found["ranks_s"]) > 0


WRITES = """\
from pathlib import Path
import socket
import sys
Path("left.txt").write_text("left")
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=2)
    raise SystemExit("connected")
except OSError:
    raise SystemExit("kept apart")
"""


def test_a_program_leaves_nothing_and_reaches_nobody(tmp_path):
    """What the program writes is gone afterwards, and a server of this machine is out of its reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = WRITES.replace("PORT", str(server.getsockname()[1]))
        study = write_study(tmp_path, program=text)
        (answer,) = rehearsed(study, "--config", "tp=2,dp=4,mbs=1", status=1)["ranks"]

    assert "kept apart" in answer["error"]
    assert not (tmp_path / "left.txt").exists()


@pytest.mark.parametrize("parts", [(), ("--test-mode", "--qk-layernorm")])
def test_norms_of_apex_have_a_stand_in(tmp_path, parts):
    """Layers without Transformer Engine take apex's LayerNorm, which the answer names; their weights are counted."""
    flags = ("--transformer-impl", "local", "--normalization", "LayerNorm", *parts)
    (answer,) = rehearsed(write_study(tmp_path, *flags), "--config", "tp=2,dp=4,mbs=1")["ranks"]

    assert answer["verdict"] == "accepted", answer["error"]
    heads = 2 * 2 * HIDDEN // 8 if parts else 0
    assert answer["parameters"] == LAYERS * (SPLIT // 2 + 4 * HIDDEN + heads) + VOCABULARY * HIDDEN + 2 * HIDDEN
    assert any("apex, which is not installed here" in place for place in answer["invented"])


def test_flash_attn_stands_in_where_determinism_leaves_no_other_kernel(tmp_path):
    """On A100 cuDNN's kernel is not deterministic: flash-attn keeps no scores, and the answer names it."""
    variables = 'NVTE_ALLOW_NONDETERMINISTIC_ALGO: "0", NCCL_ALGO: Ring, CUBLAS_WORKSPACE_CONFIG: ":4096:8", '

    def answer_of(*flags):
        study = write_study(tmp_path, "--deterministic-mode", *flags)
        study.write_text(
            study.read_text().replace("dgx-h100", "dgx-a100").replace("PYTHONPATH", variables + "PYTHONPATH")
        )
        (answer,) = rehearsed(study, "--config", "dp=8,mbs=1", "--ranks", "0")["ranks"]
        return answer

    flash, unfused = answer_of(), answer_of("--attention-backend", "unfused")

    assert any("flash-attn" in place for place in flash["invented"])
    assert not any("flash-attn" in place for place in unfused["invented"])
    scores = 8 * 1024 * 1024 * 2
    assert unfused["peak_bytes"] - flash["peak_bytes"] > LAYERS * scores
