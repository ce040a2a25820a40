from dataclasses import replace

import numpy as np
import pytest

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.isolated import IsolatedCall, is_run_by, isolated_call_s, isolated_operator, isolated_role
from costmodels.operators.kernels import alone_s, collective_alone_s
from costmodels.operators.layer_operators import step_operators, unique_shapes
from hardware.cluster_file import find_cluster

UNFUSED = replace(find_runtime("megatron-core"), fused_elementwise=False, fused_cross_entropy=False)
LAYOUTS = (ParallelConfig(pp=1, tp=1, dp=8, mbs=1), ParallelConfig(pp=1, tp=2, dp=2, cp=2, mbs=2))


def shapes_of(*configs):
    """The unique shapes of some configurations."""
    return unique_shapes(ConfigGrid.from_configs(configs))[0]


@pytest.mark.parametrize("model", ["gpt-13b", "llama-7b", "mixtral-8x7b"])
def test_a_call_alone_is_what_an_unfused_step_runs(model):
    """Kind, role and shape tell the flop, the bytes and the time of every operator that has a role."""
    spec = find_model(model)
    spec = spec.changed(num_kv_heads=spec.plain.num_heads)  # grouped heads are in no shape
    job = TrainingJob(model=spec, sequence_length=2048, global_batch_size=32)
    device = find_cluster("dgx-a100").devices[0]
    compared = 0
    for operator in step_operators(job, UNFUSED, shapes_of(*LAYOUTS)):
        role = isolated_role(operator.name, operator.kind, spec)
        if role is None:
            assert operator.name.startswith(("embedding.lookup", "moe_mlp.permute", "attention.core.merge"))
            continue
        for row, shape in enumerate(operator.shape.tolist()):
            call = IsolatedCall(
                kind=operator.kind, phase=operator.phase, role=role, precision="bf16", shape=tuple(shape)
            )
            alone = isolated_operator(call)
            assert alone.flop[0] == pytest.approx(operator.flop[row]), operator.name
            assert alone.moved_bytes[0] == pytest.approx(operator.moved_bytes[row]), operator.name
            assert alone_s(alone, device)[0] == pytest.approx(alone_s(operator, device)[row]), operator.name
            assert is_run_by(call, spec)
            compared += 1
    assert compared > 40


def test_products_of_unfused_attention_have_no_role():
    """Their batch is in no shape, so nobody could run them alone."""
    unfused = find_runtime("megatron-lm-2021")
    job = TrainingJob(model=find_model("gpt-13b"), sequence_length=2048, global_batch_size=32)
    core = [
        operator
        for operator in step_operators(job, replace(unfused, fused_attention=False), shapes_of(LAYOUTS[0]))
        if operator.name.startswith("attention.core")
    ]

    assert core
    assert {isolated_role(operator.name, operator.kind, job.model) for operator in core} == {None}


def test_other_models_norms_and_activations_are_told_apart():
    """A LayerNorm and a GELU say nothing of a model with RMSNorm and SwiGLU."""

    def call(role):
        return IsolatedCall(kind=OpKind.NORM, phase=Phase.FORWARD, role=role, precision="bf16", shape=(8.0, 8.0))

    llama, gpt = find_model("llama-7b"), find_model("gpt-13b")

    assert [is_run_by(call(role), llama) for role in ("layer_norm", "gelu", "rms_norm", "swiglu")] == [0, 0, 1, 1]
    assert [is_run_by(call(role), gpt) for role in ("layer_norm", "gelu", "rms_norm", "swiglu")] == [1, 1, 0, 0]


def test_a_collective_alone_has_its_links_time():
    """A group on one host takes what its links say; one that no host holds, or another cluster has, has no time."""
    cluster = find_cluster("dgx-a100", hosts=2)

    def call(size, hosts=1):
        shape = (2.0**24, float(size), float(hosts))
        return IsolatedCall(kind=OpKind.ALL_GATHER, phase=Phase.FORWARD, role="", precision="bf16", shape=shape)

    group = cluster.group_links(np.array([1]), np.array([4]))

    assert isolated_call_s(call(4), cluster) == collective_alone_s(OpKind.ALL_GATHER, np.array([2.0**24]), group)[0]
    assert [isolated_call_s(other, cluster) for other in (call(3), call(16), call(4, hosts=2))] == [None, None, None]
