"""The event simulator: where it must agree with the closed form, and where it must not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import simulate_step
from costmodels.simulator.step_tasks import Role
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.pipeline.passes import Kind, pass_order
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.pass_times import pass_times
from tests.support.settings.random_settings import cases, grid_of, job_of, setting_for

MEGATRON = find_runtime("megatron-core")
HOST = find_cluster("dgx-h100")
TWO_KINDS = cluster_from_mapping({"groups": [{"name": "dgx-h100"}, {"name": "dgx-a100"}]}, Path())


def simulated(job, cluster, config, runtime=MEGATRON, **rest):
    """A simulated step of a job, under Megatron-Core by default."""
    return simulate_step(setting_for(job, cluster, runtime), config, **rest)


def closed_form(job, cluster, config, runtime=MEGATRON):
    """The closed form's estimate of it."""
    return estimate_step(setting_for(job, cluster, runtime), grid_of(config))


@given(
    runtime=st.sampled_from(runtime_names()),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([1, 2, 4]),
    rounds=st.integers(4, 12),
    mbs=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
@settings(max_examples=40)
def test_equal_stages_without_contention_agree_with_the_closed_form(runtime, pp, vpp, rounds, mbs, recompute):
    """Within 2%: stages of equal layers on hosts of their own, next to no vocabulary, one replica.

    Of messages that do not run beside compute, the closed form counts those of all chunks while the pipeline fills; and
    it hides no traffic beside products that are recomputed.
    """
    profile = find_runtime(runtime)
    assume(vpp == 1 or (pp > 1 and profile.overlaps_p2p))
    assume(recompute != "full" or not profile.overlaps_tensor)
    profile = replace(profile, layer_split="even", layer_padding=1, residuals=(), stalled_hosts=0)
    job = job_of("llama3-8b", batch=rounds * pp * mbs, vocab_size=64)
    cluster = find_cluster("dgx-h100", hosts=pp)
    config = ParallelConfig(pp=pp, tp=8, vpp=vpp, mbs=mbs, recompute=recompute, sequence_parallel=True, zero_stage=0)

    expected_s = closed_form(job, cluster, config, profile).step_time_s[0]
    assert simulated(job, cluster, config, profile).step_time_s == pytest.approx(expected_s, rel=0.02)


@given(cases(max_configs=1), st.sampled_from(["1f1b", "gpipe", "zero-bubble"]))
@settings(max_examples=40)
def test_every_configuration_can_be_simulated(case, schedule):
    """Parts are never negative and add up, and no stage's own passes are longer than the step."""
    config = case.grid.config(0)
    micro_batches = case.job.global_batch_size // (config.dp * config.mbs)
    assume(micro_batches * config.pp * config.vpp <= 2000)
    rounds = max(micro_batches // config.pp, 1)
    assume(config.vpp == 1 or (schedule == "1f1b" and micro_batches % rounds == 0))
    found = simulate_step(case.setting, config, schedule=schedule)

    assert tuple(found.breakdown_s) == BREAKDOWN
    assert min(found.breakdown_s.values()) >= -1e-9 * found.step_time_s
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)
    assert np.isfinite(found.timeline.end_s).all()
    for works, kind in zip(found.stages, found.replicas, strict=True):
        busiest_s = max(sum(work.parts_s().values()) for work in works)
        assert found.step_time_s >= kind.micro_batches * busiest_s * (1 - 1e-9)


def test_replicas_that_are_alike_are_simulated_once():
    """Eight times the replicas on eight times the hosts make no more tasks."""
    config = ParallelConfig(pp=2, tp=8, dp=2)
    few = simulated(job_of(batch=32), find_cluster("dgx-h100", hosts=4), config)
    many = simulated(job_of(batch=256), find_cluster("dgx-h100", hosts=32), replace(config, dp=16))

    assert len(many.labels) == len(few.labels)
    assert [kind.count for kind in many.replicas] == [16]


def test_an_unlike_replica_sets_the_pace_and_less_work_helps_it():
    """Of two replicas the A100's ends last; with fewer micro-batches for it the step ends sooner.

    No sooner than a perfect split would have it, which is (1 + r) / 2 times as fast for times in the ratio r.
    """
    # long sequences, so that the devices set the pace and not their hosts
    job, config = job_of(batch=48, sequence_length=16384), ParallelConfig(tp=8, dp=2)
    even = simulated(job, TWO_KINDS, config)
    fast_s, slow_s = (sum(works[0].parts_s().values()) for works in even.stages)
    ratio = slow_s / fast_s
    share = round(48 / (1 + 1 / ratio))
    less = Assignment(micro_batches=(share, 48 - share))
    uneven = simulated(job, TWO_KINDS, replace(config, assignment=less))

    assert len(even.replicas) == 2
    assert ratio > 1.5
    assert even.step_time_s >= 24 * slow_s
    gain = even.step_time_s / uneven.step_time_s
    assert 0.9 * (1 + ratio) / 2 < gain <= (1 + ratio) / 2


def test_uneven_stages_fit_unlike_hosts_and_some_layers_run_again():
    """Fewer layers on the A100, or the head on the H100, shorten a step; half of the recomputed layers cost half."""
    job, config = job_of(batch=32, sequence_length=16384), ParallelConfig(pp=2, tp=8)
    even, fewer, head_on_fast = (
        simulated(job, TWO_KINDS, replace(config, assignment=uneven)).step_time_s
        for uneven in (Assignment(), Assignment(layers=(22, 10)), Assignment(hosts=(1, 0)))
    )
    none, half, full = (
        simulated(job, HOST, ParallelConfig(tp=8, recompute=mode, assignment=Assignment(recomputed=some))).step_time_s
        for mode, some in (("none", ()), ("none", (16,)), ("full", ()))
    )

    assert fewer < 0.8 * even
    assert head_on_fast < even
    assert half - none == pytest.approx(0.5 * (full - none), rel=0.02)


def test_zero_bubble_and_chunks_shorten_the_bubble():
    """With few micro-batches, ZB-H1 and interleaving beat 1F1B, which GPipe equals in time.

    With tp it may be otherwise: traffic that 1F1B hides beside the weights' gradients has nothing beside it in ZB-H1.
    """
    job, config = job_of(batch=8, vocab_size=64), ParallelConfig(pp=8)
    plain, gpipe, zero_bubble = (
        simulated(job, HOST, config, schedule=schedule).step_time_s for schedule in ("1f1b", "gpipe", "zero-bubble")
    )

    assert gpipe == pytest.approx(plain, rel=0.02)
    assert zero_bubble < 0.95 * plain
    assert simulated(job, HOST, replace(config, vpp=4)).step_time_s < 0.9 * plain


def test_gradients_and_messages_share_a_nic():
    """While gradients leave for other hosts, a stage's messages over the same NIC take longer than alone."""
    job, cluster = job_of(batch=16), find_cluster("v100-pcie", hosts=4)
    config = ParallelConfig(pp=2, tp=8, dp=2, zero_stage=1)
    job = replace(job, precision="fp16")
    found = simulated(job, cluster, config)
    hops = [task for task, label in enumerate(found.labels) if label.role == Role.HOP]
    seconds = found.timeline.end_s[hops] - found.timeline.start_s[hops]

    assert seconds.max() > 1.5 * seconds.min()


def test_messages_that_wait_for_their_receiver_cost_every_micro_batch():
    """Messages run beside compute only where a stage has chunks; otherwise each exchange costs every micro-batch."""
    job, cluster = job_of(batch=64, vocab_size=64), find_cluster("v100-pcie", hosts=4)
    job = replace(job, precision="fp16")
    plain, chunks = (
        [
            simulated(job, cluster, config, runtime=replace(MEGATRON, overlaps_p2p=overlaps, straggler_share=0.0))
            for overlaps in (False, True)
        ]
        for config in (ParallelConfig(pp=4, tp=8), ParallelConfig(pp=4, tp=8, vpp=2))
    )

    assert plain[0].step_time_s == plain[1].step_time_s
    assert chunks[0].step_time_s > 1.01 * chunks[1].step_time_s
    # a stage between two others exchanges with both of them, one after the other
    hop_s, work = plain[0].stages[0][1].forward_hop.seconds, plain[0].stages[0][1]
    assert plain[0].timeline.makespan_s == pytest.approx(
        (64 + 3) * sum(work.parts_s().values()) + 2 * (64 + 2) * hop_s, rel=0.05
    )


def test_a_later_stage_reduces_its_gradients_in_the_bubble():
    """The last stage's gradients are on their way while the first stage still computes."""
    found = simulated(job_of(batch=32), find_cluster("dgx-h100", hosts=8), ParallelConfig(pp=4, tp=8, dp=2))
    reduced_s = {
        label.stage: found.timeline.end_s[task] for task, label in enumerate(found.labels) if label.role == Role.REDUCE
    }
    last_pass_s = max(
        found.timeline.end_s[task]
        for task, label in enumerate(found.labels)
        if label.role == Role.PASS and label.stage == 0 and label.kind == Kind.BACKWARD
    )

    assert reduced_s[3] < last_pass_s < reduced_s[0]


@pytest.mark.parametrize(("pp", "zero_stage"), [(2, 0), (2, 1), (4, 1)])
def test_a_tied_table_adds_what_the_closed_form_has(pp, zero_stage):
    """Ends of a pipeline that hold copies of one table step as much later as the closed form says, under `pp`."""
    untied = job_of(batch=32)
    tied = replace(untied, model=untied.model.changed(tied_embeddings=True))
    profile = replace(MEGATRON, residuals=(), stalled_hosts=0)
    config, hosts = ParallelConfig(pp=pp, tp=4, dp=2, zero_stage=zero_stage), find_cluster("dgx-h100", hosts=pp)
    parts = [
        [step(job, hosts, config, profile).breakdown_s["pp"] for step in (simulated, closed_form)]
        for job in (untied, tied)
    ]
    more_s, expected_s = (after - before for before, after in zip(*parts, strict=True))

    assert expected_s > 1e-4
    assert more_s == pytest.approx(expected_s[0], rel=1e-6)


def hop_seconds(found):
    """How long each message to the next stage took, by the stage that sends."""
    seconds: dict[int, list[float]] = {}
    for task, label in enumerate(found.labels):
        if label.role == Role.HOP and label.kind == Kind.FORWARD:
            seconds.setdefault(label.stage, []).append(found.timeline.end_s[task] - found.timeline.start_s[task])
    return seconds


def pcie_cluster(**group):
    """Hosts of four devices on PCIe, each with one adapter for all of them."""
    nic = {"kind": "infiniband", "bandwidth_gb_per_s": 3.0, "latency_us": 4, "sharers": 4}
    described = {"device": "A100-SXM-80", "devices_per_host": 4, "hosts": 4, "nic_links": [nic]}
    return cluster_from_mapping(described | group, Path())


def test_a_lone_sender_has_the_whole_adapter():
    """Of a host's two stages only the second sends to another host: two devices with the shares of four."""
    job, config = job_of(batch=32), ParallelConfig(pp=8, tp=2)
    alone = simulated(job, pcie_cluster(), config)
    own = {"kind": "infiniband", "bandwidth_gb_per_s": 3.0, "latency_us": 4}
    unshared = simulated(job, pcie_cluster(nic_links=[own]), config)

    assert min(hop_seconds(alone)[1]) < 0.6 * min(hop_seconds(unshared)[1])


def test_stages_under_one_switch_share_its_uplink():
    """A narrow uplink delays messages to hosts under other switches, not those under the same one."""
    job, config = job_of(batch=32), ParallelConfig(pp=4, tp=4)
    free = hop_seconds(simulated(job, pcie_cluster(), config))
    narrow = hop_seconds(simulated(job, pcie_cluster(switch={"hosts": 2, "uplink_gb_per_s": 4}), config))

    assert min(narrow[1]) > 2 * min(free[1])
    assert min(narrow[0]) == pytest.approx(min(free[0]))


def test_a_transfer_takes_the_link_that_another_one_excludes():
    """Gradients on NVLink leave messages PCIe, where both exclude each other; without PCIe they share NVLink."""
    nvlink = {"kind": "nvlink3", "bandwidth_gb_per_s": 20, "latency_us": 1, "exclusive_group": "peer"}
    pcie = {"kind": "pcie4", "bandwidth_gb_per_s": 18, "latency_us": 1, "exclusive_group": "peer"}
    job, config = job_of(batch=8), ParallelConfig(pp=2, dp=2, zero_stage=0)
    both = simulated(job, pcie_cluster(hosts=1, intra_links=[nvlink, pcie]), config)
    one = simulated(job, pcie_cluster(hosts=1, intra_links=[nvlink]), config)

    assert both.timeline.route.max() == 1
    assert one.timeline.route.max() == 0
    assert both.step_time_s <= one.step_time_s


@given(
    pp=st.sampled_from([2, 4]),
    vpp=st.sampled_from([1, 2]),
    rounds=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    layers=st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
@settings(max_examples=30)
def test_passes_run_when_what_they_wait_for_is_there(pp, vpp, rounds, schedule, layers):
    """On hosts of their own, unlike stages run their passes at the times that a plain walk through the order gives.

    Their NICs are so fast that messages, whose latencies remain, hardly ever share one.
    """
    assume(schedule == "1f1b" or vpp == 1)
    cut = tuple(layers[: pp * vpp])
    job = job_of(batch=rounds * pp, num_layers=sum(cut))
    config = ParallelConfig(pp=pp, tp=8, vpp=vpp, zero_stage=0, assignment=Assignment(layers=cut))
    nic = {"kind": "infiniband", "bandwidth_gb_per_s": 1e6, "latency_us": 40}
    cluster = cluster_from_mapping({"name": "dgx-h100", "hosts": pp, "nic_links": [nic]}, Path())
    found = simulated(job, cluster, config, schedule=schedule)
    order = pass_order(schedule, pp, vpp, rounds * pp)
    works, virtual = found.stages[0], range(pp * vpp)
    pass_s = np.zeros((3, pp * vpp))
    for kind in set(order.kind.tolist()):
        for at in virtual:
            work, chunk = works[at % pp], at // pp
            pieces = range(len(work.chunks[chunk]))
            pass_s[kind, at] = work.begins_s + sum(work.piece_s(chunk, piece, Kind(kind)) for piece in pieces)
    forward_s = [works[at % pp].forward_hop.seconds for at in virtual[:-1]]
    backward_s = [works[at % pp].backward_hop.seconds for at in virtual[1:]]
    expected = pass_times(order, pass_s, np.array([forward_s, backward_s]), waits_for_receiver=vpp == 1)
    starts = {
        (label.kind, label.micro_batch, label.virtual): found.timeline.start_s[task]
        for task, label in enumerate(found.labels)
        if label.role == Role.PASS
    }

    keys = zip(
        order.kind.tolist(), order.micro_batch.tolist(), (order.chunk * order.pp + order.stage).tolist(), strict=True
    )
    assert [starts[key] for key in keys] == pytest.approx(expected.start_s.tolist(), abs=1e-6)
