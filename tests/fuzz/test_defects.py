"""Inputs that were once answered by a traceback, or by nothing for minutes; each is the smallest that did."""

import json
import sys
from dataclasses import replace

import pytest

from costmodels.job.parallel_config import ParallelConfig
from tests.fuzz.launch_files import EXPORTED
from tests.fuzz.target import LONGEST_MESSAGE
from tests.fuzz.targets import TARGETS
from tests.support.programs.small_commands import backend_of
from tests.support.studies.broken_studies import rows, study
from trials.backend import Status
from trials.command.log_pattern import LogPattern
from trials.command.patience import at_most


def told(name, data, folder):
    """What a target says of an input; empty if it accepts it."""
    try:
        TARGETS[name].read(data, folder)
    except TARGETS[name].refusals as error:
        return str(error)
    return ""


def exported(**config):
    """An exported configuration with other degrees."""
    return json.dumps(EXPORTED | {"config": EXPORTED["config"] | config}).encode()


def traced(*events):
    """A trace of a few operations on one thread."""
    common = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 1, "args": {}}
    return json.dumps({"traceEvents": [common | event for event in events]}).encode()


def log_study(pattern):
    """A study whose command has a log of its own."""
    return study(trial=f"{{backend: command, command: [x], log: {{pattern: ['{pattern}']}}}}").encode()


REFUSED = {
    "a truth that is none": ("yaml", b"a: !!bool maybe", "neither true nor false"),
    "a batch whose divisors take hours": (
        "study",
        study(job="{sequence_length: 1, global_batch_size: 1000000000000000000}").encode(),
        "job.global_batch_size = 1000000000000000000: must be a whole number from 1 to 2147483647",
    ),
    "stages by the billion": (
        "study",
        study(current="{pp: 999999999, vpp: 999999999}").encode(),
        "cannot be launched: pp*tp*dp*cp*up must be the 8 devices of the cluster",
    ),
    "degrees beyond an array's integers": (
        "study",
        study(current="{pp: 99999999, tp: 99999999, dp: 99999999}").encode(),
        "current.pp*tp*dp*cp*up: makes 999999970000000299999999 devices",
    ),
    "layers by the billion": ("model", b"num_layers: 1000000000", "is required and missing"),
    "an expression too deep": ("study", log_study("(" * 2000 + ")" * 2000), "is not a regular expression"),
    "an expression that repeats too often": (
        "study",
        log_study("a{" + "9" * 5000 + "}"),
        "is not a regular expression",
    ),
    "a database with a NUL": ("study", study(history='["sqlite:///a\\0b"]').encode(), "history.0"),
    "an axis of a raised two": ("mesh", "a=²".encode(), "must be axes with sizes"),
    "ep of nothing": ("measured", rows({"ep": 0}).encode(), "ep = 0: must be a whole number of at least 1"),
    "a degree beyond 64 bits": ("init: json", exported(cp=10**30), "config.cp"),
    "an expert degree beyond 64 bits": ("init: json", exported(ep=10**300), "config.ep"),
    "a key of kilobytes": ("override", b"search." + b"x" * 5000 + b"=1", "unknown key"),
    "a key of kilobytes in a graph": ("graph", b'{"problem": {"%s": 1}}' % (b"x" * 5000), "is not known"),
    "a trace too deep to read": ("profile of a step", b"[" * 100_000, "nested too deep"),
    "operations too deep": (
        "profile of a step",
        traced(*({"ts": at, "dur": 2000 - 2 * at} for at in range(900))),
        "nested deeper than 250 levels",
    ),
    "an operation without end": (
        "profile of a step",
        traced({"dur": 1e400}),
        "event that torch.profiler does not write",
    ),
    "an operation of 10**400 us": (
        "profile of a step",
        traced({"dur": 10**400}),
        "event that torch.profiler does not write",
    ),
    "a journal of another program": (
        "journal",
        b'{"op_code": 2, "rows": [{}], "study_id": -1, "user_attr": {}}\n',
        "none of a journal",
    ),
    "a journal too deep": ("journal", b"[" * 100_000 + b"\n", "is no entry of a journal"),
}

ACCEPTED = {
    "numbers of notes that no size has": (
        "measured",
        rows({}, {"notes": "kv_lora=" + "9" * 5000}, {"notes": "ETP=" + "9" * 5000}).encode(),
    ),
    "memory without end": ("log", b"MaxMemAllocated=20.1e+300GB\n"),
    "a signal of 5,000 digits": ("log", b"exitcode : -" + b"9" * 5000 + b"\n"),
    "a batched product of four dims": (
        "profile of a step",
        traced({"name": "aten::bmm", "args": {"Input Dims": [[2, 3, 4, 5], [2, 4, 5]]}}),
    ),
    "a dim beyond a float": ("profile of a step", traced({"args": {"Input Dims": [[10**400, 4], [4, 8]]}})),
    "a row of no time": ("history", json.dumps({"meshtune_runs": {"recorded_at": 5, "log_spread": "x"}}).encode()),
    "a shape that is none": ("history", json.dumps({"meshtune_operator_samples": {"shape": "x"}}).encode()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(name, tmp_path):
    """The message names what is wrong, and is short."""
    target, data, words = REFUSED[name]
    with at_most(30):
        message = told(target, data, tmp_path)

    assert words in message
    assert len(message) <= LONGEST_MESSAGE


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_read_as_far_as_it_makes_sense(name, tmp_path):
    """What one part of it holds does no harm to the rest."""
    target, data = ACCEPTED[name]
    with at_most(30):
        assert told(target, data, tmp_path) == ""


@pytest.mark.parametrize("line", ["x " * 400_000, "Error " * 150_000, "step: 1 loss: t memory:1GiB " * 360])
def test_a_long_line_of_a_log_takes_no_hours(line, tmp_path):
    """What is looked for in a log of one line is found, or not, in seconds."""
    with at_most(60):
        assert told("log", line.encode(), tmp_path) == ""


@pytest.mark.parametrize("unit", ["x ", "$A ", "${A:-", "A=$A$A\n", "A+=x\n"])
def test_a_long_launch_script_takes_no_minutes(unit, tmp_path):
    """Many words behind a flag, and defaults within defaults, are read in time that grows as they do."""
    script = "torchrun pretrain_gpt.py --num-layers 4 " + unit * (20_000 // len(unit))

    with at_most(60):
        assert "does not say everything that a study needs" in told("init: megatron", script.encode(), tmp_path)


def test_an_expression_that_never_ends_is_the_trials_reason():
    """A user's expression that tries every way to cut a line ends the trial, which says so and shows the line."""
    backend = replace(
        backend_of(arguments=(sys.executable, "-c", "import time; print('a' * 60 + '!', flush=True); time.sleep(60)")),
        pattern=LogPattern(expressions=(r"^(?P<step_ms>(a+)+)$",)),
    )

    found = backend.measure(ParallelConfig(dp=2), trial_number=0)

    assert found.status is Status.CRASHED
    assert found.reason.startswith("trial.log.pattern takes more than 2 s for one line: 'aaaa")
