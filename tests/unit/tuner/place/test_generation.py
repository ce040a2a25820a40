import itertools
from pathlib import Path

import numpy as np
import pytest

from costmodels.operators.kernel_catalog import kernel_constants
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.placements import module
from tuner.place.generation import HOST_S, Decoder, generation_layouts
from tuner.place.workload import Generation

H100 = find_cluster("dgx-h100", 1)


def made(**changes):
    """Lengths of a generation, changed in part."""
    lengths = {
        "prompts": 64,
        "responses_per_prompt": 4,
        "prompt_tokens": 512,
        "response_tokens": 1024,
        "longest_response_tokens": 1024,
    }
    return Generation(**(lengths | changes))


def decoder(tp=1, pp=1, cluster=H100, **changes):
    """A replica of an 8B model."""
    return Decoder(module=module("rollout", "generate", generation=made(**changes)), cluster=cluster, tp=tp, pp=pp)


def test_one_sequence_reads_all_weights():
    """The step of one sequence without a context takes the weights' bytes over the reached bandwidth, and the host."""
    one = decoder()
    model, (device,) = one.module.model, H100.devices
    reached = device.memory_bandwidth_bytes_per_s * kernel_constants(device.name).memory.elementwise_share
    expected_s = 2 * model.num_parameters / reached + HOST_S

    assert one.step_s(np.array([1.0]), np.array([0.0]))[0] == pytest.approx(expected_s, rel=1e-9)


def test_keys_and_values_of_llama3_8b():
    """Llama 3 8B keeps 2 * 32 layers * 8 heads * 128 * 2 bytes of each token, an eighth of it on each of 8 ranks."""
    assert decoder().cache_bytes == 131_072
    assert decoder(tp=8).cache_bytes == 131_072 / 8


def test_ranks_that_share_no_heads_copy_them():
    """Beyond the number of key-value heads, further ranks hold copies."""
    four = module("rollout", "generate", model="qwen2.5-7b", generation=made())
    copied = Decoder(module=four, cluster=H100, tp=8, pp=1)

    assert copied.cache_bytes == Decoder(module=four, cluster=H100, tp=4, pp=1).cache_bytes


def test_large_batches_are_limited_by_compute():
    """Twice the sequences take less than twice the time while weights dominate, and twice once products do."""
    one = decoder()
    short = one.step_s(np.array([1.0, 2.0, 4096.0, 8192.0]), np.zeros(4)) - HOST_S

    assert short[1] == pytest.approx(short[0])
    assert short[3] == pytest.approx(2 * short[2])


def test_equal_lengths_take_a_step_per_token():
    """Without a tail and with room for all, decoding takes R steps at the mean context."""
    one = decoder()
    contexts = 512 + (np.arange(1024) + 0.5)
    expected_s = one.step_s(np.full(1024, 16.0), contexts).sum()

    assert one.decode_s(16, 16) == pytest.approx(expected_s, rel=1e-3)


def test_a_tail_makes_generation_longer():
    """A longest response of four means takes longer than equal lengths, and no more than four times as long."""
    alike_s, tailed_s = decoder().decode_s(64, 64), decoder(longest_response_tokens=4096).decode_s(64, 64)

    assert alike_s < tailed_s < 4 * alike_s


def test_fewer_sequences_at_once_need_less_memory_and_more_time():
    """Among the layouts that are kept, each slower one needs less memory."""
    found = generation_layouts(module("rollout", "generate", generation=made(prompts=1024)), H100, 0.08)

    assert len(found) > 1
    for faster, slower in itertools.pairwise(found):
        assert faster.times_s <= slower.times_s
        assert faster.busy_bytes > slower.busy_bytes
    assert all(one.busy_bytes <= 0.92 * H100.memory_bytes for one in found)


def test_a_model_that_does_not_fit_has_no_layout():
    """70B in bf16 does not fit on one host of 8 devices with 16 GB."""
    small = cluster_from_mapping({"device": "V100-SXM-16", "hosts": 1}, Path())
    wanted = module("rollout", "generate", model="llama3-70b", generation=made())

    assert generation_layouts(wanted, small, 0.08) == ()


def test_experts_are_read_as_tokens_visit_them():
    """One token of Mixtral reads its active parameters alone; very many read all."""
    experts = module("rollout", "generate", model="mixtral-8x7b", generation=made())
    one = Decoder(module=experts, cluster=H100, tp=8, pp=1)
    model = experts.model

    assert one._further_experts(np.array([1.0]))[0] == pytest.approx(0.0, abs=1e-12)
    assert one._further_experts(np.array([1e4]))[0] == pytest.approx(1.0)
    assert model.num_active_parameters < model.num_parameters
