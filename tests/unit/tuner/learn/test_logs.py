"""Rows of logs: real excerpts, the printed form of each framework, and logs that contradict themselves."""

import json

import pytest
import yaml

from costmodels.calibration.measured_runs import read_measured
from costmodels.calibration.sources import setting_of, source_of
from tests.support.studies.training_logs import LOG, PUBLIC, TORCHTITAN_H200, dense_log
from tuner.learn.learning import gather
from tuner.learn.pool import add_rows
from tuner.study_file.answers import Added


def gathered(tmp_path, text, **said):
    """What a log of that text gives."""
    file = tmp_path / "train.log"
    file.write_text(text, encoding="utf-8")
    return gather([file], Added(**said), source=None, models="runs-models")


def runs_of(tmp_path, found):
    """The rows as the reader of measured runs sees them in a pool's file."""
    assert not found.refused
    add_rows(tmp_path / "runs.csv", found.rows)
    return read_measured(["runs.csv"], {}, tmp_path)


def of_file(tmp_path, name, **said):
    """The runs of a public log."""
    return runs_of(tmp_path, gather([PUBLIC / name], Added(**said), source="public", models="runs-models"))


def test_a_public_log_of_megatron_lm(tmp_path):
    """GPT-2 345M on four A800, as its arguments say; the median of 11 steps after two, and what Rank 0 reserved."""
    (run,) = of_file(tmp_path, "megatron-lm-gpt2.log", cluster="A800")

    assert (run.model.num_layers, run.model.hidden_size, run.model.vocab_size) == (24, 1024, 50304)
    assert (run.model.tied_embeddings, run.model.norm, run.model.plain.learned_positions) == (True, "layer", 1024)
    assert (run.sequence_length, run.global_batch_size, run.precision) == (1024, 8, "fp16")
    assert (run.config.dp, run.config.tp, run.config.pp, run.config.mbs) == (4, 1, 1, 1)
    assert (run.devices, run.device, source_of(run).runtime) == (4, "A800-SXM-80", "megatron-lm-2021")
    assert run.step_time_s == pytest.approx(0.2909)
    assert run.peak_memory_bytes == pytest.approx(8786 * 2**20, rel=1e-5)
    assert not setting_of(run, {}).setting.runtime.fused_attention


def test_a_public_log_of_megatron_deepspeed(tmp_path):
    """LLaMA 1.3B on eight A800: its engine's ZeRO and precision hold, and its samples per second agree."""
    (run,) = of_file(tmp_path, "megatron-deepspeed-llama.log", cluster="A800")

    assert (run.model.num_layers, run.model.hidden_size, run.model.gated_ffn) == (24, 2048, True)
    assert (run.config.tp, run.config.pp, run.config.dp, run.config.mbs, run.config.zero_stage) == (2, 2, 2, 4, 0)
    assert (run.precision, source_of(run).runtime) == ("fp16", "megatron-deepspeed")
    assert run.step_time_s == pytest.approx(1.20835)
    assert run.peak_memory_bytes is None
    assert not setting_of(run, {}).setting.runtime.fused_attention


def test_torchtitan_names_its_device(tmp_path):
    """The log says H200 and tokens per second; what it does not say is told, and nobody has to name a cluster."""
    found = gathered(tmp_path, TORCHTITAN_H200)
    (run,) = runs_of(tmp_path, found)

    assert (run.device, run.config.dp, run.config.zero_stage, run.config.recompute) == ("H200-SXM", 8, 3, "selective")
    assert run.step_time_s == pytest.approx(8192 / 7064.5, rel=1e-5)
    assert run.peak_memory_bytes == pytest.approx(49.59 * 2**30, rel=1e-5)
    ((told,),) = found.unsure.values()
    assert told.startswith("print_config: is off, so that the log does not say precision")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("local batch size 1, global batch size 8", "local batch size 2, global batch size 16"), "0.5 times as far"),
        (("sequence length 8192", "sequence length 4096"), "2 times as far apart"),
    ],
)
def test_a_clock_that_disagrees_refuses_a_log(tmp_path, changed, words):
    """Where a log has rates alone, a wrong batch or sequence length shows in the times of its lines."""
    found = gathered(tmp_path, TORCHTITAN_H200.replace(*changed))

    assert not found.rows
    assert words in found.refused[0].reason


def test_another_cluster_than_the_log_names_is_refused(tmp_path):
    """A log's own device comes first."""
    found = gathered(tmp_path, TORCHTITAN_H200, cluster="H100")

    assert not found.rows
    assert "names H200-SXM, and the cluster has H100-SXM-80" in found.refused[0].reason


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ((" | lm loss", " | samples per second: 10.0 | lm loss"), "its samples/s are 0.156 times"),
        (("--------- arguments", "--------- no arguments"), "begins after the configuration was printed"),
        (("  world_size ", "  no_world_size "), "no world_size"),
        (
            (
                "tensor_model_parallel_size ...................... 1",
                "tensor_model_parallel_size ...................... 3",
            ),
            "must be a multiple of",
        ),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(tmp_path, changed, words):
    """Rates beside step times, and the samples that a log counts, must be those of the batch."""
    found = gathered(tmp_path, dense_log(4096, 1, 1, 1, 1.0).replace(*changed), cluster="H100")

    assert not found.rows
    assert words in found.refused[0].reason


@pytest.mark.parametrize(
    ("step_s", "memory_mb", "words"),
    [
        (0.1, 20480.0, "its steps are 7.1 times as fast as H100-SXM-80 can be"),
        (1.0, 102400.0, "its peak is 100.0 GiB, and H100-SXM-80 has 79.1"),
    ],
)
def test_what_no_device_can_do_is_refused(tmp_path, step_s, memory_mb, words):
    """The user named another device than that of the log, or the log is of something else."""
    memory = f"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max reserved: {memory_mb}\n"
    found = gathered(tmp_path, dense_log(4096, 1, 1, 1, step_s) + memory, cluster="H100")

    assert not found.rows
    assert words in found.refused[0].reason


def test_counted_samples_of_another_batch_are_refused(tmp_path):
    """A log whose samples grow by 32 a step did not run a batch of 64."""
    text = dense_log(4096, 1, 1, 1, 1.0)
    for step in range(1, 8):
        text = text.replace(f"{64 * step:12d}", f"{32 * step:12d}")

    assert (
        "grow by 32 a step, and its arguments say a batch of 64"
        in gathered(tmp_path, text, cluster="H100").refused[0].reason
    )


def test_a_log_without_a_device_asks_for_the_cluster(tmp_path):
    """Megatron-LM does not say on what it runs, and nothing is guessed."""
    found = gathered(tmp_path, LOG)

    assert not found.rows
    assert "--cluster WHICH" in found.refused[0].reason


def test_several_starts_in_one_log_are_several_runs(tmp_path):
    """The second start is read from behind the steps of the first."""
    text = dense_log(4096, 1, 1, 1, 1.5) + "killed\n" + dense_log(4096, 2, 2, 1, 2.5)
    found = gathered(tmp_path, text, cluster="H100")
    runs = runs_of(tmp_path, found)

    assert [(run.config.tp, run.config.pp, run.step_time_s) for run in runs] == [(1, 1, 1.5), (2, 2, 2.5)]
    assert "behind line" in found.rows[1].cells["source_url_or_repo_path"]


def test_a_run_that_lacked_memory_is_a_failed_row(tmp_path):
    """It has a configuration and no step, and says why; without the reason it is refused."""
    text = dense_log(4096, 1, 1, 8, 1.0, steps=0)
    found = gathered(tmp_path, text, cluster="H100")
    assert "no line of a step" in found.refused[0].reason

    lacks = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\n"
    )
    (run,) = runs_of(tmp_path, gathered(tmp_path, text + lacks, cluster="H100"))
    assert (run.is_failed, run.step_time_s, run.config.mbs) == (True, None, 8)
    assert run.notes.startswith("FAILED: out of memory")


def test_memory_of_one_stage_is_left_out(tmp_path):
    """With two stages the memory of Rank 0 alone is not that of the fullest; that of both is."""
    memory = "[Rank {}] (after 2 iterations) memory (MB) | allocated: 1.0 | max reserved: {}\n"
    text = dense_log(4096, 1, 2, 1, 1.0)
    (one,) = runs_of(tmp_path, gathered(tmp_path, text + memory.format(0, 20480.0), cluster="H100"))
    (tmp_path / "runs.csv").unlink()
    both = text + memory.format(0, 20480.0) + memory.format(4, 30720.0)
    (two,) = runs_of(tmp_path, gathered(tmp_path, both, cluster="H100"))

    assert (one.peak_memory_bytes, two.peak_memory_bytes) == (None, 30 * 2**30)


def test_a_log_says_its_facts(tmp_path):
    """Overlap that was not switched on, gradients in bf16 and a local kernel become facts of the row."""
    said = "  grad_reduce_in_bf16 .............................. True\n"
    said += "  transformer_impl ................................ local\n"
    text = dense_log(4096, 1, 1, 1, 1.0)
    text = text.replace("  transformer_impl ................................ transformer_engine\n", said)
    (run,) = runs_of(tmp_path, gathered(tmp_path, text, cluster="H100"))
    told = dict(run.stated.facts)

    assert (told["overlaps_gradients"], told["gradient_message_bytes"], told["fused_attention"]) == (False, 2, False)


NEMO = {
    "trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16"},
    "model": {
        "mcore_gpt": True,
        "micro_batch_size": 1,
        "global_batch_size": 128,
        "sequence_parallel": True,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 1,
        "encoder_seq_length": 4096,
        "max_position_embeddings": 4096,
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "normalization": "rmsnorm",
        "activation": "fast-swiglu",
        "bias": False,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "optim": {"name": "distributed_fused_adam", "lr": 1e-4},
    },
}


def nemo_log(tokens_per_s):
    """Return a log of NeMo, whose progress printer states tokens per second and device too."""
    place = "[NeMo I 2024-05-07 13:26:13 megatron_gpt_pretraining:{}] "
    head = f"{place.format(34)}\n\n************** Experiment configuration ***********\n{place.format(35)}\n"
    text = head + yaml.safe_dump(NEMO, sort_keys=False) + f"{place.format(1)}GPU available: True\n"
    text += f"{place.format(2)}Padded vocab_size: 32768, original vocab_size: 32000, dummy tokens: 768.\n"
    return text + "".join(
        f"Training epoch 0, iteration {step}/99 | lr: 1e-06 | global_batch_size: 128 | global_step: {step} | "
        f"peak_memory_usage: 42949672960 | reduced_train_loss: {11 - step / 10} | train_step_timing in s: 8.000 | "
        f"tokens_per_sec_per_gpu: {tokens_per_s}\n"
        for step in range(6)
    )


def test_a_log_of_nemo(tmp_path):
    """Two hosts of eight; 128 sequences of 4,096 tokens in 8 s are 4,096 tokens/s of each device, as it says."""
    (run,) = runs_of(tmp_path, gathered(tmp_path, nemo_log(4096), cluster="H100"))

    assert (run.devices, run.config.tp, run.config.dp, run.step_time_s) == (16, 4, 4, 8.0)
    assert (run.peak_memory_bytes, run.stated.memory) == (40 * 2**30, "allocated")
    assert "its tokens/s per device are 2 times" in gathered(tmp_path, nemo_log(8192), cluster="H100").refused[0].reason


def test_a_log_of_deepspeed_needs_a_model(tmp_path):
    """Its engine states batch, ZeRO and ranks; model and sequence length are the user's to say."""
    place = "[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print] "
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    batches = {"gradient_accumulation_steps": 8, "train_batch_size": 256, "world_size": 8}
    lines = [f"{place}DeepSpeedEngine configuration:"]
    lines += [f"{place}  {name} {'.' * (29 - len(name))} {value}" for name, value in batches.items()]
    lines += [f"{place}  json = {json.dumps(config, indent=4)}"]
    lines += [
        f"[2024-09-15 00:1{step}:00,398] [INFO] [timer.py:197:stop] epoch=0/micro_step={8 * step}/global_step={step}, "
        "RunningAvgSamplesPerSec=4.2, CurrSamplesPerSec=4.2666, MemAllocated=10.0GB, MaxMemAllocated=40.0GB"
        for step in range(1, 7)
    ]
    text = "\n".join([*lines, ""])

    assert "--model NAME" in gathered(tmp_path, text, cluster="H100").refused[0].reason
    said = {"cluster": "H100", "model": "llama3-8b", "answers": {"sequence_length": 4096, "recompute": "none"}}
    (run,) = runs_of(tmp_path, gathered(tmp_path, text, **said))
    assert (run.config.dp, run.config.zero_stage, run.global_batch_size) == (8, 2, 256)
    assert run.step_time_s == pytest.approx(60, rel=1e-3)
    assert (run.peak_memory_bytes, run.stated.memory) == (40 * 2**30, "allocated")


def test_answers_fill_gaps_and_replace_nothing(tmp_path):
    """The logs of a sweep differ in what they state; an answer that a log states itself does not count for it."""
    found = gathered(tmp_path, dense_log(4096, 2, 1, 1, 1.0), cluster="H100", answers={"tp": 4, "precision": "fp16"})
    (run,) = runs_of(tmp_path, found)

    assert (run.config.tp, run.precision) == (2, "bf16")
