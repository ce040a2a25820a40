from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.sequences import Sequences
from costmodels.operators.layer_operators import core_operators
from costmodels.simulator.leaders import simulated_times_s
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.passes import Kind, pass_order
from costmodels.step.pipeline.unequal_micro_batches import VARYING, excess_of
from costmodels.step.step_time import estimate_step, model_flops_utilisation
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import MEGATRON, cases, grid_of, job_of, setting_for

ROWS = 8192
THREE = Sequences(lengths=(512, 2048, 8192), shares=(0.6, 0.3, 0.1))
RARE = Sequences(lengths=(256, 8192), shares=(0.999, 0.001))
TITAN = find_runtime("torchtitan")


def job_with(sequences, *, rows=64, row_tokens=ROWS, model="llama3-8b"):
    """A job of rows into which sequences are packed or padded."""
    return replace(job_of(model, sequence_length=row_tokens, batch=rows), sequences=sequences)


def excess(sequences, *configs, runtime=MEGATRON, rows=64):
    """The excess of some configurations, in micro-batches of mean attention."""
    return excess_of(job_with(sequences, rows=rows), runtime, grid_of(*configs)).core


def packed_by_hand(sequences, row_tokens, rows, seed):
    """Rows of a first fit of shuffled sequences that opens as many rows as it needs, shuffled again."""
    rng = np.random.default_rng(seed)
    found, open_rows = [], []
    while len(found) < rows or any(row in open_rows for row in range(rows)):
        length = int(rng.choice(sequences.lengths, p=sequences.shares))
        fits = (row for row in open_rows if sum(found[row]) + length <= row_tokens)
        at = next(fits, len(found))
        if at == len(found):
            found.append([])
            open_rows.append(at)
        found[at].append(length)
        if sum(found[at]) + sequences.lengths[0] > row_tokens:
            open_rows.remove(at)
    return [found[at] for at in rng.permutation(rows)]


# Equal sequences


def single(length, layout):
    """A histogram of one length."""
    return Sequences(lengths=(length,), shares=(1.0,), layout=layout)


@pytest.mark.slow
@given(cases(), st.sampled_from(["packed", "padded"]))
def test_sequences_of_one_length_are_those_of_a_job_without_a_histogram(case, layout):
    """A histogram of a single length changes no bit of time, memory or MFU."""
    job = replace(case.job, sequences=single(case.job.sequence_length, layout))
    setting = replace(case.setting, job=job)
    found, expected = (estimate_step(one, case.grid) for one in (setting, case.setting))
    needed, known = (estimate_memory(one, case.grid) for one in (setting, case.setting))

    assert np.array_equal(found.step_time_s, expected.step_time_s)
    for part, seconds in expected.breakdown_s.items():
        assert np.array_equal(found.breakdown_s[part], seconds)
    assert np.array_equal(needed.peak_bytes, known.peak_bytes)
    utilisation = [model_flops_utilisation(one, case.cluster, found.step_time_s) for one in (job, case.job)]
    assert np.array_equal(*utilisation)
    assert job.tokens_per_step == case.job.tokens_per_step


def test_padded_sequences_of_one_length_take_no_longer_rows():
    """Padded sequences of 2,048 tokens cost what a job of sequences of 2,048 tokens costs, whatever rows may hold."""
    setting = setting_for(job_with(single(2048, "padded")), find_cluster("dgx-h100"))
    plain = setting_for(job_of(sequence_length=2048), find_cluster("dgx-h100"))
    grid = grid_of(ParallelConfig(tp=2, dp=4, mbs=2), ParallelConfig(pp=2, dp=4))

    assert np.array_equal(estimate_step(setting, grid).step_time_s, estimate_step(plain, grid).step_time_s)
    assert np.array_equal(estimate_memory(setting, grid).peak_bytes, estimate_memory(plain, grid).peak_bytes)


def test_short_equal_sequences_in_a_row_cost_what_they_cost_in_rows_of_their_own():
    """Four packed sequences of 2,048 tokens take as long as a micro-batch of four such sequences."""
    grid = grid_of(ParallelConfig(tp=2, dp=4))
    alone = grid_of(ParallelConfig(tp=2, dp=4, mbs=4))
    cluster = find_cluster("dgx-h100")
    plain = replace(MEGATRON, residuals=())
    packed = estimate_step(setting_for(job_with(single(2048, "packed")), cluster, plain), grid)
    expected = estimate_step(setting_for(job_of(sequence_length=2048, batch=256), cluster, plain), alone)

    assert packed.step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)


# The square of the lengths


@pytest.mark.parametrize("sequences", [THREE, Sequences(lengths=(700, 900, 8000), shares=(0.5, 0.45, 0.05))])
def test_attention_costs_what_counting_its_pairs_says(sequences):
    """FLOPs of the core follow from the pairs of tokens under the mask of sampled rows, to 3%."""
    rows = packed_by_hand(sequences, ROWS, 3000, seed=3)
    pairs = np.mean([sum(length * (length + 1) / 2 for length in row) for row in rows])
    job = job_with(sequences)
    forward = core_operators(job, MEGATRON, grid_of(ParallelConfig()))[0]
    # two products over all pairs, each of two operations per element of a head
    expected = 2 * 2 * pairs * job.model.plain.num_heads * job.model.plain.head_dim

    assert forward.flop[0] == pytest.approx(expected, rel=0.03)


def test_padding_to_the_longest_costs_its_square():
    """Padded micro-batches cost the square of the expected longest sequence: E[max^2] for each of their rows."""
    job = job_with(replace(THREE, layout="padded"))
    one, four = (core_operators(job, MEGATRON, grid_of(ParallelConfig(mbs=mbs)))[0].flop[0] for mbs in (1, 4))
    longest = [THREE.mean_longest(np.array([mbs]), power=2)[0] for mbs in (1, 4)]

    assert four / one == pytest.approx(4 * longest[1] / longest[0])


def test_unfused_attention_computes_whole_rows():
    """Without a flash kernel, packed sequences cost the square of the row."""
    unfused = find_runtime("megatron-lm-2021")
    grid = grid_of(ParallelConfig(tp=2, dp=4))
    times = [
        estimate_step(setting_for(job, find_cluster("dgx-a100"), unfused), grid).step_time_s
        for job in (job_with(THREE), job_of(sequence_length=ROWS))
    ]

    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_mfu_counts_no_padding():
    """Sequences that fill 73% of their rows make 73% of the tokens, each with its own sequence's attention."""
    job = job_with(single(3000, "packed"))

    assert job.filled_share == pytest.approx(6000 / ROWS)
    assert job.tokens_per_step == 64 * 6000
    assert job.model_flops_per_step == 64 * 6000 * job.model.model_flops_per_token(3000)
    assert job.sequences_per_step == pytest.approx(128)


def test_memory_is_that_of_the_largest_micro_batch():
    """Padded sequences need the memory of their longest one, packed ones that of whole rows."""
    cluster = find_cluster("dgx-h100")
    grid = grid_of(ParallelConfig(tp=2, dp=4, mbs=2))
    whole = estimate_memory(setting_for(job_of(sequence_length=ROWS), cluster), grid).peak_bytes

    for layout in ("packed", "padded"):
        setting = setting_for(job_with(replace(THREE, layout=layout)), cluster)
        assert np.array_equal(estimate_memory(setting, grid).peak_bytes, whole)


# Waits


def test_replicas_wait_for_the_longest_of_all_draws():
    """With one padded sequence per replica, the wait is the expected longest square over the mean one."""
    sequences = Sequences(lengths=(100, 300), shares=(0.75, 0.25), layout="padded")
    configs = [ParallelConfig(dp=dp, mbs=1) for dp in (1, 2, 4)]
    mean = 0.75 * 100**2 + 0.25 * 300**2
    for config in configs:
        job = job_with(sequences, rows=config.dp)
        short = 0.75**config.dp
        longest = short * 100**2 + (1 - short) * 300**2
        found = excess_of(job, MEGATRON, grid_of(config))

        assert found.core[0] == pytest.approx(longest / mean - 1, abs=0.01)
        rest = (short * 100 + (1 - short) * 300) / (0.75 * 100 + 0.25 * 300) - 1
        assert found.rest[0] == pytest.approx(rest, abs=0.01)


@pytest.mark.parametrize("sequences", [THREE, RARE])
@pytest.mark.parametrize(("dp", "number"), [(4, 8), (16, 4), (32, 2)])
def test_packed_rows_wait_as_in_a_simulation_of_other_draws(sequences, dp, number):
    """The excess of replicas agrees with rows packed by hand from another seed."""
    rows = packed_by_hand(sequences, ROWS, dp * number * 60, seed=5)
    work = np.array([sum(length**2 for length in row) for row in rows], dtype=float)
    work = (work / work.mean()).reshape(60, dp, number)
    totals = work.sum(axis=2).max(axis=1)
    found = excess(sequences, ParallelConfig(dp=dp), rows=dp * number)[0]

    # 60 steps say their mean to two standard errors, and packing by hand leaves other rests in rows
    assert number + found == pytest.approx(totals.mean(), rel=0.06, abs=2 * totals.std() / np.sqrt(60))


def one_pipeline_s(pp, vpp, work):
    """Time of 1F1B passes of alike stages, timed one after the other in micro-batches of mean work."""
    order = pass_order("1f1b", pp, vpp, len(work))
    rows = zip(order.stage.tolist(), order.kind.tolist(), order.micro_batch.tolist(), order.chunk.tolist(), strict=True)
    queues = [[] for _ in range(pp)]
    for stage, kind, micro_batch, chunk in rows:
        queues[stage].append((kind, micro_batch, chunk * pp + stage))
    done, free = {}, [0.0] * pp
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, micro_batch, virtual = queue[0]
                if kind == Kind.FORWARD:
                    waits_for = (kind, micro_batch, virtual - 1) if virtual else None
                elif virtual == pp * vpp - 1:
                    waits_for = (Kind.FORWARD, micro_batch, virtual)
                else:
                    waits_for = (kind, micro_batch, virtual + 1)
                if waits_for is not None and waits_for not in done:
                    break
                lasts = work[micro_batch] * (1 / 3 if kind == Kind.FORWARD else 2 / 3) / vpp
                free[stage] = max(free[stage], done.get(waits_for, 0.0)) + lasts
                done[kind, micro_batch, virtual] = free[stage]
                queue.pop(0)
    return max(free)


@pytest.mark.parametrize(("pp", "vpp", "dp", "number"), [(2, 1, 2, 8), (4, 1, 4, 16), (4, 2, 2, 16), (2, 1, 2, 64)])
@pytest.mark.parametrize("sequences", [THREE, RARE])
def test_pipelines_wait_as_passes_timed_one_by_one(sequences, pp, vpp, dp, number):
    """The excess of pipelines agrees with steps of other draws whose passes are timed one after the other.

    They agree to 4%, or to two standard errors of the other draws. 64 micro-batches of two stages are more than the
    rounds that are timed, so that the rest is extrapolated.
    """
    steps = 24
    rows = packed_by_hand(sequences, ROWS, steps * dp * number, seed=11)
    work = np.array([sum(length**2 for length in row) for row in rows], dtype=float)
    work = (1 - VARYING + VARYING * work / work.mean()).reshape(steps, dp, number)
    slowest = [max(one_pipeline_s(pp, vpp, own) for own in step) for step in work]
    even = one_pipeline_s(pp, vpp, np.ones(number))
    found = excess(sequences, ParallelConfig(pp=pp, vpp=vpp, dp=dp), rows=dp * number)[0]

    assert even + VARYING * found == pytest.approx(np.mean(slowest), rel=0.04, abs=2 * np.std(slowest) / np.sqrt(steps))


def test_a_single_replica_without_stages_waits_for_nobody():
    """Without replicas, stages or parts of rows, unequal micro-batches only add up."""
    assert excess(THREE, ParallelConfig(), ParallelConfig(mbs=4), ParallelConfig(tp=8)) == pytest.approx(0, abs=1e-9)


def test_sharded_weights_make_replicas_wait_in_every_micro_batch():
    """ZeRO 3 waits more than ZeRO 1, and less if its shards span fewer replicas."""
    step, each, some = excess(
        THREE, ParallelConfig(dp=8), ParallelConfig(dp=8, zero_stage=3), ParallelConfig(dp=8, zero_stage=3, dp_shard=2)
    )

    assert step < some < each


def test_experts_make_their_ranks_wait_in_every_micro_batch():
    """Replicas that share experts wait for each other in every layer, as with ZeRO 3."""
    spread, alone, sharded = excess(
        THREE, ParallelConfig(dp=8, ep=8), ParallelConfig(dp=8), ParallelConfig(dp=8, zero_stage=3)
    )

    assert alone < spread == sharded


@pytest.mark.parametrize(
    "config",
    [ParallelConfig(dp=8), ParallelConfig(dp=8, mbs=2), ParallelConfig(dp=8, zero_stage=3), ParallelConfig(pp=2, dp=4)],
)
def test_balanced_rows_wait_less(config):
    """Rows that are dealt by their attention make a step shorter than rows at random."""
    assert excess(replace(THREE, order="balanced"), config) < 0.8 * excess(THREE, config)


def test_a_larger_micro_batch_evens_out_its_rows():
    """Under ZeRO 3, micro-batches of four rows wait less than micro-batches of one."""
    one, four = excess(THREE, *(ParallelConfig(dp=8, mbs=mbs, zero_stage=3) for mbs in (1, 4)), rows=256)

    assert 4 * four < one


# Context parallelism


def test_splitting_every_sequence_balances_its_ranks():
    """Ranks that split each sequence share its attention evenly; ranks that split rows wait for the fullest part."""
    configs = ParallelConfig(cp=4, dp=2), ParallelConfig(dp=2)
    split, whole = excess(THREE, *configs)
    by_rows, also_whole = excess(THREE, *configs, runtime=TITAN)

    assert split == whole == also_whole
    assert by_rows > split


def test_parts_of_rows_attend_to_what_counting_says():
    """The fullest of two chunks' pairs, counted token by token in rows packed by hand, agrees to 3%."""
    parts, bound = 4, ROWS // 8
    fullest, mean = [], []
    for row in packed_by_hand(THREE, ROWS, 1500, seed=9):
        keys = np.concatenate([np.arange(1, length + 1) for length in row] + [np.zeros(ROWS - sum(row))])
        chunks = keys.reshape(2 * parts, bound).sum(axis=1)
        shares = chunks[:parts] + chunks[::-1][:parts]
        fullest.append(shares.max() * parts)
        mean.append(shares.sum())
    found = excess(THREE, ParallelConfig(cp=parts), runtime=TITAN)[0]

    assert 1 + found / 64 == pytest.approx(np.mean(fullest) / np.mean(mean), rel=0.03)


# The step


def test_the_wait_is_a_part_of_the_step():
    """The excess times the core's time is the imbalance, and all parts sum to the step."""
    grid = grid_of(ParallelConfig(dp=8), ParallelConfig(dp=8, zero_stage=3), ParallelConfig(pp=2, dp=4))
    setting = setting_for(job_with(THREE, row_tokens=32768), find_cluster("dgx-h100"))
    found = estimate_step(setting, grid)

    assert np.all(found.breakdown_s["imbalance"] > 0)
    assert np.all(np.diff(found.breakdown_s["imbalance"][:2]) > 0)
    assert found.step_time_s == pytest.approx(np.sum(list(found.breakdown_s.values()), axis=0))


def test_balanced_and_longer_pipelines_rank_as_their_waits():
    """With rare long sequences, the same devices lose more time as a pipeline than as replicas."""
    grid = grid_of(ParallelConfig(tp=2, dp=4), ParallelConfig(tp=2, pp=4))
    setting = setting_for(job_with(RARE, row_tokens=ROWS), find_cluster("dgx-h100"))
    waits = estimate_step(setting, grid).breakdown_s["imbalance"]

    assert waits[1] > waits[0]


@pytest.mark.parametrize("config", [ParallelConfig(tp=2, dp=4), ParallelConfig(pp=2, tp=2, dp=2)])
def test_simulated_steps_wait_as_the_closed_form_says(config):
    """The simulator adds the same wait, whole or short."""
    setting = setting_for(job_with(THREE), find_cluster("dgx-h100"))
    grid = grid_of(config)
    expected = estimate_step(setting, grid).breakdown_s["imbalance"][0]
    memory = estimate_memory(setting, grid)
    found = simulate_step(setting, config, memory=memory)

    assert found.breakdown_s["imbalance"] == pytest.approx(expected)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)
    short = simulated_times_s(setting, grid, np.array([0]), memory=memory)
    assert short[0] == pytest.approx(found.step_time_s, rel=0.01)
