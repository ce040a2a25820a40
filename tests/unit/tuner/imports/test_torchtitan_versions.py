"""What torchtitan's files and flags of all its years mean."""

import pytest

from hardware.io.errors import ConfigError
from tuner.imports import IMPORTERS

OF_2024 = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 16
seq_len = 16384
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[experimental]
context_parallel_degree = 2
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = 'full'
[float8]
enable_float8_linear = false
"""

OF_MAIN = (
    "torchrun --nproc_per_node=8 -m torchtitan.train --module glm5 --config glm5_debugmodel "
    "--training.num_tokens_per_microbatch_per_dp_rank=256 --training.num-tokens-per-train-step=16384 "
    "--training.max_context_length=128 --parallelism.num_pp_microbatches=8 --parallelism.context_parallel_degree=1 "
    "--parallelism.tensor_parallel_degree=1 --parallelism.pipeline_parallel_degree=8 activation-checkpoint:none"
)


def read(text):
    """What a file or script means."""
    return IMPORTERS["torchtitan"](text)


def whole(imported):
    """The degrees with those of 1 left out."""
    return {name: size for name, size in imported.degrees.items() if size > 1}


def test_a_file_of_2024():
    """Degrees stood in two sections, and a pipeline cut the batch into as many micro-batches as it had stages."""
    imported = read(OF_2024)

    assert imported.model_name == "llama3-70b"
    assert whole(imported) == {"pp": 2, "tp": 8, "cp": 2, "mbs": 8}
    assert (imported.micro_batches, imported.job["precision"], imported.open) == (2, "bf16", {})
    stated = OF_2024.replace(
        "pipeline_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4"
    )
    assert read(stated).degrees["mbs"] == 4


def test_the_first_files_leave_recomputation_open():
    """Before there was a key for it, the version decided; data_parallel_degree is the shards."""
    text = OF_2024.replace("data_parallel_shard_degree = -1", "data_parallel_degree = 4").partition("[experimental]")[0]
    imported = read(text)

    assert imported.degrees["dp"] == 4
    assert set(imported.open) == {"recompute"}


@pytest.mark.parametrize(
    ("key", "precision"), [("enable_float8_linear = true", "fp8"), ("enable_float8_linear = false", "bf16")]
)
def test_float8_of_2024(key, precision):
    """The section [float8] said whether products are in fp8."""
    assert read(OF_2024.replace("enable_float8_linear = false", key)).job["precision"] == precision


@pytest.mark.parametrize("value", ['"float8"', '["quantize.linear.float8"]', '["mx"]'])
def test_converters(value):
    """Converters are one text or a list of texts."""
    text = OF_2024.replace('flavor = "70B"', f'flavor = "70B"\nconverters = {value}')

    assert read(text).job["precision"] == "fp8"


def test_batches_of_the_main_branch_without_a_step():
    """Without the tokens of a step it has one accumulation of the pipeline's micro-batches."""
    assert read(OF_MAIN.replace("--training.num-tokens-per-train-step=16384", "")).micro_batches == 8


def test_packed_batches_are_refused():
    """A micro-batch of part of a sequence is no whole number of them."""
    with pytest.raises(ConfigError, match="whole sequences"):
        read(OF_MAIN.replace("dp_rank=256", "dp_rank=200"))


def test_a_recipe_that_is_not_read_is_asked_for():
    """What no flag states is the recipe's, and never torchtitan's default."""
    imported = read("torchrun -m torchtitan.train --module x --config mine --training.seq_len 4096")

    assert set(imported.open) == {"mbs", "recompute", "tp", "pp", "cp", "zero_stage"}
    assert imported.degrees == {"ep": 1, "vpp": 1}
    assert "mine is not read" in imported.open["tp"]


def test_torchtitans_own_recipes_are_known():
    """llama3_70b trains with tp 8 and full recomputation where no flag says otherwise."""
    imported = read("torchrun -m torchtitan.train --module llama3 --config llama3_70b --training.local_batch_size 2")

    assert imported.open == {}
    assert whole(imported) == {"tp": 8, "mbs": 2}
    assert imported.job["recompute"] == "full"


def test_what_is_not_modelled_is_told():
    """Offloading and pure bf16 training are asked for by their keys."""
    doubts = read(OF_2024.replace("batch_size = 16", "enable_cpu_offload = true\ndtype = 'bfloat16'")).doubts

    assert {one.flag for one in doubts} == {"--training.enable_cpu_offload", "--training.dtype"}
    assert read(OF_2024.replace("batch_size = 16", "dtype = 'float32'")).doubts == ()


def test_adapters_are_refused():
    """A converter that adds LoRA trains no whole model."""
    with pytest.raises(ConfigError, match="adapters"):
        read(OF_2024.replace('flavor = "70B"', 'flavor = "70B"\nconverters = ["lora"]'))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun -m torchtitan.train --job.config_file ./llama3_8b.toml", "--from-torchtitan ./llama3_8b.toml"),
        ("./run_train.sh", "--capture -- bash SCRIPT"),
        ("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64", "--from-megatron"),
    ],
)
def test_a_script_without_flags_of_torchtitan_is_called_a_script(text, words):
    """The message does not call a shell script bad TOML, and says how its configuration is read."""
    with pytest.raises(ConfigError, match="is a shell script") as error:
        read(f"#!/bin/bash\n{text}\n")

    assert words in str(error.value)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("expert_tensor_parallel_degree = 2", [("--parallelism.expert_tensor_parallel_degree", "expert_tp")]),
        ("my_own_degree = 4", [("--parallelism.my_own_degree", "")]),
        ("my_own_degree = 1\nenable_fsdp_symm_mem = true", []),
    ],
)
def test_keys_that_no_version_has_are_asked_for(key, expected):
    """A key about the layout that is not read, known or not, is doubted unless its value changes nothing."""
    imported = read(f"{OF_2024}\n[parallelism]\n{key}\n")

    assert [(one.flag, one.key) for one in imported.doubts] == expected
