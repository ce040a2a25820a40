"""What a rehearsal runs of a trial's command."""

import sys
from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from trials.started import Started
from tuner.rehearsal.program import program_of


def starts(folder: Path, *words: str, variables=(), environment=None) -> Started:
    """Return what a trial of some words starts in a folder with `train.py`."""
    (folder / "train.py").write_text("")
    return Started(in_words="", command=words, directory=folder, variables=variables, environment=environment or {})


PATH = {"PATH": str(Path(sys.executable).parent)}


def test_launcher_and_wrappers_are_left_out(tmp_path):
    """The words behind the Python file are the program's; torchrun's own and numactl's are not."""
    words = ("numactl", "--membind=0", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8")
    found = program_of(starts(tmp_path, *words, "train.py", "--lr", "1", "--bf16"), PATH)

    assert found.script == tmp_path / "train.py"
    assert found.arguments == ("--lr", "1", "--bf16")
    assert found.interpreter == sys.executable


def test_a_launcher_names_its_interpreter(tmp_path):
    """The first line of torchrun names the interpreter of its environment."""
    launcher = tmp_path / "bin" / "torchrun"
    launcher.parent.mkdir()
    launcher.write_text(f"#!{sys.executable}\n")
    launcher.chmod(0o755)

    found = program_of(starts(tmp_path, "torchrun", "--nnodes=1", "train.py"), {"PATH": str(launcher.parent)})

    assert found.interpreter == sys.executable


def test_a_module_is_found(tmp_path):
    """`-m` names a module instead of a file."""
    found = program_of(starts(tmp_path, sys.executable, "-m", "package.train", "--lr", "1"), PATH)

    assert (found.script, found.module, found.arguments) == (None, "package.train", ("--lr", "1"))


def test_variables_have_their_values(tmp_path):
    """`$NAME` is filled in from the environment, in words and in what the trial sets."""
    one = starts(
        tmp_path, sys.executable, "train.py", "--data=$DATA", variables=("DATA",), environment={"A": "$DATA", "B": None}
    )
    found = program_of(one, {**PATH, "DATA": "/data"})

    assert found.arguments == ("--data=/data",)
    assert found.environment == {"A": "/data", "B": None}


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((), "starts no command"),
        (("bash", "train.sh"), "names no Python program"),
        (("singularity", "exec", "image.sif", "python", "train.py"), "in a container"),
        ((sys.executable, "other.py"), "that is not there"),
        ((sys.executable, "train.py", "{host_rank}"), "only a host knows"),
        (("/nowhere/torchrun", "train.py"), "is not on this machine"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(tmp_path, words, rule):
    """Each refusal says its rule."""
    with pytest.raises(ConfigError, match=rule):
        program_of(starts(tmp_path, *words), PATH)
