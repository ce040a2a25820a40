from dataclasses import replace

import pytest

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.step.executions import operator_executions
from tests.support.programs import profiling_ranks
from tests.support.programs.training_ranks import LLAMA, job_of
from trials.backend import OperatorSample
from trials.profiling.operator_profile import RankProfile, Unexplained, merge_pipeline, mismatches
from trials.profiling.trace_events import TraceEvent
from trials.torch_training.profiling.execution_samples import read_profile

# this trainer repeats the attention core alone, not all but every second product
RUNTIME = replace(find_runtime("torchtitan"), fused_elementwise=False, selective_products=False)
TINY_LLAMA = LLAMA.changed(num_layers=2)
TINY_GPT = TINY_LLAMA.changed(
    norm="layer",
    num_kv_heads=8,
    gated_ffn=False,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    learned_positions=64,
    tied_embeddings=True,
)
TINY_MIXTRAL = TINY_LLAMA.changed(
    num_experts=4, top_k=2, expert_ffn_size=96, num_shared_experts=1, shared_expert_ffn_size=32
)
JOB, ALONE = job_of(TINY_LLAMA, global_batch_size=4), ParallelConfig()
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
NODE = "autograd::engine::evaluate_function: "


def _profiles(on_ranks, model, config):
    job = job_of(model, global_batch_size=4)
    return job, [told for (told,) in on_ranks(config.num_devices, profiling_ranks.profile, job, RUNTIME, config)]


def _predicted(job, config):
    """Kind, phase, shape and count of what a step of one pipeline runs, by name.

    A trace does not tell the merging of a ring from other sums, so no profile holds it.
    """
    return {
        operator.name: (operator.kind, operator.phase, pytest.approx(operator.shape[0].tolist()), count[0])
        for operator, count in operator_executions(job, RUNTIME, ConfigGrid.from_configs([config]))
        if count[0] and not operator.name.startswith("attention.core.merge")
    }


def _seen(profiles, config):
    samples = merge_pipeline([profile.samples for profile in profiles], config)
    by_name = {sample.name: (sample.kind, sample.phase, list(sample.shape), sample.count) for sample in samples}

    assert len(by_name) == len(samples), "every operator has one shape"
    assert all(sample.time_s > 0 for sample in samples)
    return by_name


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (TINY_LLAMA, {"tp": 2}),
        (TINY_LLAMA, {"pp": 2, "mbs": 2}),
        (TINY_LLAMA, {"cp": 2, "recompute": "selective"}),
        (TINY_LLAMA, {"up": 2}),
        (TINY_GPT, {"mbs": 2}),
        (TINY_GPT, {"tp": 2, "sequence_parallel": False}),
        (TINY_MIXTRAL.changed(expert_ffn_size=90), {}),  # too odd for torch's grouped product on the way down
        (TINY_MIXTRAL, {"tp": 2}),
        (TINY_MIXTRAL, {"dp": 2, "ep": 2}),
    ],
)
def test_a_step_runs_what_the_cost_model_predicts(on_ranks, model, degrees):
    """Names, kinds, phases, shapes and counts of all operators are those of `operator_executions`."""
    config = ParallelConfig(**degrees)
    job, profiles = _profiles(on_ranks, model, config)

    assert _seen(profiles, config) == _predicted(job, config)


@pytest.mark.parametrize("degrees", [{}, {"dp": 2, "zero_stage": 3}])
def test_full_recomputation_leaves_out_the_end_of_a_layer(on_ranks, degrees):
    """Torch stops it before the last product and the residual after it, whose results no backward pass needs."""
    config = ParallelConfig(recompute="full", **degrees)
    job, profiles = _profiles(on_ranks, TINY_LLAMA, config)
    seen, predicted = _seen(profiles, config), _predicted(job, config)
    for name in ("dense_mlp.down", "dense_mlp.residual"):
        *rest, count = predicted[name]
        predicted[name] = (*rest, count / 2)

    assert seen == predicted


def test_a_profile_as_predicted_has_no_mismatch():
    """One that shows exactly what `operator_executions` predicts."""
    assert mismatches(JOB, RUNTIME, ALONE, [_ideal()]) == ()


def test_a_missing_operator_is_told():
    """As are one that nothing predicts, another shape and another count."""
    ideal = _ideal()
    qkv = _sample("attention.qkv", OpKind.MATMUL, (32.0, 64.0, 128.0), count=8)
    changed = {"attention.qkv": (qkv,), "head.cross_entropy": (), "head.norm": (_times(ideal, "head.norm", 1),)}
    samples = [each for sample in ideal.samples for each in changed.get(sample.name, (sample,))]
    made_up = _sample("attention.window", OpKind.ELEMENTWISE, (5.0,), count=3)

    assert mismatches(JOB, RUNTIME, ALONE, [replace(ideal, samples=(*samples, made_up))]) == (
        "attention.qkv: predicted shape (64, 64, 128), saw (32, 64, 128)",
        "head.norm: predicted 4 executions, saw 1 execution",
        "head.cross_entropy: predicted 4 executions, saw none",
        "attention.window: predicted none, saw 3 executions",
    )


def test_unexplained_work_is_told_by_its_share_of_the_pass():
    """Where it is worth saying; the share of all of it is a number."""
    others = (
        Unexplained(phase=BACKWARD, name="aten::copy_", time_s=0.12),
        Unexplained(phase=BACKWARD, name="aten::t", time_s=0.01),
    )
    profiles = [replace(_ideal(), backward_s=0.87, unexplained=others)]

    assert mismatches(JOB, RUNTIME, ALONE, profiles) == (
        "saw aten::copy_ for 12% of the backward time, which no operator predicts",
    )


def test_a_pipeline_is_the_first_ranks_of_all_stages():
    """Counts are those of its ranks, times the medians over all ranks."""
    norms = [_sample("attention.norm", OpKind.NORM, (8.0, 4.0), count=2, time_s=time_s) for time_s in (1, 2, 30, 4)]

    (merged,) = merge_pipeline([[norm] for norm in norms], ParallelConfig(pp=2, dp=2))

    assert (merged.count, merged.time_s) == (4, 3.0)


def test_what_the_router_sends_is_averaged_over_the_ranks():
    """Its mean over the ranks is what the cost model predicts."""
    products = [_sample("moe_mlp.up", OpKind.GROUPED_MATMUL, (2.0, rows, 4.0, 4.0), count=1) for rows in (20.0, 12.0)]

    (merged,) = merge_pipeline([[product] for product in products], ParallelConfig(dp=2, ep=2))

    assert merged.shape == (2.0, 16.0, 4.0, 4.0)


@pytest.mark.parametrize(("node", "of_data", "of_weight"), [("Mm", 2.0, 1.0), ("Addmm", 1.0, 2.0)])
def test_products_of_equal_sizes_are_told_apart_by_their_order(node, of_data, of_weight):
    """Torch's two kinds of nodes compute the two gradients in different orders."""
    square = (8, 8)
    forward = TraceEvent(name="aten::mm", sequence=7, shapes=(square, square), own_s=5.0)
    products = tuple(TraceEvent(name="aten::mm", shapes=(square, square), own_s=own_s) for own_s in (1.0, 2.0))
    mark = TraceEvent(name="@attention.proj", children=(forward,))
    backward = TraceEvent(name=f"{NODE}{node}Backward0", sequence=7, forward_thread=1, children=products)

    times_s = {sample.name: sample.time_s for sample in read_profile((mark, backward)).samples}

    assert times_s == {
        "attention.proj": 5.0,
        "attention.proj.data_gradient": of_data,
        "attention.proj.weight_gradient": of_weight,
    }


def test_collectives_and_work_on_weights_are_in_no_time():
    """Only what else a pass computes is unexplained."""
    events = (
        TraceEvent(name="aten::clone", own_s=1.0, children=(TraceEvent(name="c10d::allreduce_", own_s=10.0),)),
        TraceEvent(name="@weights.gradients", children=(TraceEvent(name="aten::mul", own_s=10.0),)),
        TraceEvent(name=f"{NODE}torch::autograd::AccumulateGrad", children=(TraceEvent(name="aten::add_", own_s=9.0),)),
        TraceEvent(name=f"{NODE}SliceBackward0", children=(TraceEvent(name="aten::zeros", own_s=2.0),)),
    )

    profile = read_profile(events, num_steps=2)

    assert profile.samples == ()
    assert profile.unexplained == (
        Unexplained(phase=FORWARD, name="aten::clone", time_s=0.5),
        Unexplained(phase=BACKWARD, name="aten::zeros", time_s=1.0),
    )


def _sample(name, kind, shape, *, count, time_s=1.0):
    return OperatorSample(name=name, kind=kind, phase=FORWARD, shape=shape, time_s=time_s, count=count)


def _ideal():
    """The profile of one rank that runs exactly what is predicted."""
    samples = tuple(
        OperatorSample(name=name, kind=kind, phase=phase, shape=tuple(shape.expected), time_s=1.0, count=int(count))
        for name, (kind, phase, shape, count) in _predicted(JOB, ALONE).items()
    )
    return RankProfile(samples=samples, forward_s=1.0, backward_s=1.0, unexplained=())


def _times(profile, name, count):
    """A profile's sample with another count."""
    return next(replace(sample, count=count) for sample in profile.samples if sample.name == name)
