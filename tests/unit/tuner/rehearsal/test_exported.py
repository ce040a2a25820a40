"""What starts where exported flags are rehearsed."""

from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from trials.started import Started
from tuner.export.exporter import Export
from tuner.rehearsal.exported import with_exported_flags

FLAGS = Export(
    target="megatron", text="", arguments=("--bf16",), environment=(("ONE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", None))
)
NOTHING = Started(in_words="")


def test_a_python_file_gets_the_flags_behind_its_own():
    """The parser takes the last of equal flags, so that the exported ones count; the file is run by python3."""
    found = with_exported_flags(NOTHING, FLAGS, "train.py --name 'a b'", Path("/somewhere"))

    assert found.command == ("python3", "train.py", "--name", "a b", "--bf16")
    assert found.directory == Path("/somewhere")
    assert found.environment == {"ONE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": None}


def test_a_command_keeps_its_launcher_and_variables():
    """Without a program the study's command is run, with the export's variables beside those of its trials."""
    trial = Started(in_words="", command=("torchrun", "train.py"), environment={"ONE": "0", "TWO": "2"})
    found = with_exported_flags(trial, FLAGS, None, Path("/somewhere"))

    assert found.command == ("torchrun", "train.py", "--bf16")
    assert found.environment == {"ONE": "1", "TWO": "2", "CUDA_DEVICE_MAX_CONNECTIONS": None}


@pytest.mark.parametrize(
    ("export", "program", "words"),
    [
        (FLAGS, None, "the trials of the study start none"),
        (Export(target="nemo", text="..."), "train.py", "written as a file"),
    ],
)
def test_what_has_no_program_or_no_flags_is_refused(export, program, words):
    """A study of simulated trials needs a program, and a target needs flags."""
    with pytest.raises(ConfigError, match=words):
        with_exported_flags(NOTHING, export, program, Path("/somewhere"))
