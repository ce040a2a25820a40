import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.capture.room.enter import GUARD, NAMESPACES
from tuner.capture.run_script import capture

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to run scripts with")


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """Captures a script of that text, which lies in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments, **options):
        (tmp_path / "train.sh").write_text(text, encoding="utf-8")
        return capture(["bash", "train.sh", *arguments], **options)

    return run


def commands(captured):
    """The words of the commands that would have run, without those that are held back."""
    return [record.words for record in captured.records if not record.held_back]


LAUNCHES = {
    "torchrun": 'torchrun --nnodes 2 pretrain.py --tp "$TP"',
    "torch.distributed": "python3 -u -m torch.distributed.run --nnodes 2 pretrain.py --tp $TP",
    "single quotes": "export TP; srun -l bash -c 'torchrun --nnodes 2 pretrain.py --tp $TP'",
    "escaped variables": 'export TP; srun -l --jobid 3 bash -c "torchrun --nnodes \\$((1 + 1)) pretrain.py --tp \\$TP"',
    "eval": 'CMD="torchrun --nnodes 2 pretrain.py --tp $TP"; eval $CMD',
    "a container of Slurm": "srun --container-image=nvcr.io#pytorch torchrun --nnodes 2 pretrain.py --tp $TP",
    "docker": 'docker run --gpus all -v $PWD:/w IMAGE bash -c "cd /w && torchrun --nnodes 2 pretrain.py --tp $TP"',
    "singularity": "srun singularity exec --nv image.sif torchrun --nnodes 2 pretrain.py --tp $TP",
    "a path of a container": "apptainer exec i.sif bash -c '/opt/conda/bin/torchrun --nnodes 2 pretrain.py --tp '$TP",
    "a script of its own": "printf 'torchrun --nnodes 2 pretrain.py --tp $1' > in.sh; srun ./in.sh $TP",
    "sbatch": "printf '#!/bin/bash\\ntorchrun --nnodes 2 pretrain.py --tp $1' > in.sh; sbatch -N 2 in.sh $TP",
    "wrap": 'sbatch -N 2 --wrap="torchrun --nnodes 2 pretrain.py --tp $TP"',
    "a function and a loop": "f() { torchrun --nnodes $1 pretrain.py --tp $TP; }; for n in 2; do f $n; done",
    "the background": "torchrun --nnodes 2 pretrain.py --tp $TP & wait",
    "the background at the end": "nohup torchrun --nnodes 2 pretrain.py --tp $TP > log.txt 2>&1 &",
    "a batch script on the input": "sbatch -N 2 <<EOT\n#!/bin/bash\nsrun torchrun --nnodes 2 pretrain.py --tp $TP\nEOT",
    "an environment": "conda run -n train torchrun --nnodes 2 pretrain.py --tp $TP",
    "an environment of a program's name": "conda run -n deepspeed torchrun --nnodes 2 pretrain.py --tp $TP",
    "a folder of a program's name": "srun -D /a/ray --container-workdir=/nemo torchrun --nnodes 2 pretrain.py --tp $TP",
    "an image of a program's name": "docker run --name megatron -w /w/megatron nvcr.io/nemo bash -c "
    "'torchrun --nnodes 2 pretrain.py --tp '$TP",
    "a launcher of the site": "sitelaunch -g 8 -- torchrun --nnodes 2 pretrain.py --tp $TP",
    "another name of a launcher": "ft_launcher --nnodes 2 pretrain.py --tp $TP",
    "a path of another machine": 'ENV=/no/env; "$ENV"/bin/torchrun --nnodes 2 pretrain.py --tp $TP',
    "a path after a variable": 'ENV=/no/env; A=1 B=2 "$ENV"/bin/torchrun --nnodes 2 pretrain.py --tp $TP',
    "a login shell": 'export TP; docker run IMAGE bash -lc "torchrun --nnodes 2 pretrain.py --tp $TP"',
    "a login shell by its path": "export TP; /bin/bash --login -c 'torchrun --nnodes 2 pretrain.py --tp $TP'",
    "unset variables": "set -euo pipefail; torchrun --master $MASTER --nnodes 2 pretrain.py --tp $TP",
    "a small shell": "sh -c 'A=(x $0); torchrun --nnodes 2 pretrain.py --tp ${A[1]}' $TP",
    "after failures": "set -e; source /no/env.sh; cd /no/folder; torchrun --nnodes 2 pretrain.py --tp $TP",
}


@pytest.mark.parametrize("text", LAUNCHES.values(), ids=LAUNCHES)
def test_the_words_of_the_command_are_captured(captured, text):
    """However a script starts its program, the words are written down as the program would have got them."""
    found = commands(captured(f"TP=$1\n{text}\n", "4"))

    assert len(found) == 1
    assert found[0][-5:] == ("--nnodes", "2", "pretrain.py", "--tp", "4")


def test_nothing_trains(captured, tmp_path):
    """No program starts, by whatever name or path an interpreter is called; the script ends with status 0."""
    (tmp_path / "pretrain.py").write_text(f"open({str(tmp_path / 'trained')!r}, 'w')", encoding="utf-8")

    done = captured(f"set -e\npython pretrain.py\npython3 -m pretrain\n{sys.executable} -u pretrain.py\n")

    assert [words[-1] for words in commands(done)] == ["pretrain.py", "pretrain", "pretrain.py"]
    assert done.status == 0
    assert not (tmp_path / "trained").exists()


def test_short_programs_run(captured):
    """`python -c` and a program on standard input really run, because scripts use what they print."""
    done = captured("torchrun $(python -c 'print(8 * 4)') $(python3 - <<END\nprint(7)\nEND\n)\n")

    assert commands(done) == [("torchrun", "32", "7")]


def test_slurms_header_gives_hosts_and_devices(captured):
    """A batch script sees the variables of the job that its header asks for, and the names of its hosts."""
    done = captured(
        "#!/bin/bash\n#SBATCH --nodes=4   # hosts\n#SBATCH --ntasks-per-node 2\n#SBATCH --gres=gpu:a100:8\n"
        "torchrun $SLURM_NNODES $SLURM_NTASKS $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) "
        "$(nvidia-smi -L | wc -l)\n"
    )

    record = done.records[0]
    assert record.words == ("torchrun", "4", "8", "host-0", "8")
    assert (record.allocation.hosts, record.allocation.tasks_per_host, record.allocation.devices_per_host) == (4, 2, 8)


def test_options_of_mpi_give_hosts(captured):
    """The number of processes, and of those on each host, tell how many hosts there are."""
    record = captured("mpirun -np 16 -npernode 4 -x A=1 python pretrain.py\n").records[0]

    assert record.words == ("python", "pretrain.py")
    assert (record.allocation.hosts, record.allocation.tasks_per_host) == (4, 4)
    assert record.through == (("mpirun", "-np", "16", "-npernode", "4", "-x", "A=1"),)


def test_commands_that_delete_or_reach_out_are_held_back(captured, tmp_path):
    """What deletes, ends processes or reaches another machine is written down and not run."""
    (tmp_path / "checkpoint").mkdir()

    done = captured(f"rm -rf {tmp_path}/checkpoint\npkill python\nssh host-1 reboot\n")

    assert [record.words[0] for record in done.records] == ["rm", "pkill", "ssh"]
    assert all(record.held_back for record in done.records)
    assert (tmp_path / "checkpoint").is_dir()


@pytest.mark.parametrize(
    "text",
    ["bash -lc 'rm -r {}'", "/bin/bash -l -c 'rm -r {}'", "sh -lc 'rm -r {}'", "/bin/rm -r {}", "A=1 /bin/rm -r {}"],
)
def test_no_way_of_calling_deletes(captured, tmp_path, text):
    """A login shell, whose profile sets the search path, and a program called by its path are held back too."""
    (tmp_path / "checkpoint").mkdir()

    done = captured(text.format(f"{tmp_path}/checkpoint"))

    assert [record.words[0] for record in done.records] == ["rm"]
    assert (tmp_path / "checkpoint").is_dir()


@pytest.mark.parametrize("call", ["./own.sh", "$PWD/own.sh", "./train.sh"])
@pytest.mark.parametrize("shell", ["/bin/bash -l", "/usr/bin/env -S bash --login"])
def test_a_script_of_a_login_shell_runs_no_profile(tmp_path, monkeypatch, call, shell):
    """A script whose first line names a login shell runs without the user's profile, also if another one calls it."""
    (tmp_path / "home").mkdir()
    for name in (".bash_profile", ".profile"):
        (tmp_path / "home" / name).write_text(f"touch {tmp_path}/profile_ran\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.sh").write_text(f"#!{shell}\ntorchrun pretrain.py\n", encoding="utf-8")
    (tmp_path / "train.sh").write_text(f"#!{shell}\n./own.sh\n", encoding="utf-8")
    for script in tmp_path.glob("*.sh"):
        script.chmod(0o755)

    done = capture([call] if call == "./train.sh" else ["bash", "-c", call])

    assert [record.words for record in done.records] == [("torchrun", "pretrain.py")]
    assert not (tmp_path / "profile_ran").exists()


def test_the_working_directory_stays_as_it_is(captured, tmp_path):
    """A script finds its files; what it writes beside them goes to the scratch folder, which its words do not name."""
    (tmp_path / "ds.json").write_text("{}", encoding="utf-8")

    done = captured("echo '{\"a\": 1}' > ds.json\ntouch new\ntorchrun `pwd`/pretrain.py --deepspeed_config ds.json\n")

    record = done.records[0]
    assert record.words[1] == f"{tmp_path}/pretrain.py"
    assert record.files == {"ds.json": '{"a": 1}\n'}
    assert record.directory == str(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "train.sh"]
    assert (tmp_path / "ds.json").read_text(encoding="utf-8") == "{}"


def test_the_scripts_own_variables_are_told_from_the_others(captured, monkeypatch):
    """The variables that the script exports are its own, and neither those before it nor those of a job."""
    monkeypatch.setenv("BEFORE", "1")

    done = captured("#SBATCH -N 2\nexport NCCL_DEBUG=WARN PYTHONPATH=/m:$PYTHONPATH\nA=1 torchrun x\n")

    own = done.own_environment(done.records[0])
    path = own.pop("PYTHONPATH")
    assert own == {"A": "1", "NCCL_DEBUG": "WARN"}
    assert path.startswith("/m")
    assert "meshtune-capture" not in path


def test_a_script_that_does_not_end_is_ended(captured):
    """The time limit ends the script and what it left in the background; what was captured until then is kept."""
    begin = time.monotonic()

    done = captured("torchrun a\n(while true; do :; done) &\nwhile true; do echo on; done\n", limit_s=1.0)

    assert time.monotonic() - begin < 20
    assert done.status is None
    assert commands(done) == [("torchrun", "a")]


FORGED = r"""
F=$(dirname "$BASH_ENV")/records
for text in '{"words": 3}' null '[[[' '{"words": ["a"]}' '""'; do echo "$text" > $F/0$((n++)).json; done
mkdir $F/01.json; mkfifo $F/02.json; ln -s /dev/zero $F/03.json
export BAD=$'caf\xe9'
torchrun $'caf\xe9' a.py
torchrun b.py
"""


@pytest.mark.parametrize("boundary", [NAMESPACES, GUARD, ""])
def test_what_is_no_record_is_named(captured, boundary):
    """Files that a script puts among the records, and bytes that are no text, are told and cost no other record."""
    done = captured(FORGED, boundaries=[boundary] if boundary else [], unconfined=True)

    assert commands(done) == [("torchrun", "b.py")]
    assert "BAD" not in done.records[0].environment
    assert any("'BAD'" in sentence for sentence in done.unread)
    assert any("'caf\\udce9' of 'torchrun'" in sentence for sentence in done.unread)
    assert sum("cannot be read" in sentence for sentence in done.unread) >= 4


@pytest.mark.parametrize("boundary", [NAMESPACES, GUARD, ""])
def test_nothing_outlives_the_capture(captured, tmp_path, boundary):
    """A process with a session of its own is ended too, after the script's end as after the time limit."""
    program = f"import pathlib, time; print('begun', flush=True); time.sleep(60); {str(tmp_path)!r}"
    left = f'setsid {sys.executable} -c "{program}" &\n'

    for text, limit_s in ((left, 1.0), (left + "while true; do :; done\n", 2.0)):
        done = captured(text, limit_s=limit_s, boundaries=[boundary] if boundary else [], unconfined=True)

        assert "begun" in done.output
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _content(path)]


def _content(path):
    """What a file holds, and nothing if its process has just ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("boundary", [NAMESPACES, GUARD])
@pytest.mark.parametrize("program", ["torchrun", "/usr/bin/srun", "/no/such/folder/srun"])
def test_a_command_may_be_the_launcher_itself(tmp_path, monkeypatch, boundary, program):
    """A command that begins with a program that has a stand-in is written down, at whatever path it is named."""
    monkeypatch.chdir(tmp_path)
    command = [program, *(["torchrun"] if program != "torchrun" else []), "a.py"]

    assert commands(capture(command, boundaries=[boundary])) == [("torchrun", "a.py")]


USUAL = {
    "module": "module load cuda || exit 1",
    "exported functions": "f() { torchrun f.py; }; export -f f; bash -c f; srun bash -c f",
    "a job on the input": "sbatch <<END\n#!/bin/bash\ntorchrun input.py\nEND",
    "the top of a checkout": 'cd "$(git rev-parse --show-toplevel)/sub" || exit 1\ntorchrun $PWD',
    "a job that submits itself": "cd $FOLDER; sbatch train.sh",
}


@pytest.mark.parametrize("boundary", [NAMESPACES, GUARD])
def test_what_scripts_of_clusters_do_is_followed(captured, tmp_path, monkeypatch, boundary):
    """Modules, exported functions, jobs on the input, git's answers and jobs that submit themselves are no obstacle."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git to ask")
    subprocess.run([git, "init", "--quiet", tmp_path], check=True)
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("FOLDER", str(tmp_path))
    done = captured("#!/bin/bash\n" + "\n".join(USUAL.values()), boundaries=[boundary])

    once = [("torchrun", "f.py"), ("torchrun", "f.py"), ("torchrun", "input.py"), ("torchrun", str(tmp_path / "sub"))]
    assert commands(done) == once * 2
    assert done.stopped == ""


@pytest.mark.parametrize("boundary", [NAMESPACES, GUARD])
def test_all_that_a_script_writes_is_named(captured, tmp_path, boundary):
    """New files, folders and links, changed and removed files are named, wherever the script may write."""
    (tmp_path / "removed").touch()
    (tmp_path / "changed").touch()
    text = "echo x > changed; mkdir -p new/empty; ln -s x link; python3 -c \"import os; os.remove('removed')\"\n"
    beyond = ["/new-at-the-root/a", "/dev/shm/new"] if boundary == NAMESPACES else []  # noqa: S108 # gone afterwards
    text += "mkdir -p /new-at-the-root; " + "".join(f"echo x > {path}; " for path in beyond)

    done = captured(text, boundaries=[boundary])

    named = {name.rstrip("/") for name in done.written}
    assert {str(tmp_path / name) for name in ("changed", "new/empty", "link")} <= named
    assert f"-{tmp_path / 'removed'}" in named
    assert set(beyond) <= named
    assert not any(Path(path).exists() for path in beyond)
