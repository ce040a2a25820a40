import re
import subprocess
import sys

import pytest

from tests.support.studies.command_line import COMMANDS, ROOT, environment, in_process
from tuner.cli.main import commands

ARGUMENTS = {
    "atlas": "OPTIONS",
    "calibrate": "CSV",
    "catalog": "KIND",
    "learn": "LOGS",
    "place": "FILE",
    "share": "FILES",
}
"""Arguments of commands that take no study."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(meshtune, command):
    """Each command explains itself, its argument and its options."""
    done = meshtune(command, "--help")

    assert done.status == 0
    assert f"Usage: meshtune {command} [OPTIONS]" in done.out
    assert ARGUMENTS.get(command, "STUDY") in done.out
    assert "--json" in done.out


def test_help_lists_every_command_in_whole_sentences(meshtune):
    """Every command has one line in a panel, and none is cut off."""
    done = meshtune("--help")

    assert done.status == 0
    panels = done.out.partition("\nTune:\n")[2]
    assert [line for line in panels.splitlines() if line.endswith(":")] == ["Look:", "Plan:", "Keep:"]
    for command in COMMANDS:
        assert len(re.findall(rf"^  {command} .*\.$", panels, re.M)) == 1
    assert "..." not in panels


def test_options_that_two_commands_share_are_explained_once(meshtune):
    """What logs and scripts leave open is explained by the help of `init`; that of `learn` names it, and is short."""
    from tuner.study_file.questions import QUESTIONS

    init, learn = meshtune("init", "--help").out, meshtune("learn", "--help").out

    for question in QUESTIONS.values():
        assert re.search(rf"^  {question.option} {question.metavar}\b", init, re.M)
        assert not re.search(rf"^  {question.option} {question.metavar}\b", learn, re.M)
    assert "meshtune init --help" in learn


def test_without_a_command_the_help_is_on_stderr(meshtune):
    """`meshtune` alone shows what it could do, and prints no result."""
    done = meshtune()

    assert done.status == 2
    assert done.out == ""
    assert "\nTune:\n" in done.err


def test_a_command_is_made_alone():
    """What names no command makes all of them, so that a message can name the nearest."""
    assert set(commands("rank").commands) == {"rank"}
    assert set(commands("rnak").commands) == set(commands().commands) == set(COMMANDS)


def test_version(meshtune):
    """`--version` prints the number that the package was built with."""
    built = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)

    assert meshtune("--version").out == f"meshtune {built[1]}\n"


def test_version_of_a_checkout_that_nobody_installed(meshtune, monkeypatch):
    """Without an installed package the number comes from the checkout."""
    from importlib import metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)

    assert re.fullmatch(r"meshtune \d+\.\d+\.\d+\n", meshtune("--version").out)


def test_help_in_a_process(tmp_path):
    """`python -m tuner --help` works from any folder and prints nothing on stderr."""
    done = in_process("--help", cwd=tmp_path)

    assert (done.status, done.err) == (0, "")
    assert "\nTune:\n" in done.out


HEAVY = {"numpy", "optuna", "plotly", "pydantic", "ray", "rich", "scipy", "sqlalchemy", "yaml"}


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ((), set()),
        (("run",), {"pydantic"}),  # typer reads the options of a command with it
    ],
    ids=["meshtune", "run"],
)
def test_help_imports_nothing_heavy(command, allowed):
    """The help is there before anybody has waited for a heavy library."""
    program = (
        "import sys\n"
        "from tuner.cli.main import main\n"
        f"sys.argv = ['meshtune', *{command!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)), sep=',')\n"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    loaded = done.stdout.splitlines()[-1]
    assert set(filter(None, loaded.split(","))) <= allowed


def test_a_reader_that_stops_early_sees_no_traceback(tmp_path, simulated):
    """`meshtune space --list | head -1` ends without a complaint."""
    command = f'"{sys.executable}" -m tuner space "{simulated}" --list | head -1'

    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )

    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
