from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from hardware.io.errors import ConfigError
from tests.support.studies.recipe_scripts import (
    BRIDGE,
    BRIDGE_PYTHON,
    BRIDGE_YAML,
    MAXTEXT,
    MAXTEXT_YAML,
    NEMO,
    SWIFT,
    SWIFT_YAML,
    TITAN,
    TITAN_PYTHON,
    VERL,
)
from tests.unit.tuner.imports.test_formats import whole
from tests.unit.tuner.imports.test_round_trip import configurations
from tuner.capture.record import Record
from tuner.capture.run_script import Capture
from tuner.export import find_exporter
from tuner.imports import IMPORTERS, WITH_FILE, present_of
from tuner.imports.captured import import_captured
from tuner.imports.model_names import catalog_model
from tuner.imports.settings.programs import program_of
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import new_study, read_several
from tuner.study_file.word_differences import word_differences

RECIPE = "the recipe llama3_8b_pretrain_config is not read"


def read(program, text, file=""):
    """What a program's script says, with the file beside it."""
    return WITH_FILE[program](text, file=file) if program in WITH_FILE else IMPORTERS[program](text)


def behind(command, word):
    """The word of a command behind another one."""
    return command.arguments[command.arguments.index(word) + 1]


# Megatron-Bridge


def test_a_recipe_that_is_not_read_leaves_open_what_no_override_states():
    """Degrees come from overrides and short options, the model from the recipe's name; all else is asked for."""
    imported = read("bridge", BRIDGE)

    assert whole(imported) == {"pp": 2, "tp": 2}
    assert imported.degrees["mbs"] == 1
    assert imported.model_name == "llama3-8b"
    assert (imported.hosts, imported.devices_per_host) == (2, 8)
    assert imported.job["sequence_length"] == 8192
    assert imported.job["global_batch_size"] == 128
    assert imported.job["sequence_parallel"] is True
    assert list(imported.open) == ["recompute"]
    assert RECIPE in imported.open["recompute"]
    assert (imported.unread, imported.doubts) == ((), ())


def test_its_yaml_states_the_rest_and_overrides_replace_it():
    """The dump's pp and cp give way to the command's, its model and its recomputation hold."""
    imported = read("bridge", BRIDGE, BRIDGE_YAML)
    alone = read("bridge", BRIDGE_YAML)

    assert imported.open == {}
    assert whole(imported) == {"pp": 2, "tp": 2}
    assert imported.job["recompute"] == "none"
    assert whole(alone) == {"pp": 4, "cp": 2}
    assert alone.job["global_batch_size"] == 512
    assert imported.model == alone.model
    assert (alone.model["num_layers"], alone.model["num_kv_heads"], alone.model["vocab_size"]) == (32, 8, 128256)


def test_its_trials_keep_the_words_of_the_script():
    """All words stay in their order but for saving, trackers and the interval of the log."""
    command = read("bridge", BRIDGE).command

    assert command.unknown == ()
    own = command.arguments[command.arguments.index("scripts/training/run_recipe.py") + 1 :]
    assert own == (
        *("--recipe", "llama3_8b_pretrain_config", "-mb", "1", "train.global_batch_size=128", "train.train_iters=50"),
        *("model.seq_length=8192", "dataset.seq_length=8192", "model.tensor_model_parallel_size=2"),
        *("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=null"),
        *("model.context_parallel_size=1", "model.sequence_parallel=True", "model.apply_rope_fusion=True"),
        "logger.log_interval=1",
    )
    assert command.left_out == ("checkpoint.save", "logger.wandb_project")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("model.moe_layer_freq=[0,1]", ""),
        ("model.some_new_field=3", "model.some_new_field"),
        ("optimizer.lr=1e-4", ""),
        ("validation.eval_iters=3", ""),
    ],
)
def test_an_override_that_is_not_read_is_asked_for(more, told):
    """A field of the model that nobody reads may change what is trained; those of data and reports do not."""
    doubts = read("bridge", BRIDGE.replace("-mb 1", f"-mb 1 {more}")).doubts

    assert [one.flag for one in doubts] == ([told] if told else [])


@pytest.mark.parametrize("layout", ["Et*10|t*22L", '[["embedding"], ["decoder"], ["decoder", "loss"]]'])
def test_a_layout_of_text_or_lists(layout):
    """Recipes give a layout as text or as one list for each virtual stage; both are read."""
    sizes = BRIDGE_YAML.replace("pipeline_model_parallel_size: 4", "pipeline_model_parallel_size: 2")
    if "[" in layout:
        layers = [["embedding", *["decoder"] * 10], [*["decoder"] * 22, "loss"]]
        layout = str(layers)
    text = sizes.replace("recompute_granularity: null", f"pipeline_model_parallel_layout: {layout}")

    imported = read("bridge", text)

    assert imported.layers == (10, 22)


def test_an_override_whose_value_is_unknown_is_open():
    """A degree that a loop sets is asked for with the line that says why."""
    imported = read("bridge", BRIDGE.replace("TP=2\n", "for TP in 1 2; do :; done\n"), BRIDGE_YAML)

    assert "loop on line 3" in imported.open["tp"]
    assert "tp" not in imported.degrees


def run_recipe(name, more=""):
    """A command that runs a recipe."""
    return f"torchrun --nproc_per_node=8 --nnodes=4 scripts/training/run_recipe.py --recipe {name} {more}\n"


def test_a_recipes_python_is_read_as_text():
    """Literals that the function sets, the weights that it names, and what the functions of all recipes set."""
    imported = read("bridge", run_recipe("llama3_70b_pretrain_config"), BRIDGE_PYTHON)

    assert whole(imported) == {"pp": 4, "tp": 4, "cp": 2, "vpp": 5}
    assert (imported.model_name, imported.open, imported.unread) == ("llama3-70b", {}, ())
    assert imported.job == {
        "sequence_length": 8192,
        "global_batch_size": 512,
        "precision": "bf16",
        "optimizer": "adam",
        "recompute": "none",
        "zero_stage": 1,
        "sequence_parallel": True,
    }


def test_a_recipe_over_another_one_of_its_file():
    """What the first sets holds unless a condition or a function sets it otherwise; overrides settle that."""
    name = "llama3_70b_pretrain_fp8_config"
    imported = read("bridge", run_recipe(name), BRIDGE_PYTHON)
    settled = read("bridge", run_recipe(name, "model.context_parallel_size=1 train.micro_batch_size=1"), BRIDGE_PYTHON)

    assert set(imported.open) == {"cp", "mbs"}
    assert "condition" in imported.open["cp"]
    assert (imported.job["precision"], imported.job["recompute"]) == ("fp8", "selective")
    assert whole(settled) == {"pp": 4, "tp": 4, "vpp": 5}
    assert settled.open == {}


def test_which_recipe_of_a_file_runs_is_said_by_a_command():
    """A file of several recipes alone is refused with what to add; an unknown recipe with the nearest one."""
    with pytest.raises(ConfigError, match="has 2 recipes"):
        read("bridge", BRIDGE_PYTHON)
    with pytest.raises(ConfigError, match="llama3_70b_pretrain_config"):
        read("bridge", run_recipe("llama3_70b_pretrain_confg"), BRIDGE_PYTHON)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BRIDGE.replace("pretrain_config", "lora_config"), "few of the weights"),
        (BRIDGE_YAML.replace("peft: null", "peft: {dim: 8}"), "few of the weights"),
        ("echo 1\n", "starts no recipe"),
        ("python train.py --lr 1\n", "starts no recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(text, told):
    """Adapters, and scripts that start something else."""
    with pytest.raises(ConfigError, match=told):
        read("bridge", text)


def test_a_script_that_submits_its_job_gives_no_trial():
    """setup_experiment.py returns when its job is queued; devices are those that it asks for."""
    text = "python scripts/performance/setup_experiment.py -m llama3 -mr llama3_8b -ng 16 -g h100 -tp 2 --account me\n"

    imported = read("bridge", text)

    assert (imported.hosts, imported.devices_per_host, imported.degrees["tp"]) == (2, 8, 2)
    assert any("submits a job" in why for why in imported.command.unknown)


# Megatron-SWIFT


def test_swift_has_defaults_of_its_own():
    """Options with values, variables for torchrun, and ZeRO 1 and bf16 without a word."""
    imported = read("swift", SWIFT)

    assert whole(imported) == {"tp": 4, "mbs": 2}
    assert (imported.hosts, imported.devices_per_host) == (2, 8)
    assert imported.model_name == "qwen2.5-7b"
    assert imported.job == {
        "sequence_length": 8192,
        "global_batch_size": 32,
        "precision": "bf16",
        "optimizer": "adam",
        "recompute": "full",
        "zero_stage": 1,
        "sequence_parallel": True,
        "expert_tp": 1,
    }
    assert (imported.open, imported.unread, imported.doubts) == ({}, (), ())


def test_swifts_trials_get_the_devices_by_variables():
    """No launcher is added: the program starts torchrun from the variables."""
    command = read("swift", SWIFT).command

    assert command.arguments[:4] == ("megatron", "sft", "--model", "Qwen/Qwen2.5-7B-Instruct")
    assert command.arguments[5:9] == ("a/b#20000", "c/d", "--tensor_model_parallel_size", "4")
    assert command.arguments[-2:] == ("--logging_steps", "1")
    assert command.left_out == ("--save_steps",)
    assert ("NNODES", "{num_hosts}") in command.environment
    assert ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True") in command.environment


def test_swift_reads_the_yaml_that_a_script_names():
    """Words of the command replace the file's; `none` is no recomputation, and sequence parallelism needs tp."""
    alone = read("swift", SWIFT_YAML)
    script = "NPROC_PER_NODE=8 megatron sft conf/sft.yaml --micro_batch_size 2\n"

    imported = read("swift", script, SWIFT_YAML)

    assert (alone.devices_per_host, alone.job["recompute"], whole(alone)) == (4, "none", {})
    assert "sequence_parallel" not in alone.job
    assert (imported.devices_per_host, imported.degrees["mbs"]) == (8, 2)
    assert imported.command.arguments[:4] == ("megatron", "sft", "conf/sft.yaml", "--micro_batch_size")
    with pytest.raises(ConfigError, match=r"options of conf/sft\.yaml"):
        read("swift", script)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SWIFT.replace("--lr 1e-5", "--tuner_type lora"), "few of the weights"),
        (SWIFT.replace("--lr 1e-5", "--task_type seq_cls"), "no decoder"),
        (SWIFT.replace("megatron sft", "megatron rlhf"), "more models"),
        (SWIFT.replace("megatron sft", "swift sft"), "Hugging Face"),
        ("echo 1\n", "no command"),
    ],
)
def test_other_trainings_of_swift_are_refused(text, told):
    """Adapters, classifiers, reinforcement learning, and the trainer that is not Megatron's."""
    with pytest.raises(ConfigError, match=told):
        read("swift", text)


# MaxText


def test_maxtext_states_axes_within_and_across_slices():
    """An axis is the product of both; a micro-batch has the sequences of the devices of a replica."""
    imported = read("maxtext", MAXTEXT, MAXTEXT_YAML)

    assert whole(imported) == {"tp": 4, "dp": 32, "mbs": 16}
    assert (imported.copies, imported.micro_batches, imported.model_name) == (16, 1, "llama-7b")
    assert imported.job["recompute"] == "selective"
    assert imported.job["sequence_parallel"] is False
    assert imported.job["sequence_length"] == 4096
    assert [one.what for one in imported.unread] == ["remat_policy"]


def test_maxtexts_trials_keep_their_policy():
    """A policy between none and full has no other name in a study, so that the script's own word stays."""
    text = MAXTEXT.replace("profiler=xplane", "profiler=xplane remat_policy=save_out_proj")
    command = read("maxtext", text).command

    assert command.arguments == (
        *("python3", "-m", "maxtext.trainers.pre_train.train", "configs/llama2_7b.yml", "run_name=run"),
        *(
            "dcn_data_parallelism=16",
            "ici_fsdp_parallelism=2",
            "ici_tensor_parallelism=4",
            "base_output_directory=/out",
        ),
        *("remat_policy=save_out_proj", "enable_checkpointing=false"),
    )
    assert command.left_out == ("profiler",)


def test_a_pipeline_of_maxtext():
    """Micro-batches and repeats of stages; a share of a sequence on each device."""
    text = MAXTEXT.replace(
        "dcn_data_parallelism=16",
        "ici_pipeline_parallelism=2 dcn_data_parallelism=2 num_pipeline_microbatches=4 num_pipeline_repeats=4 "
        "per_device_batch_size=0.5 max_target_length=2048",
    )

    imported = read("maxtext", text)

    assert whole(imported) == {"pp": 2, "tp": 4, "vpp": 4, "dp": 4}
    with pytest.raises(ConfigError, match=r"0\.5 sequences"):
        read("maxtext", text.replace("per_device_batch_size=0.5", "per_device_batch_size=0.25"))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("ici_context_parallelism=2", "context_parallel_strategy"),
        ("ici_sequence_parallelism=2", "ici_sequence_parallelism"),
        ("ici_fsdp_transpose_parallelism=2", "ici_fsdp_transpose_parallelism"),
        ("ici_context_parallelism=2 context_parallel_strategy=ring", ""),
    ],
)
def test_axes_that_are_not_modelled_are_asked_for(more, told):
    """The user has to say that the study may ignore them."""
    doubts = read("maxtext", MAXTEXT.replace("run_name=run", f"run_name=run {more}")).doubts

    assert [one.flag for one in doubts] == ([told] if told else [])


def test_a_model_file_of_maxtext_is_a_model():
    """Sizes of configs/models/qwen3-8b.yml (AI-Hypercomputer/maxtext) are those of the model."""
    text = (
        "base_emb_dim: 4096\nbase_num_query_heads: 32\nbase_num_kv_heads: 8\nbase_mlp_dim: 12288\n"
        "base_num_decoder_layers: 36\nhead_dim: 128\nmlp_activations: [silu, linear]\nvocab_size: 151936\n"
        "decoder_block: qwen3\nuse_qk_norm: true\nlogits_via_embedding: false\n"
    )

    model = read("maxtext", text).model

    assert (model["num_layers"], model["hidden_size"], model["ffn_size"]) == (36, 4096, 12288)
    assert model["qk_norm"] is True
    assert read("maxtext", text.replace("qwen3\n", "gemma3\n")).model == {}


# verl


def test_verl_is_the_actors_training():
    """A step is one mini-batch of prompts with all answers; a line of the log covers four of them."""
    imported = read("verl", VERL)

    assert whole(imported) == {"pp": 2, "tp": 2, "mbs": 4}
    assert (imported.hosts, imported.devices_per_host) == (1, 8)
    assert imported.job["global_batch_size"] == 256 * 5
    assert imported.job["sequence_length"] == 2048
    assert imported.job["recompute"] == "selective"
    assert imported.model_name == "qwen2.5-7b"
    assert any("rollout" in one.what for one in imported.unread)
    command = imported.command
    assert (command.launch, command.steps_per_line, command.unknown) == ("once", 4, ())
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=4" in command.arguments
    assert command.arguments[-2:] == ("trainer.logger=[console]", "trainer.save_freq=-1")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz=True", "mbs"),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP", "ep"),
    ],
)
def test_what_verl_leaves_open(more, key):
    """Micro-batches that are filled by tokens have no size; unknown values have a reason."""
    imported = read("verl", VERL.replace("trainer.nnodes=1", f"trainer.nnodes=1 {more}"))

    assert list(imported.open) == [key]
    assert key not in imported.degrees


def test_an_actor_with_fsdp_is_refused():
    """Meshtune reads actors with Megatron."""
    text = "\n".join(line for line in VERL.splitlines() if ".megatron." not in line and "config-name" not in line)

    with pytest.raises(ConfigError, match="FSDP"):
        read("verl", text.replace("--config-path=config", ""))


# NeMo


def test_a_factory_of_nemo_leaves_the_rest_open():
    """Overrides of strategy, data and trainer; the recipe's name is the model's."""
    imported = read("nemo", NEMO)

    assert imported.degrees | {"tp": 2, "pp": 1, "mbs": 1} == imported.degrees
    assert (imported.hosts, imported.devices_per_host, imported.model_name) == (2, 8, "llama3-8b")
    assert {"recompute", "cp"} <= imported.open.keys()
    assert any("torch.dtype" in why for why in imported.command.unknown)


def test_the_yaml_of_a_nemo_recipe():
    """Fields of the strategy, the class of the model and the precision's plugin."""
    text = (
        "_target_: nemo.collections.llm.api.pretrain\n"
        "data: {micro_batch_size: 1, global_batch_size: 512, seq_length: 8192}\n"
        "model: {config: {_target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B}}\n"
        "optim: {config: {use_distributed_optimizer: true}}\n"
        "trainer:\n  devices: 8\n  num_nodes: 4\n  plugins: {precision: bf16-mixed}\n"
        "  strategy: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, context_parallel_size: 2}\n"
    )

    imported = read("nemo", text)

    assert whole(imported) == {"tp": 2, "pp": 2, "cp": 2}
    assert (imported.hosts, imported.model_name, imported.open) == (4, "llama3-8b", {})
    assert imported.job["precision"] == "bf16"
    assert imported.job["zero_stage"] == 1


def test_nemo_1_has_its_configuration_in_a_file():
    """A script alone is refused with what to add; overrides replace the file's values."""
    text = "python megatron_gpt_pretraining.py model.tensor_model_parallel_size=4 model.num_layers=24\n"
    base = (
        "trainer: {devices: 8, num_nodes: 2, precision: bf16}\n"
        "model: {mcore_gpt: true, micro_batch_size: 2, global_batch_size: 64, tensor_model_parallel_size: 1,\n"
        "  encoder_seq_length: 4096, num_layers: 12, hidden_size: 1024, num_attention_heads: 16}\n"
    )

    imported = read("nemo", text, base)

    assert whole(imported) == {"tp": 4, "mbs": 2}
    assert imported.model["num_layers"] == 24
    with pytest.raises(ConfigError, match="stands in a YAML file"):
        read("nemo", text)
    with pytest.raises(ConfigError, match="trains adapters"):
        read("nemo", "nemo llm finetune --factory llama3_8b\n")


# All of them


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("/models/Llama-3.1-70B-Instruct/", "llama3-70b"),
        ("llama31_405b_pretrain_config", "llama3-405b"),
        ("llama3_8b_16k_pretrain_config", "llama3-8b"),
        ("Qwen/Qwen2.5-72B", "qwen2.5-72b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3"),
        ("llama2-7b", "llama-7b"),
        ("Qwen/Qwen3-8B", ""),
        ("meta-llama/Llama-3.2-1B", ""),
        ("DeepSeek-V3.2", ""),
        ("llama2-70b", ""),
        ("gpt3-175b", ""),
    ],
)
def test_names_of_weights_and_recipes(name, model):
    """Only names whose sizes are those of a model in the catalog stand for it; a vocabulary is never guessed."""
    assert catalog_model(name) == model


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["torchrun", "scripts/training/run_recipe.py", "--recipe", "a"], "bridge"),
        (["torchrun", "mine.py", "model.tensor_model_parallel_size=2"], "bridge"),
        (["megatron", "sft", "--tensor_model_parallel_size", "2"], "swift"),
        (["python3", "-m", "MaxText.train", "base.yml"], "maxtext"),
        (["python", "-m", "maxtext.trainers.pre_train.train", "base.yml"], "maxtext"),
        (["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=1"], "verl"),
        (["nemo", "llm", "pretrain", "--factory", "a"], "nemo"),
        (["torchrun", "pretrain_gpt.py", "--tensor-model-parallel-size", "2"], ""),
        (["torchrun", "-m", "torchtitan.train", "--parallelism.tensor_parallel_degree=2"], ""),
        (["python", "train.py"], ""),
    ],
)
def test_programs_are_told_by_their_words(words, program):
    """A captured command goes to the importer of its program."""
    assert program_of(words) == program


TENSOR = {
    "bridge": "model.tensor_model_parallel_size",
    "swift": "--tensor_model_parallel_size",
    "maxtext": "ici_tensor_parallelism",
    "verl": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
}
"""Setting of the tensor parallel degree."""
ADDED = {
    "bridge": Added(cluster="dgx-h100", answers={"recompute": "none"}),
    "swift": Added(cluster="dgx-h100"),
    "maxtext": Added(cluster="dgx-h100"),
    "verl": Added(cluster="dgx-h100"),
    "nemo": Added(
        cluster="dgx-h100",
        answers={"recompute": "none", "cp": 1, "sequence_parallel": True, "sequence_length": 8192, "vpp": 1},
    ),
}


EXCEPTIONS = {
    "bridge": {"checkpoint.save", "logger.wandb-project", "logger.log-interval"},
    "swift": {"--save-steps", "--logging-steps", "NNODES", "NODE-RANK", "NPROC-PER-NODE", "MASTER-ADDR", "MASTER-PORT"},
    "maxtext": {"profiler", "enable-checkpointing"},
    "verl": {"trainer.logger", "trainer.save-freq"},
}
"""Settings that trials have otherwise than the script: saving, reporting, the log and the devices."""


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        ("bridge", (BRIDGE,)),
        ("swift", (SWIFT,)),
        ("maxtext", (MAXTEXT, MAXTEXT_YAML)),
        ("verl", (VERL,)),
        ("nemo", (NEMO,)),
    ],
    ids=["bridge", "swift", "maxtext", "verl", "nemo"],
)
def test_each_becomes_a_study_that_loads(tmp_path, program, texts):
    """The study of each script loads, has the present configuration, and trials with the program's own settings."""
    files = [tmp_path / f"{number}{'.yaml' if number else '.sh'}" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    imported = read_several(program, files) if program in WITH_FILE else read(program, texts[0])

    made = new_study(imported, ADDED[program], file=files[0], out=tmp_path / "study.yaml")
    Path(tmp_path / "study.yaml").write_text(made.text)
    study = load_study(tmp_path / "study.yaml")

    assert study.problem.setting.cluster.num_devices == made.devices
    if program == "nemo":
        return
    current = study.problem.current
    told = word_differences(imported.command, study.trials.backend, current)
    assert {(one.trial or one.script).partition("=")[0].split()[0].replace("_", "-") for one in told} <= {
        *EXCEPTIONS[program],
        *(
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--nnodes",
            "--nproc-per-node",
            "CUDA-DEVICE-MAX-CONNECTIONS",
        ),
    }
    other = replace(current, dp=current.dp // 2, tp=current.tp * 2)
    words = study.trials.backend.plan(other, 0).arguments
    key = TENSOR[program]
    now, then = imported.command.arguments, [word for word in words if word.startswith(key)]
    assert then[-1] in (f"{key}={other.tp}", key)
    assert [word for word in now if word.startswith(key)] != then or program == "swift"
    assert made.measures == (program != "nemo")
    assert made.present.current["tp"] == {"maxtext": 4, "swift": 4}.get(program, 2)


def test_more_than_two_files_are_refused(tmp_path):
    """A script has one file beside it."""
    for name in "abc":
        (tmp_path / name).write_text(BRIDGE)

    with pytest.raises(ConfigError, match="more than twice"):
        read_several("bridge", [tmp_path / name for name in "abc"])


def written(program, words, *, is_moe=False):
    """A command of a program with settings, and the file beside it."""
    experts = "  num_moe_experts: 8\n  moe_router_topk: 2\n" if is_moe else ""
    commands = {
        "bridge": (
            "torchrun --nproc_per_node=8 --nnodes=8 run_recipe.py --recipe x",
            BRIDGE_YAML.replace("  num_layers", f"{experts}  num_layers"),
        ),
        "swift": ("NNODES=8 NPROC_PER_NODE=8 megatron pt --model x --packing true", ""),
    }
    begin, file = commands[program]
    quoted = " ".join(f"'{word}'" if "'" not in word else f'"{word}"' for word in words)
    return f"{begin} {quoted}\n", file


@settings(deadline=None, max_examples=25)  # half of what Megatron-LM's own flags get, whose importer reads these
@given(configurations())
def test_settings_come_back_as_the_configuration(drawn):
    """Every degree of a valid configuration comes back from the settings that we write for it."""
    setting, config = drawn
    for program in ("bridge", "swift"):
        export = find_exporter(program)(setting, config)
        noted = {note.partition(":")[0] for note in export.notes}

        imported = read(program, *written(program, export.arguments, is_moe=setting.job.model.is_moe))
        present = present_of(imported, devices=64, model=setting.job.model, runtime=setting.runtime)

        found, wanted = present.current, config.values()
        if "up" in noted:
            wanted |= {"cp": config.cp * config.up, "up": 1}
        if not config.assignment:
            assert {name: found[name] for name in wanted} == wanted
        assert present.job["recompute"] == config.recompute
        assert present.job["global_batch_size"] == setting.job.global_batch_size
        if "zero_stage" not in noted:
            assert present.job["zero_stage"] == config.zero_stage


# torchtitan


@pytest.mark.parametrize(
    ("name", "degrees", "job"),
    [
        ("llama3_8b", {"tp": 2, "cp": 2}, {"precision": "fp8", "recompute": "selective"}),
        ("llama3_8b_tuned", {"tp": 2, "cp": 2, "mbs": 2}, {"precision": "bf16", "recompute": "full"}),
        ("llama3_8b_main", {"tp": 2, "mbs": 2}, {"precision": "bf16", "recompute": "selective"}),
    ],
)
def test_a_registry_of_torchtitan_is_read_as_text(name, degrees, job):
    """A recipe's literals, also over another one of the file; flags of the command replace them."""
    imported = read("torchtitan", TITAN.replace("llama3_8b_tuned", name), TITAN_PYTHON)

    assert whole(imported) == degrees
    assert {key: imported.job[key] for key in job} == job
    assert (imported.job["sequence_length"], imported.model_name, imported.open) == (8192, "llama3-8b", {})
    assert (imported.hosts, imported.devices_per_host) == (4, 8)


def test_a_registry_without_the_recipe_is_refused():
    """The nearest function of the file is named."""
    with pytest.raises(ConfigError, match="llama3_8b_tuned"):
        read("torchtitan", TITAN.replace("llama3_8b_tuned", "llama3_8b_tunde"), TITAN_PYTHON)


# captures


@pytest.mark.parametrize(
    ("words", "recipe", "framework", "degrees"),
    [
        (
            run_recipe("llama3_70b_pretrain_config").split(),
            BRIDGE_PYTHON,
            "bridge",
            {"pp": 4, "tp": 4, "cp": 2, "vpp": 5},
        ),
        (["megatron", "pt", "--model", "x", "--tensor_model_parallel_size", "2"], "", "swift", {"tp": 2}),
        (TITAN.replace("\\\n", "").split(), TITAN_PYTHON, "torchtitan", {"tp": 2, "cp": 2, "mbs": 2}),
    ],
    ids=["bridge", "swift", "torchtitan"],
)
def test_a_captured_command_is_read_with_its_recipe(words, recipe, framework, degrees):
    """What a script starts goes to the importer of its program, and the recipe's file states the rest."""
    record = Record(words=tuple(words), directory="/home/me", environment={"NPROC_PER_NODE": "8", "PATH": "/bin"})
    captured = Capture(records=(record,), status=0, output="", environment={"PATH": "/bin"})

    imported = import_captured(captured, recipe=recipe)

    assert (imported.framework, whole(imported), imported.open) == (framework, degrees, {})
    assert imported.devices_per_host == 8
