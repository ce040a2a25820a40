import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.job.uneven_work import Assignment
from costmodels.step.pipeline.schedules import assign_layers, chunk_of_layer, idle_time_s, of_round, stage_in_flight
from tests.support.settings.model_parts import active_parameters_of, num_moe_layers, split_by_experts

MEGATRON = find_runtime("megatron-core")
NANOTRON = find_runtime("nanotron")


@given(
    st.sampled_from(model_names()),
    st.sampled_from(runtime_names()),
    st.integers(1, 128),
    st.integers(1, 16),
    st.sampled_from([1, 8]),
)
def test_stages_hold_exactly_the_models_layers(name, runtime, pp, vpp, padding):
    """Whatever the split, the stages together hold the model's dense and MoE layers, no more and no fewer."""
    model = find_model(name)

    stages = assign_layers(model, replace(find_runtime(runtime), layer_padding=padding), pp, vpp)

    dense, moe = split_by_experts(model, stages.held)
    assert len(dense) == len(moe) == pp
    assert int(moe.sum()) == num_moe_layers(model)
    assert int(dense.sum()) == model.num_layers - num_moe_layers(model)
    assert min(dense.min(), moe.min()) >= 0
    assert (stages.layers == dense + moe).all()
    # the ends, and what predicts further tokens, are there once
    assert stages.held[0, -2] == stages.held[:, -2].sum() == 1
    assert stages.held[-1, -1] == stages.held[:, -1].sum() == 1
    assert stages.held.sum() == model.num_layers + model.num_mtp_layers + 2


def test_even_splits_and_their_no_op_layers():
    """Each stage holds the same, with any chunks that divide it, or no two layers more than another.

    28 layers filled up to 32 leave the last of 4 stages, or the last chunk, with fewer real layers.
    """
    llama, qwen, padded = find_model("llama3-8b"), find_model("qwen2.5-7b"), replace(MEGATRON, layer_padding=8)

    for vpp in (1, 2, 8):
        assert assign_layers(llama, MEGATRON, 4, vpp).layers.tolist() == [8, 8, 8, 8]
    assert np.ptp(assign_layers(llama, MEGATRON, 6, 1).layers) <= 1
    assert assign_layers(qwen, padded, 4, 1).layers.tolist() == [8, 8, 8, 4]
    assert assign_layers(qwen, padded, 4, 2).layers.tolist() == [8, 8, 8, 4]
    assert assign_layers(qwen, padded, 8, 4).layers.tolist() == [4, 4, 4, 4, 3, 3, 3, 3]
    assert assign_layers(qwen, MEGATRON, 4, 1).layers.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "held"),
    [
        # Megatron-Bridge's recipes of Llama 3.1 405B and Qwen3 235B account for the embedding and the loss as layers
        (126, 8, 8, [1, *[2] * 62, 1]),
        (126, 16, 8, [0, *[1] * 126, 0]),
        (94, 8, 4, [2, *[3] * 30, 2]),
        (95, 8, 12, [*[1] * 95, 0]),
    ],
)
def test_unequal_chunks_are_lighter_at_the_ends(num_layers, pp, vpp, held):
    """In Megatron-LM's layouts the first and the last chunk get fewer layers, for the embedding and the loss."""
    model = find_model("llama3-405b").changed(num_layers=num_layers)

    assert assign_layers(model, MEGATRON, pp, vpp, by_chunk=True).layers.tolist() == held


@given(st.integers(2, 130), st.integers(2, 16), st.integers(2, 20))
def test_unequal_chunks_make_equal_stages(num_layers, pp, vpp):
    """No stage has two layers more than another, and no chunk is empty while layers suffice."""
    model = find_model("llama3-405b").changed(num_layers=max(num_layers, pp * vpp))
    chunks = assign_layers(model, MEGATRON, pp, vpp, by_chunk=True).layers

    assert chunks.sum() == model.num_layers
    assert chunks.min() >= 1
    assert np.ptp(chunks.reshape(vpp, pp).sum(axis=0)) <= 1
    assert (assign_layers(model, MEGATRON, pp, vpp).layers == chunks.reshape(vpp, pp).sum(axis=0)).all()


def test_chunks_are_dealt_around_the_stages():
    """Interleaved, chunk c stands on stage c % pp (Narayanan et al. 2021, section 2.2)."""
    model = find_model("deepseek-v3").changed(num_layers=12, num_dense_layers=3)

    plain = assign_layers(model, MEGATRON, 3, 1)
    interleaved = assign_layers(model, MEGATRON, 3, 4)

    assert split_by_experts(model, plain.held)[0].tolist() == [3, 0, 0]
    assert [held.tolist() for held in split_by_experts(model, interleaved.held)] == [[1, 1, 1], [3, 3, 3]]


@given(st.sampled_from(model_names()), st.integers(1, 40))
def test_balanced_split_exceeds_no_share_by_more_than_a_layer(name, pp):
    """Blocks are contiguous, and no stage costs more than its share of the compute and one layer."""
    model = find_model(name)
    pp = min(pp, model.num_layers)
    stages = assign_layers(model, NANOTRON, pp, 1)
    layer_cost = list(map(active_parameters_of, model.layers))
    head_cost = model.hidden_size * model.vocab_size
    share = (sum(layer_cost) + head_cost) / pp

    ends = np.cumsum(stages.layers)
    for stage, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if stage < pp - 1:  # the last one takes what is left
            assert sum(layer_cost[begin:end]) <= share + max(layer_cost)
    dense_then_moe = [model.plain.is_moe_layer(layer) for layer in range(model.num_layers)]
    assert [sum(dense_then_moe[b:e]) for b, e in zip([0, *ends[:-1]], ends, strict=True)] == split_by_experts(
        model, stages.held
    )[1].tolist()


def test_balanced_split_leaves_the_head_room():
    """The head costs as much as 2.4 layers of Llama 3 8B, so the last of 4 stages gets fewer layers.

    A stage keeps the layer that takes it past its share: 8.6 layers make 9 (nanotron models/base.py).
    """
    assert assign_layers(find_model("llama3-8b"), NANOTRON, 4, 1).layers.tolist() == [9, 9, 8, 6]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (8, 1), (4, 5)])
def test_equal_stages_have_narayanans_bubble(pp, vpp):
    """Bubble over ideal time is (p-1)/m, and (p-1)/(m v) interleaved (Narayanan et al. 2021, sections 2.2.1, 2.2.2)."""
    silent = (np.zeros((pp - 1, 1)),) * 2
    idle_s = idle_time_s(np.full((pp, 1), 0.1), np.full((pp, 1), 0.2), silent, np.array([40]), np.array([vpp]))

    assert idle_s.max() / (40 * 0.3) == pytest.approx((pp - 1) / (40 * vpp))


def test_a_slow_stage_at_the_begin_hides_the_passes_of_the_others():
    """By hand: stages of 3 s and 1.5 s with 4 micro-batches take 12.5 s where the slow one is first, whose second
    forward pass hides 1 s of the other stage, and 13.5 s where it is last and waits for all of the other.
    """
    for slow_is_first, idle in ((True, 0.5), (False, 1.5)):
        forward_s = np.array([[1.0], [0.5]])[:: 1 if slow_is_first else -1]
        silent = (np.zeros((1, 1)),) * 2
        idle_s = idle_time_s(forward_s, 2 * forward_s, silent, np.array([4]), np.array([1]))
        assert (12.0 * (forward_s == 1.0) + 6.0 * (forward_s == 0.5) + idle_s).max() == pytest.approx(12.0 + idle)


def test_no_round_is_shorter_than_the_pipeline():
    """A round has pp micro-batches, or as few more as leave none or at least pp for the last; short steps have one."""
    assert of_round(np.array([8, 12, 6, 3]), 4).tolist() == [4, 4, 6, 3]
    for pp, whole in itertools.product(range(1, 9), range(1, 60)):
        fits = [size for size in range(pp, whole + 1) if whole % size == 0 or whole % size >= pp]

        assert of_round(np.array(whole), pp) == (fits[0] if fits else whole)


@given(pp=st.integers(1, 8), whole=st.integers(1, 100))
def test_rounds_are_those_of_torch_where_it_has_any(pp, whole):
    """Torch's interleaved schedule makes m // pp rounds, at least one, of equal length."""
    rounds = max(whole // pp, 1)

    assert whole % rounds or of_round(np.array(whole), pp) == whole // rounds


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 8), (8, 5)])
def test_first_stage_holds_korthikantis_layers(pp, vpp):
    """Interleaved, stage 0 keeps L(1 + (p-1)/(p v)) layers' activations (Korthikanti et al. 2022, section 4.2.3)."""
    num_layers = 40 * pp

    in_flight = stage_in_flight(np.arange(pp), pp, vpp, np.array([1000]))

    assert in_flight[0] * num_layers / pp == pytest.approx(num_layers * (1 + (pp - 1) / (pp * vpp)))


@given(st.sampled_from(model_names()), st.integers(1, 4))
def test_the_least_bottleneck_is_that_of_every_cut(name, pp):
    """No way to cut the first six layers and the head into contiguous stages has a smaller largest stage."""
    model = find_model(name).changed(num_layers=6)
    split = replace(MEGATRON, layer_split="least-bottleneck", layer_padding=1)
    layers = list(map(active_parameters_of, model.layers))
    costs = np.array([*layers, model.hidden_size * model.vocab_size], dtype=np.float64)

    def largest(cuts):
        return max(part.sum() for part in np.split(costs, cuts))

    stages = assign_layers(model, split, pp, 1)
    ends = np.cumsum(stages.layers)

    assert ends[-1] == 6
    every = itertools.combinations(range(1, 7), pp - 1)
    assert largest(ends[:-1]) == pytest.approx(min(largest(cuts) for cuts in every))


def test_assigned_layers_stand_where_they_are_assigned():
    """An assignment goes before the runtime's own cut."""
    model = find_model("llama3-8b")

    assert assign_layers(model, MEGATRON, 3, 1, Assignment(layers=(10, 6, 16))).layers.tolist() == [10, 6, 16]
    assert assign_layers(model, MEGATRON, 2, 2, Assignment(layers=(9, 7, 10, 6))).layers.tolist() == [19, 13]
    again = assign_layers(model, MEGATRON, 2, 2, Assignment(recomputed=(8, 1, 0, 2)))
    assert again.again.sum(axis=1).tolist() == [8, 3]


def test_balanced_chunks_hold_every_layer():
    """Whatever the stages and chunks, also on one stage, no layer is lost or counted twice."""
    model, runtime = find_model("llama3-8b"), find_runtime("megatron-core")
    for pp, vpp in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 7)):
        if pp * vpp <= model.num_layers:
            assert len(chunk_of_layer(model, runtime, pp, vpp)) == model.num_layers
