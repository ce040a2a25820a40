"""Studies of Megatron-LM with PyTorch's FSDP2: what a script says of it, and what trials of other layouts start."""

from dataclasses import replace

import pytest
import yaml

from costmodels.job.facts import with_facts
from costmodels.job.runtime import find_runtime, runtime_names
from hardware.io.errors import ConfigError
from tests.oracles.frameworks.megatron import check_megatron, said_by_megatron
from tests.oracles.frameworks.published_rules import facts_of
from tuner.export import find_exporter
from tuner.imports import IMPORTERS
from tuner.study_file.config import load_study

SIZES = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 512 --bf16 --mock-data --no-gradient-accumulation-fusion --log-interval 1"
)
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dist"
OWN = "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


@pytest.fixture(name="study")
def make_study(meshtune, tmp_path):
    """Return the study that `init` makes of a script with some flags, with the answer of `init`."""

    def make(flags, **keys):
        text = f"torchrun --standalone --nproc_per_node 8 pretrain_gpt.py {SIZES} {flags}\n"
        (tmp_path / "train.sh").write_text(text, encoding="utf-8")
        options = (
            f"init --from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100 --hosts 1 --force"
        )
        done = meshtune(*options.split())
        assert done.status == 0, done.err
        content = yaml.safe_load((tmp_path / "s.yaml").read_text()) | keys
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(content))
        return load_study(tmp_path / "s.yaml"), done.out

    return make


def words_of(study, config):
    """The words of a trial behind the program."""
    arguments = study.trials.backend.plan(config, 0).arguments
    return " ".join(arguments[arguments.index("pretrain_gpt.py") + 1 :])


@pytest.mark.parametrize(("flags", "stage"), [("", 3), (" --torch-fsdp2-no-reshard-after-forward", 2)])
def test_a_script_with_fsdp2_is_studied_with_it(study, flags, stage):
    """FSDP2 is a fact beside the ZeRO stage, and settles what flags for other ways would say."""
    found, told = study(FSDP2 + flags)
    runtime = found.problem.setting.runtime

    assert runtime.stated == (("sharding", "fsdp2"),)
    assert (runtime.overlaps_gradients, runtime.gradient_message_bytes) == (True, 2)
    assert found.problem.setting.job.zero_stage == stage
    assert "script and of the first trial: none" in told.replace("your ", "")
    assert words_of(found, found.problem.current) == f"{SIZES} {FSDP2}{flags}"


def test_a_trial_of_another_layout_keeps_fsdp2(study):
    """Only the degrees change, and the flag that keeps weights gathered comes and goes beside FSDP2's own."""
    found, _ = study(f"--tensor-model-parallel-size 1 {FSDP2}")
    other = replace(found.problem.current, tp=2, dp=4, zero_stage=2)

    assert words_of(found, other) == (
        f"{SIZES} --tensor-model-parallel-size 2 --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward "
        "--ckpt-format torch_dist --sequence-parallel"
    )


def test_a_format_that_excludes_layouts_is_exchanged(study):
    """torch_dcp takes no tp, and a trial saves nothing; Megatron-FSDP's own format goes with it."""
    found, told = study(FSDP2.replace("torch_dist", "torch_dcp"))
    assert words_of(found, found.problem.current) == f"{SIZES} {FSDP2}"
    assert "--ckpt-format torch_dcp -> --ckpt-format torch_dist: a trial saves no checkpoint" in told

    found, _ = study(f"{OWN} --ckpt-format fsdp_dtensor", space={"zero_stage": [1, 3]})
    words = words_of(found, replace(found.problem.current, zero_stage=1))
    assert "fsdp" not in words
    assert "--use-distributed-optimizer" in words


def test_exports_obey_the_rules_of_fsdp2(study):
    """Every candidate's flags are those of its stage, and Megatron-LM takes them."""
    found, _ = study(FSDP2, space={"zero_stage": [2, 3]})
    setting = found.problem.setting
    for config in (
        replace(found.problem.current, tp=tp, dp=8 // tp, zero_stage=stage) for tp, stage in ((1, 3), (4, 2))
    ):
        export = find_exporter("megatron")(setting, config)
        said = said_by_megatron(check_megatron(export.arguments, facts_of(setting)), facts_of(setting))
        assert {name: said[name] for name in ("tp", "dp", "zero_stage")} == config.values(("tp", "dp", "zero_stage"))
        assert ("CUDA_DEVICE_MAX_CONNECTIONS", None) in export.environment
        assert dict(IMPORTERS["megatron"](f"pretrain_gpt.py {' '.join(export.arguments)}").facts)["sharding"] == "fsdp2"
        bridge = find_exporter("bridge")(setting, config)
        assert "dist.use_torch_fsdp2=True" in bridge.arguments
        for target in ("swift", "verl", "nemo"):
            notes = find_exporter(target)(setting, config).notes
            assert "sharding" in {note.partition(":")[0] for note in notes}, target


@pytest.mark.parametrize("runtime", sorted({*runtime_names()} - {"megatron-core", "unknown"}))
def test_other_frameworks_have_no_such_way(tmp_path, runtime):
    """A study of another framework is told, whatever its stages."""
    keys = {
        "name": "other",
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "hosts": 1},
        "job": {"sequence_length": 4096, "global_batch_size": 64},
        "runtime": runtime,
        "facts": {"sharding": "fsdp2"},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(ConfigError, match=rf"facts\.sharding = 'fsdp2': is a way of Megatron-LM alone.*{runtime}; own"):
        load_study(tmp_path / "study.yaml")

    keys |= {"runtime": "megatron-core"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(keys))
    assert load_study(tmp_path / "study.yaml").problem.setting.job.zero_stage == 3


def test_fsdp2_offers_two_stages():
    """It shards gradients always; the framework's other stages are there without it."""
    profile = find_runtime("megatron-core")

    assert with_facts(profile, (("sharding", "fsdp2"),)).offered_stages == (2, 3)
    assert profile.offered_stages == (0, 1, 2, 3)
