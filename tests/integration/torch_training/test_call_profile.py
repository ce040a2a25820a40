"""What steps communicate beside what the cost model predicts: on real ranks, and on recordings made by hand."""

import dataclasses

import pytest

from costmodels.blocks.operator import OpKind
from costmodels.job.parallel_config import ParallelConfig, parse_config
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from tests.support.programs.small_backends import cluster_of
from tests.support.programs.training_ranks import GPT, LLAMA, MIXTRAL, job_of, train_recorded
from trials.torch_training.profiling.call_profile import Channel, call_mismatches, predicted_calls
from trials.torch_training.profiling.rank_recording import Issued, RankGroup, RankRecording

RUNTIME = find_runtime("torch-reference")
REPLICAS = ParallelConfig(dp=2, mbs=2, sequence_parallel=False)


def _told(on_ranks, model, text, **changes):
    """The mismatches of one real step."""
    job = job_of(model, **changes)
    config = parse_config(text, {"zero_stage": 1, "sequence_parallel": "tp=" in text})
    steps = on_ranks(config.num_devices, train_recorded, job, RUNTIME, config)
    recordings = [recordings[-1] for recordings in steps]
    return call_mismatches(
        Setting(job=job, cluster=cluster_of(config.num_devices), runtime=RUNTIME), config, recordings
    )


@pytest.mark.parametrize(
    ("model", "text", "precision"),
    [
        (LLAMA, "tp=2,mbs=4", "bf16"),
        (LLAMA, "tp=2,sequence_parallel=false,mbs=4", "fp32"),
        (LLAMA, "cp=2,recompute=selective,mbs=4", "bf16"),
        (LLAMA, "up=8,mbs=8", "fp32"),
        (LLAMA, "dp=4,dp_shard=2,zero_stage=3,mbs=1", "bf16"),
        (GPT, "pp=2,dp=2,zero_stage=2,mbs=2", "fp32"),
        (MIXTRAL, "tp=2,dp=2,ep=2,mbs=2", "fp32"),
        (MIXTRAL, "pp=2,layers=3/1,recomputed=1/0,dp=2,ep=2,mbs=2", "fp32"),
    ],
)
def test_a_step_communicates_what_the_cost_model_predicts(on_ranks, model, text, precision):
    """On every dimension of the mesh the bytes are those of `collective_executions`."""
    assert _told(on_ranks, model, text, precision=precision) == ()


def test_full_recomputation_leaves_out_the_last_reduction_of_a_layer(on_ranks):
    """Torch stops it before the last product, whose sum over tp no backward pass needs."""
    (told,) = _told(on_ranks, LLAMA, "tp=2,recompute=full,mbs=4")

    assert told == "tp.reduce_scatter: predicted 3.41 MB in 52 calls, saw 2.88 MB in 44 calls"


def test_a_step_as_predicted_is_not_told():
    """Nor are the few bytes of the loss and the norm, which nothing predicts."""
    assert _of_replicas(1.0, further=[(OpKind.ALL_REDUCE, 4), (OpKind.ALL_GATHER, 16)]) == ()
    assert _of_replicas(1.02) == ()


def test_other_bytes_are_told():
    """One sentence for each kind of call on groups of one form, those that nothing predicts by their dimensions."""
    assert _of_replicas(1.5) == (
        "weights.all_gather: predicted 622 kB in 4 calls, saw 933 kB in 1 call",
        "weights.reduce_scatter: predicted 622 kB in 4 calls, saw 933 kB in 1 call",
    )
    assert _of_replicas(1.0, further=[(OpKind.ALL_TO_ALL, 500_000), (OpKind.ALL_TO_ALL, 20_000)]) == (
        "world.all_to_all: predicted nothing, saw 520 kB in 2 calls",
    )
    assert _of_replicas(0.0, further=[(OpKind.ALL_REDUCE, 4)]) == (
        "weights.all_gather: predicted 622 kB in 4 calls, saw nothing",
        "weights.reduce_scatter: predicted 622 kB in 4 calls, saw nothing",
        "world.all_reduce: predicted nothing, saw 4 bytes in 1 call",
    )


def test_dimensions_with_the_same_ranks_are_compared_together():
    """With experts over dp alone, tokens and weights are exchanged by the same two ranks, and told by their kind."""
    config = dataclasses.replace(REPLICAS, ep=2)

    found = predicted_calls(Setting(job=job_of(MIXTRAL), cluster=cluster_of(2), runtime=RUNTIME), config)

    assert {channel: traffic.sites for channel, traffic in found.items()} == {
        Channel(kind=OpKind.ALL_TO_ALL, stride=1, size=2): ("ep.all_to_all",),
        Channel(kind=OpKind.ALL_GATHER, stride=1, size=2): ("weights.all_gather",),
        Channel(kind=OpKind.REDUCE_SCATTER, stride=1, size=2): ("weights.reduce_scatter",),
    }


def _of_replicas(share, further=()):
    """The mismatches of two ranks that gather and scatter this share of what is predicted, and do something further."""
    job, cluster = job_of(LLAMA), cluster_of(2)
    group = RankGroup(name="0", ranks=(0, 1))
    predicted = predicted_calls(Setting(job=job, cluster=cluster, runtime=RUNTIME), REPLICAS)
    calls = [(channel.kind, round(share * traffic.num_bytes)) for channel, traffic in predicted.items() if share]
    recordings = [
        RankRecording(
            rank=rank,
            events=tuple(
                Issued(call=call, kind=kind, message_bytes=num_bytes, group=group)
                for call, (kind, num_bytes) in enumerate([*calls, *further])
            ),
        )
        for rank in range(2)
    ]
    return call_mismatches(Setting(job=job, cluster=cluster, runtime=RUNTIME), REPLICAS, recordings)
