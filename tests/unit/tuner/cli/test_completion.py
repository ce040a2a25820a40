import subprocess
import sys

import pytest
from typer.main import get_command

from costmodels.job.model_catalog import model_names
from hardware.cluster_file import cluster_names
from tests.support.studies.command_line import environment
from tuner.cli import main
from tuner.export import EXPORTERS
from tuner.planners.planning import PLANNERS


def completed(line, folder):
    """What the shell would offer behind a line, by the protocol of the script that `--show-completion` prints."""
    asked = {"_MESHTUNE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "tuner"],
        cwd=folder,
        env=environment() | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("meshtune sp", ["space"]),
        ("meshtune export --to ", list(EXPORTERS)),
        ("meshtune export --to me", ["megatron"]),
        ("meshtune plan --planner ", list(PLANNERS)),
        ("meshtune plan --export to", ["torch"]),
        ("meshtune init --cluster ", list(cluster_names())),
        ("meshtune init --model llama3", [name for name in model_names() if name.startswith("llama3")]),
        ("meshtune init --runtime mindsp", ["mindspeed"]),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_names_are_completed(tmp_path, line, offered):
    """Commands, and the names that an option takes, are offered as far as they begin with what is typed."""
    assert completed(line, tmp_path) == offered


def test_the_shell_gets_a_script(meshtune, monkeypatch):
    """`--show-completion` prints what a shell has to read."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # whatever started the tests
    monkeypatch.setattr(main, "commands", lambda _: get_command(main.app))  # options depend on that variable

    done = meshtune("--show-completion", "bash")

    assert done.status == 0
    assert "complete -o default -F _meshtune_completion meshtune" in done.out


def test_help_tells_the_exit_statuses(meshtune):
    """Whoever writes a script finds in the help what a status means."""
    told = " ".join(meshtune("--help").out.split())

    assert all(words in told for words in ("0 done", "1 ran but found nothing", "2 invalid input", "130 interrupted"))
