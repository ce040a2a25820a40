"""The benchmark of operators in training beside the same ones alone: a real training, and what rows are made of."""

import pytest

from benchmarks.calibration import training_operators
from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall

MODEL = """
source: made up
assumed: []
num_layers: 2
hidden_size: 64
num_heads: 4
num_kv_heads: 4
head_dim: 16
ffn_size: 128
gated_ffn: false
vocab_size: 256
tied_embeddings: true
learned_positions: 64
norm: layer
qkv_bias: true
attention_output_bias: true
mlp_bias: true
"""
STUDY = """
name: tiny
model: tiny-model.yaml
cluster: {name: cpu-host, hosts: 1, devices_per_host: 1}
job: {sequence_length: 64, global_batch_size: 2, precision: fp32, zero_stage: 1}
runtime: torch-reference
trial: {backend: torch, clock: cpu, warmup_steps: 1, min_steps: 1, max_steps: 1}
"""
COLUMNS = {"kind", "phase", "operators", "alone_over_training", "lower_quartile", "upper_quartile", "formula_error"}


def calls_of(count):
    """Some products of growing size."""
    return [
        IsolatedCall(
            kind=OpKind.MATMUL, phase=Phase.FORWARD, role="mlp.up", precision="fp32", shape=(64.0, 64.0, 64.0 * n)
        )
        for n in range(1, count + 1)
    ]


def test_ratios_are_those_of_each_operator():
    """Operators that take half as long alone, and a formula that is 10% off, give just these figures."""
    calls = calls_of(3)
    training_s = {call: 0.1 * number for number, call in enumerate(calls, start=1)}
    alone_s = {call: seconds / 2 for call, seconds in training_s.items()}
    formula_s = {call: seconds * 0.9 for call, seconds in training_s.items()}

    row = training_operators._row(OpKind.MATMUL, Phase.FORWARD, calls, training_s, alone_s, formula_s)

    assert set(row) == COLUMNS
    assert (row["kind"], row["phase"], row["operators"]) == ("matmul", "forward", 3)
    assert row["lower_quartile"] == row["alone_over_training"] == row["upper_quartile"] == pytest.approx(0.5)
    assert row["formula_error"] == pytest.approx(0.1)


def test_a_training_gives_a_row_for_each_kind(answered, tmp_path):
    """A tiny model is trained, and its operators run alone; there are too few for a surrogate, which is no mistake."""
    pytest.importorskip("torch", reason="the benchmark trains")
    (tmp_path / "tiny-model.yaml").write_text(MODEL, encoding="utf-8")
    study = tmp_path / "tiny.yaml"
    study.write_text(STUDY, encoding="utf-8")

    told = answered(training_operators, study, "--configs", "1")

    rows = told["alone_against_in_training"]
    assert all(set(row) == COLUMNS for row in rows)
    kinds = [(row["kind"], row["phase"]) for row in rows]
    assert len(set(kinds)) == len(kinds)
    assert {("matmul", "forward"), ("matmul", "backward")} <= set(kinds)
    assert all(0 < row["lower_quartile"] <= row["alone_over_training"] <= row["upper_quartile"] for row in rows)
    assert told["surrogate_of_unseen_sizes"] == []
