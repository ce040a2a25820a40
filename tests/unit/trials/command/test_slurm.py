import ast
import base64
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.programs.small_commands import backend_of
from trials.backend import Status
from trials.command.knob_files import TrialFile
from trials.command.slurm.batch_script import batch_script
from trials.command.slurm.job_program import end_of
from trials.command.slurm.jobs import SlurmJobs, check_options, job_plan, study_prefix
from trials.command.slurm.nodes import read_nodes, slurm_nodes
from trials.command.slurm.queue import JobState, QueueError, job_environment, read_state

ODD = ("a b", "$HOME", "it's", '"', "`id`", "*", "", "{{}}", "\\", "new\nline", "-- ;& |")

# as Slurm 22.05 prints it, shortened
LINE = (
    "JobId=2 JobName=j.sh UserId=root(0) Priority=4294901758 Nice=0 Account=(null) QOS=(null) JobState={state} "
    "Reason={reason} Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:04 "
    "TimeLimit={limit} TimeMin=N/A NumNodes=2 Command=/home/JobState=FAILED/j.sh WorkDir=/home Power="
)


def state(name, code="0:0", limit="1-00:30:00", reason="None"):
    """State that Slurm's line tells."""
    return read_state(LINE.format(state=name, code=code, limit=limit, reason=reason))


def test_the_state_of_a_job_is_read():
    """State, reason, restarts, exit code and limit come from one line, whatever paths the line holds."""
    assert state("PENDING", reason="Resources") == JobState(
        name="PENDING", reason="Resources", restarts=1, time_limit_s=88_200.0
    )
    assert state("FAILED", code="3:0").code == 3
    assert state("FAILED", code="0:9").code == -9
    assert state("RUNNING", limit="UNLIMITED").time_limit_s is None
    with pytest.raises(QueueError, match="no state"):
        read_state("")


@pytest.mark.parametrize(
    ("name", "code", "status", "part"),
    [
        ("OUT_OF_MEMORY", "0:125", Status.OUT_OF_MEMORY, "Slurm's state is OUT_OF_MEMORY"),
        ("TIMEOUT", "0:15", Status.TIMEOUT, "Slurm's time limit"),
        ("CANCELLED", "0:15", Status.INCIDENT, "was cancelled from outside"),
        ("PREEMPTED", "0:15", Status.INCIDENT, "was preempted"),
        ("NODE_FAIL", "0:0", Status.INCIDENT, "lost a node"),
        ("BOOT_FAIL", "0:0", Status.INCIDENT, "did not boot"),
        ("DEADLINE", "0:0", Status.INCIDENT, "met its deadline"),
        ("SOMETHING_NEW", "0:0", Status.INCIDENT, "Slurm's state is SOMETHING_NEW"),
        ("FAILED", "0:53", Status.CRASHED, "could not write to /shared"),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_an_end_of_slurm_is_an_outcome(name, code, status, part):
    """Only a lack of memory and a fault of the program speak against a candidate."""
    ended = end_of("7", state(name, code=code), Path("/shared/7.out"))

    assert ended.status is status
    assert part in ended.trouble
    assert (ended.time_limit_s is not None) == (status is Status.TIMEOUT)


@pytest.mark.parametrize(("code", "expected"), [("3:0", 3), ("137:0", -9), ("0:11", -11), ("0:0", 1)])
def test_a_failure_is_left_to_the_log(code, expected):
    """A script that failed has its exit status, or the signal that its shell states."""
    ended = end_of("7", state("FAILED", code=code), Path("/shared/7.out"))

    assert (ended.code, ended.trouble) == (expected, "")


@pytest.mark.parametrize(
    ("text", "is_passing"),
    [
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("Batch job submission failed: Socket timed out on send/recv operation", True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("Batch job submission failed: Invalid account or account/partition combination specified", False),
        ("Batch job submission failed: Job violates accounting/QOS policy", False),
    ],
    ids=lambda value: str(value).rpartition(": ")[2][:20],
)
def test_a_silent_controller_is_no_refusal(text, is_passing):
    """A controller that does not answer says nothing about a job; a refusal does."""
    assert QueueError(text).is_passing == is_passing


def test_words_reach_the_command_as_they_are(tmp_path):
    """Whatever an argument or a variable holds, the command of each host gets it, with what only the host knows. No
    value of a variable stands in the command line of srun.
    """
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/bash\nprintf %s "$*" > {tmp_path}/line\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n'
    )
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/bash\necho first\necho second\n")
    for program in (srun, scontrol):
        program.chmod(0o755)
    words = [word.replace("{{}}", "{}") for word in ODD]
    variables = {f"ODD_{number}": word for number, word in enumerate(ODD)} | {"AT": "{profile}", "KEY": "canary-9d1"}
    variables["COPY"] = "{env:HUB}"
    program = (
        "import os, sys; print(repr((sys.argv[1:], [value for name, value in sorted(os.environ.items()) "
        "if name.startswith('ODD')], os.environ['AT'], os.environ['KEY'], os.environ['COPY'], os.environ.get('GONE'))))"
    )
    ends = ("{tp}:{host_rank}:{master_address}:{master_port}", "{profile}", "--hub={env:HUB}")
    hub = 'canary-9d1 "$HOME" \''
    backend = backend_of(
        arguments=(sys.executable, "-c", program.replace("{", "{{").replace("}", "}}"), *ODD, *ends),
        environment=(*variables.items(), ("GONE", None)),
        variables=(("HUB", hub),),
        profile="traces/{trial}-{host_rank}/*",
        profile_root=Path("/a b"),
    )
    script = batch_script(
        backend.plan(ParallelConfig(tp=2), 3), step=("srun", "--nodes=2", "--mpi=none"), per_device=False
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "40007",
        "GONE": "1",
    }

    command = ["/bin/bash", "-s"]
    done = subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=True)

    arguments, values, at, key, copy, gone = ast.literal_eval(done.stdout)
    assert arguments == [*words, "2:1:first:25007", "/a b/traces/3-1", f"--hub={hub}"]
    assert values == [word for _, word in sorted(zip(variables, words, strict=False))]
    assert (at, key, copy, gone) == ("/a b/traces/3-1", "canary-9d1", hub, None)
    assert "canary-9d1" not in (tmp_path / "line").read_text()


def test_the_text_of_a_file_is_in_no_command_line():
    """The copy of a file reaches the host in a variable, so that its secrets stand in no process's arguments."""
    text = '{"wandb": {"api_key": "canary-9d1"}}'
    file = TrialFile(name="settings", file_name="a b.json", text=text)
    plan = backend_of(arguments=("cat", "{settings}"), files=(file,)).plan(ParallelConfig(dp=2), 0)
    head, _, launch = batch_script(plan, step=("srun",), per_device=False).partition("exec srun ")
    words = shlex.split(launch)
    command = shlex.join(words[words.index("bash") :])

    assert base64.b64encode(text.encode()).decode() not in command
    exports = "\n".join(line for line in head.splitlines() if "MESHTUNE_FILE_" in line)
    done = subprocess.run(["/bin/bash", "-c", f"{exports}\n{command}"], capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_a_job_has_the_options_of_the_study_and_its_own(tmp_path):
    """Hosts, names, the folder and the limit are the trial's; names tell studies of two storages apart."""
    jobs = SlurmJobs(
        study=study_prefix("my study", "a.db"), sbatch=("--qos=high",), outputs=tmp_path, time_limit_s=90.0
    )
    work = backend_of().plan(ParallelConfig(dp=2), 7)
    plan = job_plan(jobs, work, num_hosts=4, devices_per_host=8)

    assert plan.options[0] == "--qos=high"
    assert {"--nodes=4", "--time=4", f"--job-name={jobs.study}0007"} <= set(plan.options)
    assert jobs.study.startswith("meshtune-my-study-")
    assert jobs.study != study_prefix("my study", "b.db")
    endless = job_plan(
        replace(jobs, time_limit_s=None), backend_of().plan(ParallelConfig(dp=2), 7), num_hosts=4, devices_per_host=8
    )
    assert not any(option.startswith("--time") for option in endless.options)


@pytest.mark.parametrize(
    ("program", "word", "nearest"),
    [
        ("sbatch", "--nodes=4", "cluster.hosts"),
        ("sbatch", "-N4", "cluster.hosts"),
        ("sbatch", "-t", "trial.time_limit"),
        ("sbatch", "--output=a.log", "leave --output out"),
        ("srun", "--ntasks-per-node=8", "leave --ntasks-per-node out"),
    ],
)
def test_options_that_a_trial_sets_are_refused(program, word, nearest):
    """An option that a trial sets itself is refused with its place and what to write instead."""
    with pytest.raises(ConfigError) as refused:
        check_options(("--mem=0", word), program=program)

    assert (refused.value.key, refused.value.value) == ("1", word)
    assert nearest in refused.value.nearest


def test_a_job_does_not_inherit_its_worker():
    """What Ray and an outer job say of a worker is no news to the job; where the cluster is stays."""
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "a"}

    given = kept | {"RAY_JOB_ID": "1", "SLURM_JOB_ID": "2", "SLURM_MEM_PER_NODE": "3", "OMP_NUM_THREADS": "1"}
    assert job_environment(given) == kept
    assert job_environment({"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    "names",
    ["-oProxyCommand=x", "--help", "$(touch x)", "a;b", "a b", "a\nb", "", "/etc/passwd", "\u2603", "a" * 200_000],
)
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_list_of_nodes_is_no_option(names, by, monkeypatch):
    """A text that is no list of nodes never reaches scontrol, which takes what begins with a dash for an option."""
    asked = []
    monkeypatch.setattr("trials.command.slurm.nodes.ask_slurm", lambda command: asked.append(command) or "")
    if by == "option":
        with pytest.raises(QueueError, match="is no list of nodes"):
            slurm_nodes(names)
    elif len(names) < 100_000:
        monkeypatch.setenv("SLURM_JOB_NODELIST", names)
        with pytest.raises(QueueError, match="is no list of nodes" if names else "printed no node"):
            slurm_nodes()

    assert asked in ([], [["scontrol", "show", "node", "--oneliner"]])


def test_nodes_have_names_and_numbers_that_can_be_read():
    """A node without a name is none, and a number of cores that is no number, or has thousands of digits, is 0."""
    nodes = (("", "1"), ("a", "\u00b2"), ("b", "9" * 5_000))
    told = "".join(f"NodeName={name} CPUTot={cpus} State=IDLE\n" for name, cpus in nodes)

    assert [(node.name, node.cpus) for node in read_nodes(told)] == [("a", 0), ("b", 0)]
