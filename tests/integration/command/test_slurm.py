"""Trials as jobs of a real Slurm cluster, which is this machine."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.process_table import below
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from hardware.cluster_file import read_described_cluster
from hardware.io.errors import ConfigError
from tests.support.own_slurm import own_slurm
from tests.support.programs.backend_contract import BackendContract
from tests.support.programs.small_commands import backend_of
from trials.backend import Status
from trials.command.knob_files import TrialFile
from trials.command.log_pattern import LogPattern
from trials.command.slurm.jobs import SlurmJobs, job_plan
from trials.knobs.knob import Knob
from trials.knobs.places import Place
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses

ONE = ParallelConfig(dp=2, mbs=4)
GONE_LIMIT_S = 10.0
"""Time in which a job whose trial is over must have left the queue [s]; Slurm kills it after two."""


@pytest.fixture(scope="module")
def slurm():
    """The cluster, which Slurm's programs of this process find."""
    with own_slurm(num_nodes=2) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


@pytest.fixture
def jobs_of(slurm, tmp_path):
    """Builds a backend of jobs, whose names begin with `meshtune-test-`."""
    yield lambda mode="well", *arguments, sbatch=(), **changes: backend_of(
        mode,
        *arguments,
        slurm=SlurmJobs(study="meshtune-test-", outputs=tmp_path / "shared", sbatch=("--exclusive", *sbatch)),
        **changes,
    )
    assert gone(slurm), slurm.queue()


def gone(slurm):
    """Wait until the queue is empty; return whether it is."""
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while slurm.queue() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not slurm.queue()


class Running:
    """Trial that runs in a thread, whose job the test disturbs."""

    def __init__(self, slurm, backend):
        self.slurm = slurm
        self.steps = threading.Event()
        self.started_s = None
        self.found = None
        self.thread = threading.Thread(target=self._measure, args=(backend,))
        self.thread.start()

    def _measure(self, backend):
        with RankProcesses(backend.rank_setup) as ranks:
            self.found = OpenBackend(backend=backend, ranks=ranks).measure(
                ONE, trial_number=3, on_step=lambda _: self.steps.set(), on_start=self._start
            )

    def _start(self):
        self.started_s = time.monotonic()

    def job(self):
        """Number of the trial's job, once it has measured a step."""
        assert self.steps.wait(30)
        ((number, name, _),) = self.slurm.queue()
        assert name == "meshtune-test-0003"
        return number

    def end(self):
        """Observation of the trial."""
        self.thread.join(60)
        return self.found


class TestSlurmJobs(BackendContract):
    """A command that runs as a job of Slurm keeps the contract of backends."""

    @pytest.fixture
    def backend(self, jobs_of):
        """A program that prints its steps at once."""
        return jobs_of()

    @pytest.fixture
    def grid(self):
        """Two configurations."""
        return ConfigGrid.from_configs([ParallelConfig(dp=2, mbs=1), ParallelConfig(tp=2, mbs=4)], ())


@pytest.mark.parametrize("tasks", ["per_device", "once"])
def test_a_job_starts_the_command_as_the_study_says(jobs_of, tmp_path, tasks):
    """Once for each device, with the variables that torch.distributed reads, or once in all, with none of them."""
    script = (
        'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" > "$0/at-$SLURMD_NODENAME-$LOCAL_RANK"; '
        '[ "0$RANK" -eq 0 ] || exit 0; echo "iteration 1/ 9 | elapsed time per iteration (ms): 5.0 |"'
    )
    two = read_described_cluster({"name": "cpu-host", "hosts": 2, "devices_per_host": 2}, tmp_path).cluster
    backend = jobs_of(arguments=("bash", "-c", script, str(tmp_path)), cluster=two, warmup_steps=0, steps=1)
    sbatch = (*backend.slurm.sbatch, "--ntasks-per-node=2")
    backend = replace(backend, slurm=replace(backend.slurm, tasks=tasks, sbatch=sbatch))

    found = backend.measure(ParallelConfig(dp=4), trial_number=0)

    told = {path.name: path.read_text().split() for path in tmp_path.glob("at-*")}
    assert found.status is Status.OK, found.log_tail
    if tasks == "once":
        assert list(told.values()) == [[":"]]
        return
    assert sorted(words[:3] for words in told.values()) == [[str(rank), str(rank % 2), "4"] for rank in range(4)]
    assert len({words[3] for words in told.values()}) == 1


def test_a_job_starts_the_command_on_every_host(jobs_of, tmp_path):
    """Each host is told its rank, all of them one address and port, and no output is left in the shared folder."""
    script = 'echo "$0 $1 $2" > "$3/$SLURMD_NODENAME"; [ $0 = 0 ] || exit 0; echo "step (ms): 5.0 it\'s"; echo "{}"'
    two = read_described_cluster({"name": "cpu-host", "hosts": 2, "devices_per_host": 2}, tmp_path).cluster
    command = ("bash", "-c", script, "{host_rank}", "{master_address}", "{master_port}", str(tmp_path))
    backend = jobs_of(arguments=command, cluster=two, environment=(("EMPTY", ""), ("HOME", None)), warmup_steps=0)

    found = backend.measure(ParallelConfig(dp=4), trial_number=0)

    told = [(tmp_path / f"node{number}").read_text().split() for number in range(2)]
    assert [words[0] for words in told] == ["0", "1"]
    assert told[0][1:] == told[1][1:] == ["node0", told[0][2]]
    assert "step (ms): 5.0 it's" in found.log_tail
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["scancel"], "cancelled from outside"),
        (["scontrol", "requeue"], "put back into Slurm's queue"),
        (["scontrol", "suspend"], "was suspended"),
    ],
    ids=["cancelled", "requeued", "suspended"],
)
def test_a_job_that_others_disturb_is_an_incident(slurm, jobs_of, command, reason):
    """A job that is cancelled, put back into the queue or suspended says nothing about its candidate."""
    trial = Running(slurm, jobs_of("forever", steps=1000))
    slurm.ask(*command, trial.job())

    found = trial.end()

    assert found.status is Status.INCIDENT
    assert reason in found.reason


def test_a_lost_node_is_an_incident(slurm, jobs_of):
    """A job whose node goes down says nothing about its candidate."""
    trial = Running(slurm, jobs_of("forever", steps=1000, sbatch=("--nodelist=node1", "--no-requeue")))
    trial.job()
    slurm.ask("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=test")  # it registers again at once

    found = trial.end()

    assert found.status is Status.INCIDENT
    assert "lost a node" in found.reason


def test_slurms_time_limit_is_a_timeout(slurm, jobs_of):
    """A job that Slurm cuts off has its steps, its limit, and the status of a trial that took too long."""
    trial = Running(slurm, jobs_of("forever", steps=10_000, sbatch=("--time=1",)))
    slurm.ask("scontrol", "update", f"JobId={trial.job()}", "EndTime=now+2")

    found = trial.end()

    assert found.status is Status.TIMEOUT
    assert found.time_limit_s == 60
    assert found.step_times_s


def test_waiting_in_the_queue_is_no_hang(slurm, jobs_of):
    """A trial whose hosts are busy waits for longer than its hang limit, and its time begins with its job."""
    blocker = slurm.submit("--nodes=2", "--exclusive", "--wrap=sleep 60")
    trial = Running(slurm, jobs_of(hang_limit_s=1.5))
    while len(slurm.queue()) < 2 and trial.thread.is_alive():
        time.sleep(0.1)
    queued_at_s = time.monotonic()
    time.sleep(4.0)
    assert trial.started_s is None
    slurm.ask("scancel", blocker)

    found = trial.end()

    assert found.status is Status.OK
    assert trial.started_s - queued_at_s > 4.0
    assert dict(found.conditions)["queued_s"] > 3.5


def test_a_refused_job_says_why(jobs_of):
    """A partition that does not exist is no failure of the configuration; sbatch's words and options are shown."""
    found = jobs_of(sbatch=("--partition=nowhere",)).measure(ONE, trial_number=0)

    assert found.status is Status.INCIDENT
    assert "[sbatch --exclusive --partition=nowhere --job-name=meshtune-test-0000 --nodes=" in found.log_tail
    assert found.reason.startswith("sbatch refused the job: ")
    assert "invalid partition specified: nowhere" in found.reason


def test_options_are_checked_before_the_first_job(slurm, jobs_of):
    """What sbatch refuses is a mistake of the user's, and what it takes is none, though hosts are drained now."""
    jobs_of().check()
    with pytest.raises(
        ConfigError, match="is refused by sbatch before any trial: invalid partition specified: nowhere"
    ):
        jobs_of(sbatch=("--partition=nowhere",)).check()

    for node in slurm.nodes:
        slurm.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        jobs_of().check()
    finally:
        for node in slurm.nodes:
            slurm.ask("scontrol", "update", f"nodename={node}", "state=resume")
    assert not slurm.queue()


@pytest.mark.parametrize(
    ("mode", "status"), [("memory", Status.OUT_OF_MEMORY), ("killed", Status.INCIDENT), ("fault", Status.CRASHED)]
)
def test_a_failing_command_fails_as_elsewhere(jobs_of, mode, status):
    """A command that runs out of memory, is killed, or fails has the same status in a job as outside of one."""
    assert jobs_of(mode).measure(ONE, trial_number=0).status is status


@contextmanager
def followed_job(backend):
    """Submit a job and follow it; the rank processes that do so."""
    with RankProcesses(backend.rank_setup) as ranks:
        plan = job_plan(backend.slurm, backend.plan(ONE, 0), num_hosts=1, devices_per_host=1)
        ranks.launch("trials.command.slurm.job_program:run_job", plan, num_ranks=1)
        yield ranks


def test_a_job_ends_with_its_follower(slurm, jobs_of):
    """Whoever kills the processes that follow a job cancels it."""
    with followed_job(jobs_of("forever", steps=1000)) as ranks:
        ranks.events(10)
        os.kill(ranks._server.pid, signal.SIGKILL)

        assert gone(slurm)


def test_a_job_ends_if_the_process_that_submits_it_is_killed(slurm, jobs_of, tmp_path, monkeypatch):
    """If the process that submits a job is killed before it has told the job's number, the job is cancelled, and its
    trial is an incident.
    """
    program = shutil.which("sbatch")
    killing = tmp_path / "sbatch"
    killing.write_text(f'#!/bin/sh\n{program} "$@"\nkill -9 $PPID\n', encoding="utf-8")
    killing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    found = jobs_of("forever", steps=1000).measure(ONE, trial_number=0)

    assert found.status is Status.INCIDENT
    assert "the process that submits the job was killed" in found.reason
    assert gone(slurm), slurm.queue()


def test_a_killed_keeper_of_a_job_is_replaced(slurm, jobs_of):
    """A job whose keeper was killed is cancelled at the end of its follower by another one."""
    with followed_job(jobs_of("forever", steps=1000)) as ranks:
        server = ranks._server.pid
        first = keeper_below(slurm, server)
        os.kill(first, signal.SIGKILL)
        second = keeper_below(slurm, server, but=first)
        os.kill(second, signal.SIGKILL)
        keeper_below(slurm, server, but=second)
        os.kill(server, signal.SIGKILL)

        assert gone(slurm)


def keeper_below(slurm, server, but=None):
    """Wait for the keeper of a job in the queue, another one than `but`; its process number."""
    deadline_s = time.monotonic() + 60
    while True:
        others = [pid for pid in below(server) if pid not in (server, but)]
        keepers = [pid for pid in others if session_of(pid) == pid]  # the follower is in its server's session
        if keepers and slurm.queue():
            return keepers[0]
        assert time.monotonic() < deadline_s, "no process keeps the job"
        time.sleep(0.1)


def session_of(pid):
    """The session of a process; None once it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_without_slurm_no_study_starts(jobs_of, monkeypatch):
    """A machine without sbatch is named before anything starts."""
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ConfigError, match="sbatch, scontrol, squeue, scancel on the PATH"):
        jobs_of().check()


def test_knobs_reach_the_hosts_of_a_job(jobs_of, tmp_path):
    """Flags, a variable and a copy of a file with values of knobs reach the command; the copy ends with the job."""
    seen = tmp_path / "seen.txt"
    script = (
        f'cat "$1" > {seen}; echo "$SETTINGS" >> {seen}; shift; echo "$@" "$ALGORITHM" >> {seen}; '
        'echo "step 1 took 5 ms"; echo "step 2 took 5 ms"; sleep 60'
    )
    knobs = (
        Knob(name="size", values=(1, 7), today=1, place=Place(flag="--size")),
        Knob(name="algorithm", values=(None, "Ring"), today=None, place=Place(environment="ALGORITHM")),
        Knob(name="stage", values=(1, 2), today=1, place=Place(file="settings", key="zero.stage")),
    )
    backend = jobs_of(
        arguments=("bash", "-c", script, "bash", "{settings}", "{knobs}"),
        environment=(("SETTINGS", "{settings}"),),
        knobs=knobs,
        files=(TrialFile(name="settings", file_name="ds config.json", text='{"zero": {"stage": 1}}'),),
        warmup_steps=1,
        steps=1,
    )
    backend = replace(
        backend, pattern=LogPattern(expressions=(r"step (?P<iteration>\d+) took (?P<step_ms>[\d.]+) ms",))
    )
    config = replace(ONE, knobs=(("size", 7), ("algorithm", "Ring"), ("stage", 2)))
    with RankProcesses(backend.rank_setup) as ranks:
        found = OpenBackend(backend=backend, ranks=ranks).measure(config, trial_number=3)

    assert found.status is Status.OK, found.reason
    *file, path, words = seen.read_text(encoding="utf-8").splitlines()
    assert json.loads("".join(file)) == {"zero": {"stage": 2}}
    assert words == "--size 7 Ring"
    assert path.endswith("/settings/ds config.json")
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while Path(path).exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not Path(path).exists()
