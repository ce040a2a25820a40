"""Operators of a trial whose command leaves a trace of torch.profiler."""

import gzip
import json
import os
import sys
import time
from pathlib import Path

import pytest

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.layer_operators import step_operators
from tests.support.programs.small_commands import JOB, backend_of
from trials.backend import Observation, Status
from trials.command.backend import COMMAND_RANKS
from trials.command.kineto import UnreadableTraceError, build_trace, read_trace
from trials.command.placeholders import without_wildcards
from trials.command.trace_program import add_traces, newest_trace
from trials.command.trace_samples import find_samples
from trials.rank_backend import OpenBackend
from trials.ranks.contract import RanksLostError
from trials.ranks.processes import RankProcesses

PROGRAM = Path(__file__).resolve().parents[2] / "support" / "programs" / "profiled_program.py"
NODE = "autograd::engine::evaluate_function: "
MATMUL, NORM, ATTENTION = OpKind.MATMUL, OpKind.NORM, OpKind.ATTENTION
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def operation(name, begin_us, took_us, dims=None, *, tid=1, sequence=None, identity=None):
    """An event of the host, in the form of Kineto's."""
    told = {"Input Dims": dims, "Sequence number": sequence, "External id": identity}
    arguments = {key: value for key, value in told.items() if value is not None}
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": begin_us,
        "dur": took_us,
        "args": arguments,
    }


def launched(correlation, begin_us, *, tid=1):
    """The call that launches a kernel."""
    arguments = {"External id": correlation, "cbid": 211, "correlation": correlation}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": tid, "args": arguments}
    return call | {"ts": begin_us, "dur": 1}


def kernel(correlation, took_us, *, category="kernel", **arguments):
    """What ran on the device, long after its launch."""
    arguments = {"device": 0, "stream": 7, "correlation": correlation} | arguments
    event = {"ph": "X", "cat": category, "name": "sm90_gemm", "pid": 0, "tid": 7, "args": arguments}
    return event | {"ts": 5000 + correlation, "dur": took_us}


GPU_STEP = [
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#7",
        "pid": 9,
        "tid": 1,
        "ts": 0,
        "dur": 1000,
        "args": {},
    },
    operation("aten::linear", 10, 20, [[2, 32, 64], [256, 64], []], sequence=5),
    operation("aten::mm", 12, 10, [[64, 64], [64, 256]], sequence=5),
    launched(1, 13),
    kernel(1, 300),
    launched(2, 15),
    kernel(2, 7, category="gpu_memset"),
    operation("aten::_scaled_dot_product_flash_attention", 40, 10, [[2, 4, 32, 16], [2, 2, 32, 16], [2, 2, 32, 16]]),
    launched(3, 42),
    kernel(3, 90),
    operation("aten::bmm", 60, 10, [[8, 32, 16], [8, 16, 32]]),
    launched(4, 61),
    kernel(4, 11),
    operation("aten::mm", 80, 5, [[4, 4]], sequence=6),
    launched(5, 81),
    kernel(5, 100),
    operation("aten::_fused_rms_norm", 90, 5, [[2, 32, 64], [], [64], []], identity=77),
    kernel(6, 13, **{"External id": 77}),
    # the engine's thread: the gradients of the product, and a product that is computed again
    operation(f"{NODE}MmBackward0", 100, 90, tid=2, sequence=5),
    operation("MmBackward0", 101, 88, [[64, 256]], tid=2, sequence=5),
    operation("aten::mm", 110, 10, [[256, 64], [64, 64]], tid=2),
    launched(11, 111, tid=2),
    kernel(11, 310),
    operation("aten::mm", 130, 10, [[64, 256], [256, 64]], tid=2),
    launched(12, 131, tid=2),
    kernel(12, 320),
    operation(f"{NODE}CheckpointFunctionBackward", 300, 90, tid=2, sequence=3),
    operation("CheckpointFunctionBackward", 301, 88, [], tid=2, sequence=3),
    operation("aten::addmm", 310, 10, [[256], [64, 64], [64, 256]], tid=2, sequence=0),
    launched(13, 311, tid=2),
    kernel(13, 321),
    operation("Optimizer.step#Muon.step", 500, 50, tid=1),
    operation("aten::mm", 510, 5, [[64, 64], [64, 64]], tid=1),
    launched(14, 511),
    kernel(14, 29),
]


def test_a_trace_of_a_gpu_tells_the_time_of_kernels():
    """An operator's time is that of what it launched on the device, whenever that ran; gradients are told apart and
    written as the cost model has them; what is recomputed is forward; what the optimizer multiplies is left out.
    """
    trace = build_trace(GPU_STEP)
    found = find_samples(trace)

    assert trace.has_kernels
    assert {(one.kind, one.phase, one.shape): (round(1e6 * one.time_s), one.count) for one in found.samples} == {
        (MATMUL, FORWARD, (64, 64, 256)): ((307 + 321) // 2, 2),
        (MATMUL, FORWARD, (256, 16, 32)): (11, 1),
        (ATTENTION, FORWARD, (2, 4, 32, 32, 16)): (90, 1),
        (NORM, FORWARD, (64, 64)): (13, 1),
        (MATMUL, BACKWARD, (64, 64, 256)): (310, 1),
        (MATMUL, BACKWARD, (64, 256, 64)): (320, 1),
    }
    assert found.num_left_out == 1  # the product whose right side the trace does not tell
    assert found.share == pytest.approx((307 + 321 + 11 + 90 + 13 + 310 + 320) / 1501)


def test_counts_are_those_of_one_step():
    """Of a trace of two steps half of the executions count."""
    later = [event | {"ts": event["ts"] + 1e6} for event in GPU_STEP]
    for event in later:
        event["args"] = event["args"] | {"correlation": event["args"].get("correlation", 0) + 100}
    (norms,) = [one for one in find_samples(build_trace(GPU_STEP + later)).samples if one.kind is NORM]

    assert build_trace(GPU_STEP + later).num_steps == 2
    assert norms.count == 1


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_trial_keeps_the_operators_of_its_trace(tmp_path, packed):
    """A program that profiles a step of its warm-up gives its operators with shapes and times, and step times that the
    profiler is not in.
    """
    pytest.importorskip("torch")
    command = (sys.executable, str(PROGRAM), "{profile}", "{total_steps}", *(["--packed"] if packed else []))
    backend = backend_of(
        arguments=command, warmup_steps=4, steps=3, hang_limit_s=120.0, profile="traces/{trial}", profile_root=tmp_path
    )
    config = ParallelConfig(dp=2, mbs=2)
    found = backend.measure(config, trial_number=7)

    assert found.status is Status.OK, found.log_tail
    assert len(found.step_times_s) == 3
    assert {(one.kind, one.phase, one.shape): one.count for one in found.operator_samples} == {
        (NORM, FORWARD, (256, 128)): 1,
        (NORM, BACKWARD, (256, 128)): 1,
        (ATTENTION, FORWARD, (2, 8, 128, 128, 16)): 1,
        (ATTENTION, BACKWARD, (2, 8, 128, 128, 16)): 1,
        (MATMUL, FORWARD, (256, 128, 384)): 1,
        (MATMUL, FORWARD, (256, 128, 512)): 2,  # computed again
        (MATMUL, FORWARD, (256, 512, 128)): 1,  # not again: nothing needs its result
        (MATMUL, BACKWARD, (256, 384, 128)): 1,
        (MATMUL, BACKWARD, (128, 256, 384)): 1,
        (MATMUL, BACKWARD, (256, 512, 128)): 1,
        (MATMUL, BACKWARD, (128, 256, 512)): 1,
        (MATMUL, BACKWARD, (256, 128, 512)): 1,
        (MATMUL, BACKWARD, (512, 256, 128)): 1,
    }
    grid = ConfigGrid.from_configs([config])
    predicted = {
        (operator.kind, operator.phase, tuple(operator.shape[0].tolist()))
        for operator in step_operators(JOB, find_runtime("torch-reference"), grid)
        if operator.name.startswith(
            ("attention.norm", "attention.qkv", "attention.core", "dense_mlp.up", "dense_mlp.down")
        )
    }
    assert predicted == {(one.kind, one.phase, one.shape) for one in found.operator_samples}
    assert all(one.time_s > 0 for one in found.operator_samples)
    assert ".pt.trace.json" in found.reason
    assert "13 operators" in found.reason


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, "no trace at traces/3: let the program write one in the 2 steps of its warm-up"),
        ("{", "is not JSON, or is incomplete"),
        ("{}", "has no traceEvents"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "that torch.profiler does not write"),
        ('{"traceEvents": []}', "no operator in it can be mapped"),
    ],
    ids=["none", "cut", "empty", "other", "nothing"],
)
def test_a_trace_that_tells_nothing_fails_no_trial(tmp_path, ranks, content, note):
    """Step times stay what they are, and the reason says what is the matter with the trace."""
    if content is not None:
        (tmp_path / "traces" / "3").mkdir(parents=True)
        (tmp_path / "traces" / "3" / "a.json").write_text(content, encoding="utf-8")
    backend = backend_of(profile="traces/{trial}", profile_root=tmp_path)
    opened = OpenBackend(backend=backend, ranks=ranks)
    found = opened.measure(ParallelConfig(dp=2, mbs=1), trial_number=3)

    assert found.status is Status.OK
    assert len(found.step_times_s) == 3
    assert found.operator_samples == ()
    assert note in found.reason


@pytest.fixture(scope="module")
def ranks():
    """What starts commands."""
    with RankProcesses(COMMAND_RANKS) as running:
        yield running


def test_a_server_that_is_lost_over_a_trace_blames_no_candidate(tmp_path):
    """A trial ends well though the server of ranks dies while its trace is read, and the next trial there has lost its
    worker, which is retried, and not crashed.
    """
    plan = backend_of("", profile="trace", profile_root=tmp_path).plan(ParallelConfig(), 0)
    with RankProcesses(COMMAND_RANKS) as ranks:
        ranks._server.kill()
        measured = Observation(status=Status.OK, step_times_s=(1.0,))
        observation = add_traces(measured, ranks, plan, num_hosts=1, begun_s=0.0)
        with pytest.raises(RanksLostError):
            ranks.launch("trials.command.host_program:run_host", plan, num_ranks=1)

    assert observation.status is Status.OK
    assert observation.reason.startswith("trace: the server of ranks has died")


def test_the_newest_trace_is_taken(tmp_path):
    """In a folder and below it, or where a pattern says; what is older than the trial is another's."""
    now_s = time.time()
    for age_s, name in enumerate(("iteration_10/rank0_trace.json", "b.pt.trace.json.gz", "notes.txt", "old.json")):
        path = tmp_path / "traces" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}", encoding="utf-8")
        os.utime(path, (now_s, now_s - (3600 if name == "old.json" else age_s)))

    def found(where, begun_s=now_s - 10):
        newest = newest_trace(tmp_path, where, begun_s=begun_s)
        return newest and newest.relative_to(tmp_path / "traces").as_posix()

    assert found("traces") == "iteration_10/rank0_trace.json"
    assert found("traces/*.gz") == "b.pt.trace.json.gz"
    assert found("traces/**/rank?_trace.json") == "iteration_10/rank0_trace.json"
    assert found(str(tmp_path / "traces")) == "iteration_10/rank0_trace.json"
    assert found("traces/old.json") is None
    assert found("traces/old.json", begun_s=now_s - 3600) == "old.json"


@pytest.mark.parametrize(
    ("path", "folder"),
    [("a/7", "a/7"), ("a/7/**/*.json", "a/7"), ("/a/b*/c", "/a"), ("*.json", ""), ("a/t.json.gz", "a/t.json.gz")],
)
def test_a_pattern_has_a_folder(path, folder):
    """What `{profile}` stands for is what comes before the first wildcard."""
    assert without_wildcards(path) == folder


def test_a_packed_trace_that_was_cut_says_so(tmp_path):
    """A file whose end is missing is no reason for a traceback."""
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": GPU_STEP}).encode())[:200])

    with pytest.raises(UnreadableTraceError, match="is damaged"):
        read_trace(path)
