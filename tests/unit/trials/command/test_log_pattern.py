"""Lines as the frameworks print them; the sources stand beside `LOG_PATTERNS`."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from trials.command.log_pattern import GROUPS, LOG_PATTERNS, LogPattern, Reading, StepSize, Totals, find_pattern

STEP = StepSize(samples=64, tokens=64 * 4096, devices=8)

LINES = {
    "nanotron": (
        "[default0]:01/17/2024 14:02:16 [INFO|DP=0|PP=0|TP=0]: iteration: 991 / 1000 | consumed_tokens: 634K | "
        "elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 2.35K | cuda_max_memory_reserved: 570M | lm_loss: 6.7",
        Reading(step_time_s=11.5, iteration=991, memory_bytes=570_000_000, loss=6.7),
    ),
    "nemo, its progress bar": (
        "Epoch 0: :  47%|####     | 7/15 [06:19<07:13, reduced_train_loss=11.50, global_step=5.000, "
        "consumed_samples=12288.0, train_step_timing in s=49.50]",
        Reading(step_time_s=49.5, iteration=5, loss=11.5),
    ),
    "megatron": (
        " [2025-03-04 02:58:29] iteration       12/     100 | consumed samples:         3072 | elapsed time per "
        "iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 1.500000E-05 |",
        Reading(step_time_s=1.2345, iteration=12),
    ),
    "megatron, with its running mean": (
        " iteration       12/     100 | consumed samples:  3072 | elapsed time per iteration (ms): 1234.5/1301.2 |",
        Reading(step_time_s=1.2345, iteration=12),
    ),
    "megatron, memory": (
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 10000.5 | max allocated: 20000.0 | reserved: 22000.0 | "
        "max reserved: 24576.0",
        Reading(memory_bytes=24 * 2**30),
    ),
    "mindspeed": (
        " [2024-11-20 14:55:23] iteration        5/    2000 | consumed samples:           40 | elapsed time per "
        "iteration (ms): 2500.0 | learning rate: 1.250E-06 | global batch size:     8 | lm loss: 1.1E+01 |",
        Reading(step_time_s=2.5, iteration=5, loss=11.0),
    ),
    "bridge": (
        " [2026-08-20 10:00:00] iteration        5/      50 | consumed samples:  40 | elapsed time per iteration (ms): "
        "1250.0 | learning rate: 1.25E-06 |",
        Reading(step_time_s=1.25, iteration=5),
    ),
    "maxtext": (
        "completed step: 7, seconds: 2.125, TFLOP/s/device: 310.000, Tokens/s/device: 9000.000, total_weights: 65536, "
        "loss: 10.100",
        Reading(step_time_s=2.125, iteration=7, loss=10.1),
    ),
    "swift": (
        "{'loss': 1.25, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'iteration': '4/100', 'elapsed_time': '10s', "
        "'remaining_time': '4m 0s', 'memory(GiB)': 40.5, 'train_speed(s/it)': 2.5}",
        Reading(total_s=10.0, iteration=4, memory_bytes=round(40.5 * 2**30), loss=1.25),
    ),
    "verl": (
        "(TaskRunner pid=1) step:3 - actor/entropy:0.4 - perf/max_memory_reserved_gb:60.5 - timing_s/gen:20.0 - "
        "timing_s/update_actor:8.5 - timing_s/step:40.0",
        Reading(step_time_s=8.5, iteration=3, memory_bytes=round(60.5 * 2**30)),
    ),
    "torchtitan": (
        "[rank0]:[titan] 2025-05-05 10:00:00,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.9000  "
        "\x1b[38;5;208mgrad_norm:  1.2000  \x1b[36mmemory: 40.50GiB(51.20%)  \x1b[34mtps: 8,192  "
        "\x1b[35mtflops: 420.00  mfu: 42.47%\x1b[39m",
        Reading(step_time_s=4.0, iteration=10, memory_bytes=round(40.5 * 2**30), loss=7.9),
    ),
    "deepspeed": (
        "[2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step=199/global_step=199, "
        "RunningAvgSamplesPerSec=58.730622229657506, CurrSamplesPerSec=32.0, MemAllocated=6.01GB, "
        "MaxMemAllocated=19.5GB",
        Reading(step_time_s=2.0, iteration=199, memory_bytes=round(19.5 * 2**30)),
    ),
    "nemo": (
        "Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | global_step: 49 | "
        "peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced_train_loss: 11.96 | "
        "train_step_timing in s: 12.39 | consumed_samples: 6400",
        Reading(step_time_s=12.39, iteration=49, memory_bytes=70833405952, loss=11.96),
    ),
}


@pytest.mark.parametrize("which", LINES)
def test_a_frameworks_line_is_read(which):
    """A line as the framework prints it gives its step time, number and memory, in seconds and bytes."""
    line, expected = LINES[which]
    reading = find_pattern(which.partition(",")[0]).reading(line, STEP)

    assert reading is not None
    assert reading.iteration == expected.iteration
    assert reading.memory_bytes == expected.memory_bytes
    assert reading.loss == expected.loss
    assert reading.step_time_s == (expected.step_time_s and pytest.approx(expected.step_time_s))


def test_a_loss_that_is_no_number_hides_no_step():
    """A training that has diverged is measured all the same."""
    line = LINES["torchtitan"][0].replace("7.9000", "nan")
    reading = find_pattern("torchtitan").reading(line, STEP)

    assert reading is not None
    assert (reading.step_time_s, reading.loss) == (pytest.approx(4.0), None)


@pytest.mark.parametrize(
    ("group", "number", "step_time_s"),
    [
        ("step_s", "2.5", 2.5),
        ("step_ms", "2,500.0", 2.5),
        ("step_us", "2.5e6", 2.5),
        ("steps_per_s", "0.4", 2.5),
        ("samples_per_s", "25.6", 2.5),
        ("tokens_per_s", "104857.6", 2.5),
        ("tokens_per_s_per_device", "13107.2", 2.5),
    ],
)
def test_a_users_pattern_says_its_unit(group, number, step_time_s):
    """Times in every unit and rates of every kind give the same step time."""
    reading = LogPattern(expressions=(rf"took (?P<{group}>\S+)",)).reading(f"step 3 took {number}", STEP)

    assert reading is not None
    assert reading.step_time_s == pytest.approx(step_time_s)


@pytest.mark.parametrize(
    ("expressions", "message"),
    [
        (("took (?P<step_ms>",), "is not a regular expression"),
        ((r"took (?P<step_msec>\d+)",), "did you mean 'step_ms'?"),
        ((r"(?P<memory_gib>\d+)",), "has no group for the time of a step"),
        ((r"took \d+",), "has no group for the time of a step"),
    ],
)
def test_a_pattern_that_reads_nothing_is_refused(expressions, message):
    """What is no expression, has an unknown group or no time is the user's mistake."""
    with pytest.raises(ConfigError) as caught:
        LogPattern(expressions=expressions)

    assert message in str(caught.value)


def test_an_unknown_log_names_the_nearest():
    """A name nearly right is told."""
    with pytest.raises(ConfigError, match="did you mean 'megatron'"):
        find_pattern("megatorn")


@given(line=st.text(max_size=80), name=st.sampled_from(sorted(LOG_PATTERNS)))
def test_no_line_breaks_the_reading(line, name):
    """Whatever a program prints, a reading is positive and finite, or there is none."""
    reading = find_pattern(name).reading(line, STEP)

    assert reading is None or reading.step_time_s is None or reading.step_time_s > 0


@given(number=st.text(max_size=20), group=st.sampled_from(GROUPS))
def test_no_number_breaks_the_reading(number, group):
    """What stands where a number belongs may be anything."""
    time = () if group.startswith(("step", "sample", "token")) else ("time=(?P<step_s>.*)",)
    reading = LogPattern(expressions=(f"value=(?P<{group}>.*)", *time)).reading(f"value={number}", STEP)

    assert reading is None or reading.memory_bytes or reading.loss is not None or (reading.step_time_s or 0) > 0


def test_a_mean_of_all_steps_gives_the_time_of_each():
    """Lines with the mean so far say the time between them: 3 s for the first, then 1 s for each of two."""
    pattern, totals = LOG_PATTERNS["swift"], Totals()
    lines = [
        f"'iteration': '{step}/9', 'memory(GiB)': 1, 'train_speed(s/it)': {mean}" for step, mean in ((1, 3), (3, 5 / 3))
    ]

    found = [totals.of_step(pattern.reading(line, STEP)) for line in lines]

    assert [round(one.step_time_s, 6) for one in found] == [3.0, 1.0]


def test_a_line_of_several_steps():
    """A line that covers four steps gives the time of one."""
    pattern = replace(LOG_PATTERNS["verl"], steps_per_line=4)

    assert pattern.reading("step:1 - timing_s/update_actor:8.0", STEP).step_time_s == 2.0
