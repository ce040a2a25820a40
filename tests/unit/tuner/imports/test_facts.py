"""Facts of a run that scripts, configurations and logs say."""

import json

import pytest

from costmodels.job.facts import parse_facts, shown, with_facts
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import setting_for
from tuner.export import find_exporter
from tuner.imports import IMPORTERS
from tuner.imports.facts import facts_beyond
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import new_study, read_import, read_log

SIZES = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 151936 --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 768 --seq-length 4096 --micro-batch-size 1 --global-batch-size 1024 "
    "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 1 --expert-model-parallel-size 16"
)
HYBRID = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --overlap-moe-expert-parallel-comm"
NARROW = "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
OVERLAPS = "--overlap-grad-reduce --overlap-param-gather"


def script(tmp_path, flags, before=""):
    """A launch script on two hosts of eight."""
    path = tmp_path / "train.sh"
    path.write_text(f"{before}\ntorchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {SIZES} {flags}\n")
    return path


def facts_of_study(tmp_path, path, framework="megatron"):
    """The facts of the study that `init` writes for a file, which can be loaded."""
    imported = read_log(path) if framework == "log" else read_import(framework, path, path.read_text())
    new = new_study(imported, Added(cluster="dgx-h100"), file=path, out=tmp_path / "study.yaml")
    (tmp_path / "study.yaml").write_text(new.text)
    if new.model_file:
        (tmp_path / new.model_file).write_text(new.model_text)
    request = load_study(tmp_path / "study.yaml")
    return dict(request.problem.setting.runtime.stated), request


def test_a_script_with_the_profiles_habits_says_nothing(tmp_path):
    """What the runtime's profile says anyway is not written."""
    flags = f"{OVERLAPS} --moe-token-dispatcher-type alltoall --accumulate-allreduce-grads-in-fp32"

    assert facts_of_study(tmp_path, script(tmp_path, flags))[0] == {}
    assert "facts:" not in (tmp_path / "study.yaml").read_text()


def test_a_script_says_what_it_does_otherwise(tmp_path):
    """Flags, their absence and exported variables become facts of the study, which its predictions have."""
    before = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    told, request = facts_of_study(tmp_path, script(tmp_path, f"{HYBRID} {NARROW}", before))

    assert told == {
        "dispatcher": "hybridep",
        "overlaps_experts": True,
        "overlaps_gradients": False,
        "overlaps_weight_gather": False,
        "gradient_bytes": 2,
        "gradient_message_bytes": 2,
        "first_moment_bytes": 2,
        "second_moment_bytes": 2,
        "expandable_segments": True,
    }
    forecast = request.problem.subject.forecast(request.problem.space().grid.take([0]))
    assert forecast.memory.parts_bytes["fragmentation"][0] == 0


def test_a_log_says_what_ran(tmp_path):
    """Megatron's printed arguments have all flags with their values."""
    values = {
        "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
        "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "swiglu": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "padded_vocab_size": 151936, "num_experts": 128,
        "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "seq_length": 4096, "micro_batch_size": 1,
        "global_batch_size": 1024, "bf16": True, "use_distributed_optimizer": True,
        "tensor_model_parallel_size": 1, "expert_model_parallel_size": 16, "world_size": 16,
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep", "overlap_grad_reduce": True,
        "overlap_param_gather": True, "exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.float32",
        "main_grads_dtype": "torch.float32", "attention_backend": "AttnBackend.auto", "cuda_graph_impl": "none",
        "gradient_accumulation_fusion": False, "accumulate_allreduce_grads_in_fp32": True,
        "optimizer_offload_fraction": 0.0,
    }  # fmt: skip
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    path = tmp_path / "train.log"
    path.write_text(
        "\n".join(["------------------------ arguments ------------------------", *lines,
                   "-------------------- end of arguments ---------------------", ""])
    )  # fmt: skip

    assert facts_of_study(tmp_path, path, "log")[0] == {
        "dispatcher": "deepep",
        "fused_accumulation": False,
        "first_moment_bytes": 2,
    }


def test_flags_that_may_be_hidden_say_nothing(tmp_path):
    """A word that may hold any flag leaves what is absent to the profile, and what is given counts."""
    path = script(tmp_path, f"{HYBRID} $EXTRA_ARGS")

    assert read_import("megatron", path, path.read_text()).facts == {"dispatcher": "hybridep", "overlaps_experts": True}


def test_absence_says_nothing_on_deepspeed():
    """DeepSpeed reduces gradients in its own way, whatever Megatron's flags are."""
    found = IMPORTERS["megatron"](f"pretrain_gpt.py {SIZES} --deepspeed --zero-stage 1 --deepspeed_config ds.json")

    assert found.runtime != "megatron-core"
    assert "overlaps_gradients" not in found.facts


def test_what_is_not_understood_is_told():
    """A value that no fact has is told by name."""
    found = IMPORTERS["megatron"](f"pretrain_gpt.py {SIZES} --moe-token-dispatcher-type mine --exp-avg-dtype int4")

    told = {str(one) for one in found.unread if "facts." in str(one)}
    assert any("--moe-token-dispatcher-type mine" in one and "facts.dispatcher" in one for one in told)
    assert any("--exp-avg-dtype int4" in one and "facts.first_moment_bytes" in one for one in told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[compile]\nenable = true\n", {"compiled": "layers+loss"}),
        ('[compile]\nenable = true\ncomponents = ["model"]\n', {"compiled": "layers"}),
        ("[compile]\nenable = false\n", {"compiled": "none"}),
        ("[optimizer]\nimplementation = 'fused_opt_states_bf16'\n", {"first_moment_bytes": 2, "compiled": "none"}),
        ("[parallelism]\nenable_async_tensor_parallel = true\n", {"overlaps_tensor": True}),
        ("[loss]\nnum_chunks = 8\n", {"loss_chunks": 8}),
    ],
)
def test_torchtitans_keys(text, told):
    """Keys of a TOML file say facts, and their absence torchtitan's defaults."""
    base = "[training]\nseq_len = 8192\nlocal_batch_size = 1\n"
    found = IMPORTERS["torchtitan"](base + text if "[parallelism]" in text else f"{base}[parallelism]\n{text}")

    assert told.items() <= dict(found.facts).items()


TITAN = "[training]\nseq_len = 8192\nlocal_batch_size = 1\n[parallelism]\n[model]\nconverters = ['float8']\n"
RECIPE = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe"
PRECISION = "python scripts/performance/setup_experiment.py -m llama3 -mr llama3_8b -ng 16 -g h100 --compute_dtype"
NEMO = "model: {config: {num_layers: 2}}\ntrainer: {devices: 8, plugins: {precision: bf16-mixed, fp8: hybrid"
BRIDGE = "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 64}\nmixed_precision:"


@pytest.mark.parametrize(
    ("framework", "text", "recipe"),
    [
        ("megatron", f"pretrain_gpt.py {SIZES} --fp8-format hybrid", "delayed"),
        ("megatron", f"pretrain_gpt.py {SIZES} --fp8-format hybrid --fp8-recipe tensorwise", "tensorwise"),
        ("megatron", f"pretrain_gpt.py {SIZES} --fp8-format e4m3 --fp8-recipe blockwise", "blockwise"),
        ("megatron", f"pretrain_gpt.py {SIZES} --fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("torchtitan", f"{TITAN}[float8]\nrecipe_name = 'tensorwise'\n", "tensorwise"),
        ("torchtitan", f"{TITAN}[quantize.linear.float8]\nrecipe_name = 'rowwise'\n", "blockwise"),
        (
            "torchtitan",
            "torchrun --nproc_per_node=8 -m torchtitan.train --training.seq_len 8192 --model.converters "
            "quantize.linear.float8 --quantize.linear.float8.recipe_name tensorwise",
            "tensorwise",
        ),
        # torchtitan docs/float8.md: "float8 with tensorwise scaling" is the command without a recipe's name
        ("torchtitan", TITAN, "tensorwise"),
        ("torchtitan", TITAN.replace("float8", "mx"), None),
        ("nemo", f"{NEMO}, fp8_recipe: tensorwise}}}}\n", "tensorwise"),
        ("nemo", f"{NEMO}}}}}\n", "delayed"),
        ("bridge", f"{BRIDGE} {{bf16: true, fp8: hybrid, fp8_recipe: delayed}}\n", "delayed"),
        # the default of its MixedPrecisionConfig
        ("bridge", f"{BRIDGE} {{bf16: true, fp8: hybrid}}\n", "tensorwise"),
        ("bridge", f"{BRIDGE} bf16_with_fp8_current_scaling_mixed\n", "tensorwise"),
        ("bridge", f"{BRIDGE} nanov2_bf16_with_fp8_current_scaling_mixed\n", "blockwise"),
        ("bridge", f"{BRIDGE} bf16_with_fp8_subchannel_scaling_mixed\n", "blockwise"),
        ("bridge", f"{BRIDGE} fp16_with_mxfp8_mixed\n", "mxfp8"),
        ("bridge", f"{BRIDGE} bf16_with_fp8_delayed_scaling_mixed\n", "delayed"),
        ("bridge", f"{RECIPE} llama3_8b_pretrain_8gpu_b200_fp8cs_config\n", "tensorwise"),
        ("bridge", f"{RECIPE} llama3_8b_pretrain_8gpu_b200_fp8mx_config\n", "mxfp8"),
        ("bridge", f"{PRECISION} fp8_cs\n", "tensorwise"),
        ("bridge", f"{PRECISION} fp8_sc\n", "blockwise"),
    ],
)
def test_the_scaling_of_fp8_is_a_fact(framework, text, recipe):
    """Flags, keys and names of mixed precisions and recipes say it, or the default of torchtitan."""
    found = IMPORTERS[framework](text)

    assert (found.job["precision"], found.facts.get("fp8_recipe")) == ("fp8", recipe)


def test_the_scaling_of_fp8_stands_in_the_study(tmp_path):
    """A script with current scaling in fp8 becomes a study that states it, and one in bf16 states nothing of it."""
    flags = f"{OVERLAPS} --moe-token-dispatcher-type alltoall --accumulate-allreduce-grads-in-fp32"
    narrow = f"{flags} --fp8-format hybrid --fp8-recipe"

    assert facts_of_study(tmp_path, script(tmp_path, f"{narrow} tensorwise"))[0] == {"fp8_recipe": "tensorwise"}
    assert facts_of_study(tmp_path, script(tmp_path, f"{narrow} delayed"))[0] == {}
    assert facts_of_study(tmp_path, script(tmp_path, f"{flags} --fp8-recipe tensorwise"))[0] == {}


def test_keys_of_other_frameworks():
    """Nanotron's and DeepSpeed's configurations say widths, overlaps and shares."""
    nanotron = IMPORTERS["nanotron"](
        "parallelism: {dp: 2, tp: 1, pp: 1}\ntokens: {sequence_length: 8, micro_batch_size: 1}\n"
        "optimizer: {accumulate_grad_in_fp32: false}\n"
    )
    deepspeed = IMPORTERS["deepspeed"](
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2, "overlap_comm": False, "offload_optimizer": {"ratio": 0.3}},
                "communication_data_type": "fp32",
            }
        )
    )

    assert nanotron.facts == {"gradient_bytes": 2}
    # of an optimizer that iterates; what the job has no use for is left out later
    gram = {"newton_schulz": "gram"}
    assert deepspeed.facts == {"overlaps_gradients": False, "gradient_message_bytes": 4, "offload_share": 0.3} | gram


def test_only_what_a_job_can_have_is_stated():
    """Facts of experts, of bf16 weights and of offloading need these."""
    told = {"dispatcher": "hybridep", "gradient_bytes": 2, "offload_share": 0.5, "loss_chunks": 4}
    megatron, dense = find_runtime("megatron-core"), find_model("llama3-8b")

    assert facts_beyond(told, megatron, {"precision": "fp16"}, dense) == {"loss_chunks": 4}
    job = {"precision": "fp8", "offload": "optimizer"}
    assert facts_beyond(told, megatron, job, find_model("mixtral-8x7b")).keys() == told.keys()


@pytest.mark.parametrize(
    ("target", "facts"),
    [
        (
            "megatron",
            {
                "dispatcher": "hybridep",
                "overlaps_experts": True,
                "overlaps_gradients": False,
                "overlaps_weight_gather": False,
                "gradient_bytes": 2,
                "gradient_message_bytes": 2,
                "first_moment_bytes": 2,
                "second_moment_bytes": 1,
                "main_weight_bytes": 2,
                "captured_graph": "attention+router",
                "attention": "unfused",
                "overlaps_tensor": True,
                "fused_accumulation": False,
                "fp8_recipe": "tensorwise",
            },
        ),
        ("torchtitan", {"compiled": "layers", "loss_chunks": 4, "first_moment_bytes": 2, "second_moment_bytes": 2}),
        ("nanotron", {"gradient_bytes": 2}),
        ("deepspeed", {"overlaps_gradients": False, "gradient_bytes": 2}),
    ],
)
def test_exports_write_what_importers_read(target, facts):
    """The facts of a study stand in the export of its framework, and are read there again."""
    model = find_model("llama3-8b" if target == "nanotron" else "mixtral-8x7b")
    job = TrainingJob(model=model, sequence_length=4096, global_batch_size=64, zero_stage=1)
    runtime = find_runtime({"megatron": "megatron-core", "deepspeed": "gpt-neox"}.get(target, target))
    setting = setting_for(job, find_cluster("dgx-h100"), with_facts(runtime, parse_facts(facts)))
    layout = {"nanotron": {"dp": 8}, "megatron": {"tp": 2, "sequence_parallel": True, "dp": 4, "ep": 4}}
    config = ParallelConfig(mbs=1, zero_stage=1, **layout.get(target, {"dp": 8, "ep": 8}))
    export = find_exporter(target)(setting, config)
    flags = " ".join(export.arguments)
    text = {
        "megatron": f"pretrain_gpt.py --num-experts 8 {flags}",
        "torchtitan": f"torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b {flags}",
    }.get(target, export.text)
    if target == "nanotron":
        text += "\nmodel: {dtype: bfloat16}\n"

    found = dict(IMPORTERS[target](text).facts)
    assert {name: found.get(name) for name in facts} == dict(parse_facts(facts))
    assert len(set(export.arguments)) >= len([one for one in export.arguments if one.startswith("--")])


def test_an_export_says_what_no_flag_can():
    """A fact without a word of the framework is a note, and a variable stands above the flags."""
    told = {"loss_chunks": 8, "expandable_segments": True}
    runtime = with_facts(find_runtime("megatron-core"), parse_facts(told))
    job = TrainingJob(model=find_model("llama3-8b"), sequence_length=4096, global_batch_size=64)
    export = find_exporter("megatron")(setting_for(job, find_cluster("dgx-h100"), runtime), ParallelConfig(dp=8, mbs=1))

    assert "loss_chunks: no flag says 8; check that your program does it" in export.notes
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in export.text.splitlines()
    assert shown(True) == "true"
