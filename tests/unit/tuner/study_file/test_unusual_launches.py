"""Studies of launches with a combination that few profiles offer: each loads, with what the launch says."""

from pathlib import Path

import pytest

from tests.unit.tuner.imports.test_megatron_models import LAUNCH
from tuner.imports import IMPORTERS
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import new_study

PLAIN_REPLICAS = """\
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 2048
local_batch_size = 1
[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = 1
"""


def study(folder, framework, text):
    """The loaded study of a launch."""
    added = Added(cluster="dgx-h100", answers={"hosts": 1})
    made = new_study(IMPORTERS[framework](text), added, file=Path("train.sh"), out=folder / "study.yaml")
    (folder / "study.yaml").write_text(made.text, encoding="utf-8")
    if made.model_file:
        (folder / made.model_file).write_text(made.model_text, encoding="utf-8")
    return load_study(folder / "study.yaml")


@pytest.mark.parametrize(
    ("framework", "text", "runtime", "stage"),
    [
        ("torchtitan", PLAIN_REPLICAS, "torchtitan", 0),
        ("megatron", "--deepspeed --bf16 --ds-sequence-parallel-size 4 --zero-stage 3", "unknown", 3),
        ("megatron", "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "megatron-core", 2),
        ("megatron", "--bf16 --use-torch-fsdp2", "megatron-core", 3),
    ],
)
def test_a_stage_of_the_launch_is_one_of_its_profile(tmp_path, framework, text, runtime, stage):
    """Plain replicas of torchtitan, Ulysses with ZeRO 3, and FSDP in Megatron-LM are studied as they are."""
    if framework == "megatron":
        flags = f"{text} --global-batch-size 64".replace("--deepspeed", "--deepspeed-config ds.json --deepspeed")
        text = (
            LAUNCH.format(program="pretrain_gpt.py", flags=flags)
            + '\n# {"bf16": {"enabled": true}, "zero_optimization": {}}'
        )

    found = study(tmp_path, framework, text)

    assert found.problem.setting.runtime.name == runtime
    assert found.problem.setting.job.zero_stage == stage
    assert found.problem.current is not None


def test_reused_fp32_parameters_are_a_key_of_the_job(tmp_path):
    """MindSpeed's --reuse-fp32-param reaches the memory model."""
    flags = "--bf16 --use-fused-rmsnorm --reuse-fp32-param --use-distributed-optimizer --global-batch-size 64"

    found = study(tmp_path, "megatron", LAUNCH.format(program="pretrain_gpt.py", flags=flags))

    assert found.problem.setting.runtime.name == "mindspeed"
    assert found.problem.setting.job.shared_master_weights
