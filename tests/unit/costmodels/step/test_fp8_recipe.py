"""What the scaling of fp8 tensors does to a step: a maximum that is read, and launched, before each cast."""

from dataclasses import replace

import pytest

from costmodels.job.facts import parse_facts, with_facts
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_prior
from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import step_operators
from costmodels.step.launches import launches_of
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.model_parts import times_of_blocks
from tests.support.settings.random_settings import grid_of, job_of, setting_for

HOSTS = find_cluster("dgx-h100", hosts=2)
MEGATRON, TORCHTITAN = find_prior("megatron-core"), find_prior("torchtitan")
CONFIG = ParallelConfig(tp=2, dp=8, mbs=1)
MICRO_BATCHES = 64 // CONFIG.dp
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def fp8(sequence_length=4096, model="llama3-8b", precision="fp8"):
    """A job with products in fp8."""
    return replace(job_of(model, sequence_length=sequence_length), precision=precision)


def under(recipe, runtime=MEGATRON):
    """A runtime of which a recipe is stated."""
    return with_facts(runtime, parse_facts({"fp8_recipe": recipe}))


def operators(job, runtime):
    """All operators of a job, by name."""
    return {op.name: op for op in step_operators(job, runtime, grid_of(CONFIG))}


def steps(job, *runtimes):
    """The estimates of a step under some runtimes."""
    return [estimate_step(setting_for(job, HOSTS, one), grid_of(CONFIG)) for one in runtimes]


def maxima(job, runtime):
    """The operators that tensorwise scaling adds, with the number of times that a step runs each."""
    counts = times_of_blocks(job.model)
    own = operators(job, runtime)
    return [(op, MICRO_BATCHES * counts[op.block]) for name, op in own.items() if ".amax_" in name]


def test_a_tensor_is_read_for_its_maximum_before_each_cast():
    """Transformer Engine reads a tensor twice under current scaling and once under delayed scaling."""
    own = operators(fp8(model="mixtral-8x7b"), under("tensorwise"))
    casts = {name: op for name, op in own.items() if ".cast_" in name}
    reads = {name: op for name, op in own.items() if ".amax_" in name}

    assert reads.keys() == {name.replace(".cast_", ".amax_") for name in casts}
    for name, cast in casts.items():
        read = reads[name.replace(".cast_", ".amax_")]
        # a cast reads 2 bytes of an element and writes 1 twice
        assert read.moved_bytes[0] == cast.moved_bytes[0] / 2 == 2 * cast.shape[0, 0]
        assert (read.phase, read.modules) == (cast.phase, cast.modules)


@pytest.mark.parametrize(
    ("name", "precision", "moved_bytes", "launches"),
    [
        ("llama3-8b", "bf16", 19_418_578_944, 35),
        ("llama3-8b", "fp8", 20_123_222_016, 43),
        ("llama3-8b", "nvfp4", 20_123_222_016, 43),
        ("mixtral-8x7b", "bf16", 12_682_821_632, 80),
        ("mixtral-8x7b", "fp8", 13_874_003_968, 88),
        ("mixtral-8x7b", "nvfp4", 13_874_003_968, 88),
    ],
)
def test_what_states_no_recipe_is_as_before(name, precision, moved_bytes, launches):
    """The operators of one pass through each block are those from before there was the fact (recorded then)."""
    found = operators(fp8(model=name, precision=precision), MEGATRON).values()

    assert sum(float(op.moved_bytes[0]) for op in found) == moved_bytes
    assert sum(launches_of(MEGATRON, op) for op in found) == launches


def test_current_scaling_is_tensorwise():
    """Transformer Engine's word means Megatron's."""
    assert under("current") == under("tensorwise")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_tensorwise_scaling_of_fp8_reads_more(recipe, precision):
    """Other recipes find maxima within the cast, and products in other formats have no fp8 tensors."""
    job = fp8(precision=precision)
    more = operators(job, under(recipe)).keys() - operators(job, MEGATRON).keys()

    assert bool(more) == (recipe == "tensorwise" and precision == "fp8")


def test_a_compiler_reads_with_the_kernel_before():
    """Under torch.compile the maximum costs nothing of its own, and in eager PyTorch a kernel does."""
    eager = with_facts(TORCHTITAN, parse_facts({"compiled": "none"}))

    assert maxima(fp8(), under("tensorwise", TORCHTITAN)) == []
    assert len(maxima(fp8(), under("tensorwise", eager))) == 8


def test_a_step_that_waits_for_its_host_launches_once_more_per_cast():
    """Where the host sets the pace, current scaling takes the launches of its maxima longer than delayed scaling."""
    job, slow = fp8(512), replace(MEGATRON, launch_s=6e-4)
    delayed, current = steps(job, under("delayed", slow), under("tensorwise", slow))
    launched = sum(times for _, times in maxima(job, under("tensorwise")))

    # four products a layer, of which each casts its input and the gradient of its output
    assert launched == MICRO_BATCHES * 32 * 4 * 2
    longer = current.step_time_s[0] - delayed.step_time_s[0]
    assert longer == pytest.approx(launched * 6e-4, rel=0.01)


@pytest.mark.parametrize("blocks", ["attention", "attention+mlp"])
def test_a_captured_graph_launches_no_maxima(blocks):
    """What a graph of a block holds, the host does not launch."""
    runtime = replace(under("tensorwise"), captured_blocks=blocks)
    launched = {op.block for op, _ in maxima(fp8(), runtime) if launches_of(runtime, op)}

    assert launched == (set() if blocks == "attention+mlp" else {"dense_mlp"})


@pytest.mark.parametrize(
    ("sequence_length", "changes"), [(512, {"captured_graph": True, "launch_s": 6e-4}), (16_384, {"launch_s": 1e-6})]
)
def test_a_step_that_waits_for_its_device_reads_once_more(sequence_length, changes):
    """A captured or a large step differs by the traffic of the maxima alone."""
    job = fp8(sequence_length)
    delayed, current = (replace(under(recipe), **changes) for recipe in ("delayed", "tensorwise"))
    before, after = steps(job, delayed, current)
    (device,), shapes = HOSTS.devices, grid_of(CONFIG)
    read_s = sum(times * float(execution_s(op, device, job, current, shapes)[0]) for op, times in maxima(job, current))

    assert read_s > 0.001
    compute = after.breakdown_s["compute"][0] - before.breakdown_s["compute"][0]
    assert compute == pytest.approx(read_s, rel=1e-6)
    assert after.breakdown_s["host"][0] == pytest.approx(before.breakdown_s["host"][0], abs=0.01 * read_s)
    # a part of it hides gradients that are reduced beside it
    assert 0.8 * read_s < after.step_time_s[0] - before.step_time_s[0] < 1.02 * read_s
