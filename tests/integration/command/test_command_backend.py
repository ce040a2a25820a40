import os
import pickle
import signal
import socket
import sys
import threading
import time

import pytest

from benchmarks.support.process_table import parent_of
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.programs.backend_contract import BackendContract
from tests.support.programs.small_commands import backend_of
from trials.backend import Status
from trials.command.backend import COMMAND_RANKS
from trials.command.training_folder import TrainingFolder
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses

ONE = ParallelConfig(dp=2, mbs=1)
TWO = ParallelConfig(tp=2, mbs=2)


def all_gone(path):
    """Whether none of the processes whose numbers stand in a file is alive."""
    for line in path.read_text(encoding="ascii").split():
        try:
            os.kill(int(line), 0)
        except ProcessLookupError:
            continue
        return False
    return True


@pytest.fixture(scope="module")
def ranks():
    """What starts commands, once for all tests that don't look at its start."""
    with RankProcesses(COMMAND_RANKS) as running:
        yield running


@pytest.fixture
def measured(ranks):
    """Measures a trial of a backend."""

    def measure(backend, config=ONE):
        return OpenBackend(backend=backend, ranks=ranks).measure(config, trial_number=0)

    return measure


class TestCommandBackend(BackendContract):
    @pytest.fixture
    def backend(self, ranks):
        """The program that prints steps."""
        return OpenBackend(backend=backend_of(), ranks=ranks)

    @pytest.fixture
    def grid(self):
        """Two configurations."""
        return ConfigGrid.from_configs([ONE, TWO])


def test_times_are_those_of_the_log(measured):
    """Warm-up is dropped, and a step takes what the log says, to the digit, with the configuration's degrees in it."""
    found = measured(backend_of("well", "--step-ms=40"), TWO)

    assert found.status is Status.OK
    assert found.step_times_s == (0.024, 0.024, 0.024)
    assert found.peak_memory_bytes == 2 * 2**30
    assert found.clock == "wall"


def test_the_master_port_is_free_for_the_command(measured):
    """A launcher can listen where the other hosts are told to find it, in one trial after the other."""
    backend = backend_of("well", "--listen-at={master_address}:{master_port}")

    assert [measured(backend).reason for _ in range(2)] == ["", ""]


def test_a_port_that_is_taken_is_no_fault_of_the_candidate(measured):
    """A command that cannot listen, because somebody else was first, is an incident, which is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        found = measured(backend_of("well", f"--listen-at=127.0.0.1:{first.getsockname()[1]}"))

    assert found.status is Status.INCIDENT
    assert found.reason.startswith("found its port taken")


def test_a_command_that_goes_on_is_ended(measured, tmp_path):
    """With enough steps measured, a command that would train forever is ended, and nothing of it is left."""
    pids = tmp_path / "pids"
    found = measured(backend_of("forever", f"--pids={pids}"))

    assert found.status is Status.OK
    assert all_gone(pids)


def test_a_command_inside_of_a_training_must_end_by_itself(measured, tmp_path):
    """One that would train forever is measured and ended, and the reason says why its steps do not count."""
    pids, folder = tmp_path / "pids", TrainingFolder(study="mine", folder=tmp_path / "checkpoints")
    found = measured(backend_of("forever", f"--pids={pids}", training=folder))

    assert found.status is Status.OK
    assert len(found.step_times_s) == 3
    assert "do not count: the command did not end with status 0; does it end after step {last_step}?" in found.reason
    assert (folder.progress().step, folder.progress().trials) == (0, ())
    assert all_gone(pids)


def test_what_a_command_leaves_behind_is_ended(measured, tmp_path):
    """A child in a session of its own, which outlives its parent, has gone before the trial is over."""
    pids = tmp_path / "pids"
    found = measured(backend_of("child", f"--pids={pids}"))

    assert found.status is Status.OK
    assert len(pids.read_text(encoding="ascii").split()) == 2
    assert all_gone(pids)


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("memory", Status.OUT_OF_MEMORY, "CUDA out of memory"),
        ("fault", Status.CRASHED, "ValueError: hidden size must be divisible by 3"),
        ("status", Status.CRASHED, "exit status 255"),
        ("killed", Status.INCIDENT, "was killed by SIGKILL"),
    ],
)
def test_a_failure_is_told_from_others(measured, mode, status, reason):
    """A lack of memory, a program's own fault, a plain status and a kill from outside are told apart, with reasons."""
    found = measured(backend_of(mode))

    assert found.status is status
    assert reason in found.reason
    assert found.killed_by == ("SIGKILL" if mode == "killed" else "")
    assert "building GPT model" in found.log_tail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "killed_by"),
    [
        ("raise ValueError('no such layout')", Status.CRASHED, ""),
        ("os.kill(os.getpid(), 9)", Status.INCIDENT, "SIGKILL"),
    ],
)
def test_the_process_that_failed_first_says_why(measured, tmp_path, end, status, killed_by):
    """Torchrun ends all other processes by a signal, which is no reason; that of the first failure is."""
    pytest.importorskip("torch", reason="torchrun is torch's")
    program = tmp_path / "fails.py"
    text = f"import os, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    program.write_text(text, encoding="utf-8")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={master_port}")

    found = measured(backend_of(arguments=(*torchrun, str(program))))

    assert (found.status, found.killed_by) == (status, killed_by)
    assert "Root Cause" in found.log_tail


def test_silence_is_a_hang(measured, tmp_path):
    """A command that prints nothing for the limit is ended as an incident, which says nothing of the candidate."""
    pids = tmp_path / "pids"
    found = measured(backend_of("silent", f"--pids={pids}", hang_limit_s=1.0))

    assert found.status is Status.INCIDENT
    assert found.reason == "hangs: printed nothing for 1 s"
    assert all_gone(pids)


@pytest.mark.parametrize(
    ("changes", "steps", "reason"),
    [
        ({"steps": 50}, 48, "ended after 50 of the 52 expected log lines"),
        ({"warmup_steps": 60}, 0, "all of them warm-up"),
    ],
)
def test_a_log_that_is_too_short_says_so(measured, changes, steps, reason):
    """A command that ends by itself too early gives what it measured, or says why that is nothing."""
    found = measured(backend_of("well", "--train-iters=50", "--step-ms=1", **changes))

    assert len(found.step_times_s) == steps
    assert found.status is (Status.OK if steps else Status.CRASHED)
    assert reason in found.reason


def test_a_program_that_is_not_there_is_a_crash(measured):
    """Where the program is missing on a host, the trial says so."""
    found = measured(backend_of(arguments=("no-such-program",)))

    assert found.status is Status.CRASHED
    assert "no-such-program" in found.reason


def test_a_missing_program_is_refused_before_the_first_trial():
    """The check names the program."""
    backend = backend_of(arguments=("no-such-program",))

    with pytest.raises(ConfigError, match=r"trial.command.0 = 'no-such-program'"):
        backend.check()


def test_the_whole_log_is_kept(measured, tmp_path):
    """A folder for logs gets one for each trial and host."""
    measured(backend_of(logs=tmp_path / "logs"))

    log = (tmp_path / "logs" / "trial-0000-host-0.log").read_text(encoding="utf-8")
    assert log.startswith("> building GPT model")
    assert log.count("elapsed time per iteration") == 5


def test_a_full_disk_costs_the_log_alone(measured, tmp_path):
    """A trial whose log finds no room is measured all the same, and says so among what it printed."""
    (tmp_path / "trial-0000-host-0.log").symlink_to("/dev/full")

    found = measured(backend_of(logs=tmp_path))

    assert (found.status, len(found.step_times_s)) == (Status.OK, 3)
    assert "the log is kept no further: No space left on device" in found.log_tail


def test_nothing_is_left_when_the_worker_is_killed(tmp_path):
    """A worker that is killed takes the command with it, and what that has started."""
    pids = tmp_path / "pids"
    backend = backend_of("forever", f"--pids={pids}", warmup_steps=1000)
    process = os.fork()
    if not process:
        backend.measure(ONE, trial_number=0)
        os._exit(0)
    while not pids.exists() or not pids.read_text(encoding="ascii"):
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)

    deadline_s = time.monotonic() + 20
    while not all_gone(pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert all_gone(pids)


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    """If the process that ends a command's processes is killed itself, they end too, and the trial is an incident."""
    pids = tmp_path / "pids"
    backend = backend_of("forever", f"--pids={pids}", warmup_steps=1000)
    found = []
    with RankProcesses(backend.rank_setup) as ranks:
        trial = threading.Thread(
            target=lambda: found.append(OpenBackend(backend=backend, ranks=ranks).measure(ONE, trial_number=0))
        )
        trial.start()
        while not pids.exists() or not pids.read_text(encoding="ascii"):
            time.sleep(0.05)
        command = int(pids.read_text(encoding="ascii").split()[0])
        os.kill(parent_of(command), signal.SIGKILL)
        trial.join(60)

        assert found[0].status is Status.INCIDENT
        assert all_gone(pids)


def test_kept_logs_are_found_again(tmp_path):
    """A folder tells which logs are whose, hosts in the order of their ranks, and nothing of files that are no logs."""
    backend = backend_of(logs=tmp_path)
    for name in (
        "trial-0003-host-10.log",
        "trial-0003-host-2.log",
        "trial-12345-host-0.log",
        "trial-0004.log",
        "notes",
    ):
        (tmp_path / name).touch()
    (tmp_path / "trial-0005-host-0.log").mkdir()

    found = {number: [path.name for path in paths] for number, paths in backend.kept_logs().items()}

    assert found == {3: ["trial-0003-host-2.log", "trial-0003-host-10.log"], 12345: ["trial-12345-host-0.log"]}
    assert backend_of().kept_logs() == backend_of(logs=tmp_path / "none").kept_logs() == {}


def test_a_backend_pickles():
    """It reaches its workers as it is."""
    assert pickle.loads(pickle.dumps(backend_of())) == backend_of()  # noqa: S301 # our own bytes
