import pytest

from tests.support.studies.launch_scripts import ARRAYS
from trials.command.slurm.jobs import SET_BY_TRIALS
from tuner.imports import IMPORTERS
from tuner.imports.bash.texts import Argument
from tuner.imports.slurm_launch import slurm_options


def options(header, srun=""):
    """Options of a job by the words of its header and of its srun."""
    return slurm_options(header.split(), [Argument(text=word, line=1) for word in srun.split()])


@pytest.mark.parametrize(
    ("header", "sbatch"),
    [
        ("-p gpu -A lab --qos high -N 4", ("--partition=gpu", "--account=lab", "--qos=high")),
        ("--exclusive --gres=gpu:a100:8 --gpus-per-node 8", ("--exclusive", "--gres=gpu:a100:8")),
        ("--ntasks-per-node=8 --cpus-per-task=12", ("--cpus-per-task=96",)),
        ("-N 2 -n 16 -c 4 --gpus-per-task=1", ("--cpus-per-task=32", "--gpus-per-node=8")),
        ("--wckey=w --segment 4 --nodelist a[1-2] --nice", ("--wckey=w", "--segment=4", "--nodelist=a[1-2]", "--nice")),
        ("-J x -o %j.out --mail-type=ALL --array=1-4 --requeue --dependency=singleton", ()),
    ],
    ids=["letters", "devices said twice", "one task", "one task of all", "others", "left out"],
)
def test_a_header_becomes_the_options_of_a_trial(header, sbatch):
    """What chooses hosts is kept, in its long form, for one task on each; what a trial sets or must not do is not."""
    assert options(header).sbatch == sbatch


@pytest.mark.parametrize("name", SET_BY_TRIALS)
def test_no_option_is_written_that_a_study_refuses(name):
    """An option that a trial sets itself is left out of what `init` writes, in its long form and by its letter."""
    letter = SET_BY_TRIALS[name]

    assert options(f"{name}=1 --qos=q {letter}{'1' if letter else ''}").sbatch == ("--qos=q",)


@pytest.mark.parametrize(
    ("text", "expected"), [("2-00:00:00", "2-00:00:00"), ("30", "30:00"), ("1:30:00", "1:30:00"), ("UNLIMITED", "")]
)
def test_the_time_of_a_header_is_a_time_limit(text, expected):
    """Slurm's bare number of minutes is written so that a study does not take it for seconds."""
    assert options(f"--time={text}").time_limit == expected


def test_the_options_of_srun_are_kept():
    """Options of srun that change what runs on a host are kept, bindings too; counts and labels are the trial's."""
    found = options("-p gpu", "srun -l -N 2 --ntasks-per-node 8 --container-image a.sqsh --mpi=pmix --cpu-bind=no")

    assert found.srun == ("--container-image=a.sqsh", "--mpi=pmix", "--cpu-bind=no")
    assert found.sbatch == ("--partition=gpu",)
    assert [name for name, _, _ in found.changes] == ["--label"]


def test_an_srun_without_a_job_names_its_hosts():
    """Where there is no header, srun's own options choose the hosts."""
    assert options("", "srun -p gpu --gres gpu:8 -N 2 -t 10").sbatch == ("--partition=gpu", "--gres=gpu:8")


def test_a_script_without_slurm_is_none():
    """Neither a header nor srun: no job."""
    assert options("", "numactl --interleave=all") is None
    assert IMPORTERS["megatron"](ARRAYS).command.slurm is None


@pytest.mark.parametrize("quote", ["", '"'], ids=["plain", "in a shell"])
def test_a_script_of_slurm_is_a_job(quote):
    """Slurm's options are found around the launcher, also if a shell stands between both."""
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --micro-batch-size 1"
    srun = "srun --label --container-name=a" + (" bash -c " if quote else " ")
    script = f"#!/bin/bash\n#SBATCH --partition=gpu\n{srun}{quote}torchrun --nnodes 2 pretrain_gpt.py {flags}{quote}\n"

    command = IMPORTERS["megatron"](script).command

    assert (command.slurm.sbatch, command.slurm.srun) == (("--partition=gpu",), ("--container-name=a",))


def test_srun_starts_a_process_for_each_device():
    """Where srun starts the program itself, the job of a trial does so too, once for each device."""
    script = ARRAYS.replace('torchrun "${LAUNCH[@]}"', "srun --ntasks-per-node=8 --cpu-bind=cores python -u")

    command = IMPORTERS["megatron"](script).command

    assert command.unknown == ()
    assert command.arguments[:3] == ("python", "-u", "pretrain_gpt.py")
    assert (command.tasks, command.slurm.srun) == ("per_device", ("--cpu-bind=cores",))


@pytest.mark.parametrize("is_job", [True, False], ids=["Slurm", "hosts of its own"])
def test_mpirun_is_started_once(is_job):
    """Options of mpirun stay and count the trial's processes; nothing of torchrun stands behind python."""
    mpi = "mpirun -np 32 --map-by ppr:8:node:PE=4 -x NCCL_DEBUG -x MASTER_ADDR=h python"
    script = ARRAYS.replace('torchrun "${LAUNCH[@]}"', mpi)
    script = script.replace("\n", "\n#SBATCH --nodes=4\n", 1) if is_job else script

    command = IMPORTERS["megatron"](script).command

    begin = ("mpirun", "-np", "{num_devices}", "--map-by", "ppr:{devices_per_host}:node:PE=4", "-x", "NCCL_DEBUG")
    assert command.arguments[:11] == (*begin, "-x", "MASTER_ADDR={master_address}", "python", "pretrain_gpt.py")
    assert command.unknown == ()
    if is_job:
        assert (command.slurm is None, command.tasks) == (False, "once")
    else:
        assert (command.slurm, command.launch) == (None, "once")
