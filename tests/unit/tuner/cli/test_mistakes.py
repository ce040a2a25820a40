import subprocess
import sys

import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import assert_users_mistake, in_process
from tuner.cli.main import main


def test_a_broken_study_in_a_process(tmp_path):
    """A study that cannot work ends a process with status 2 and one line."""
    path = tmp_path / "study.yaml"
    path.write_text(study() + "modle: gpt-13b\n", encoding="utf-8")

    assert_users_mistake(in_process("run", path, "--json", cwd=tmp_path), "modle: unknown key", "did you mean 'model'?")


LATE_SIGNAL = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.Signals[sys.argv[1]])
from tuner.cli.main import main
sys.argv[1:] = ["status", "nowhere.yaml"]
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_at_the_very_end_changes_nothing(name, tmp_path):
    """While Python ends, after a command has, a signal leaves its status and its one message."""
    command = [sys.executable, "-c", LATE_SIGNAL, name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


INTERRUPTED_MESSAGE = """
import os, signal, sys
from tuner.cli import main
main._complain = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv[1:] = ["status", "nowhere.yaml"]
main.main()
"""


def test_an_interrupt_of_the_last_message_is_one_of_the_command(tmp_path):
    """A command that is interrupted while it prints its last message ends as an interrupted one, with no traceback."""
    command = [sys.executable, "-c", INTERRUPTED_MESSAGE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "")


MISTAKES = """
predict STUDY --config pp=x -> --config pp = 'x' | whole number
predict STUDY --config pp=0 -> --config.pp = 0 | at least 1
predict STUDY --config pp=2,pp=2 -> --config pp = '2' | given twice
predict STUDY --config pq=2 -> --config = 'pq' | did you mean
predict STUDY --config pp -> --config = 'pp' | name=value
predict STUDY --config tp=4 -> must be the 8 devices | with dp=2 it would occupy
predict STUDY --config tp=3 -> must be the 8 devices | `meshtune space --list`
predict STUDY --config tp=8,mbs=3 -> dp*mbs must divide
predict STUDY --set current=null -> --config = 'current' | states none
simulate STUDY --config tp=4 -> must be the 8 devices | with dp=2 it would occupy
simulate STUDY --config tp=8 --schedule 1f1d -> --schedule = '1f1d' | did you mean '1f1b'?
simulate STUDY --config pp=2,tp=4,vpp=2 --schedule gpipe -> --schedule = 'gpipe' | vpp=2 | vpp=1, or --schedule 1f1b
simulate STUDY --config tp=8 --trace no/such/folder -> --trace = 'no/such/folder' | cannot be written
simulate STUDY --config tp=8 --trace . -> --trace | cannot be written
export STUDY --to json --config tp=4 -> must be the 8 devices
export STUDY --to megatorn -> --to = 'megatorn' | did you mean 'megatron'?
export STUDY -> --to
export STUDY --to json --out no/such/folder -> --out | cannot be written
export STUDY --to json --out . -> --out | cannot be written
space STUDY --why garbage -> --why = 'garbage' | name=value
space STUDY --set nonsense -> --set = 'nonsense' | key=value
space STUDY --set =3 -> --set = '=3' | key=value
space STUDY --set search.seed=x -> search.seed = 'x' | whole number
space STUDY --set name.first=x -> --set name.first | no keys of its own
space STUDY --set space.tp=[1 -> --set space.tp = '[1' | not valid YAML
space STUDY --set model=studi.yaml -> model = 'studi.yaml' | no such file | 'study.yaml'
space STUDY --set serch.seed=1 -> serch | did you mean 'search'?
space STUDY --set -> --set
run STUDY --trials 0 -> --trials = '0' | at least 1
run STUDY --trials few -> --trials = 'few' | whole number
run STUDY --seed -1 -> --seed = '-1' | at least 0
run STUDY --storage results.db -> storage = 'results.db' | not a database URL
status STUDY --storage sqlite:///x.db?timeout=abc -> storage = 'sqlite:///x.db?timeout=abc' | an option of its URL
status STUDY --storage sqlite:///LONG_NAME -> storage = 'sqlite:///aaa | names no file that there can be
export STUDY --to json --config tp=8 --out LONG_NAME -> --out = 'aaa | cannot be written
init --from-torchtitan FOLDER/deep.toml --out FOLDER/new.yaml -> deep.toml | is not TOML
init --from-torchtitan FOLDER/digits.toml --out FOLDER/new.yaml -> digits.toml | is not TOML
watch STUDY -> --hosts-from
watch STUDY --hosts-from slrum -> --hosts-from = 'slrum' | did you mean 'slurm'?
watch STUDY --hosts-from no.csv -> no.csv | no such file
watch STUDY --hosts-from no.csv --network no.csv -> --network = 'no.csv' | is for ray and slurm
watch STUDY --hosts-from slurm --network no.csv -> no.csv | no such file
watch STUDY --hosts-from no.csv --probe 60 -> --probe = '60' | is for ray and slurm
watch STUDY --hosts-from slurm --network no.csv --probe 60 -> --probe = '60' | both tell how fast links are
watch STUDY --hosts-from ray --probe often -> --probe = 'often' | above 0
watch STUDY --hosts-from slurm --probe 60 -> --probe | this watch runs in none
watch STUDY --hosts-from no.csv --settle soon -> --settle = 'soon' | at least 0
watch STUDY --hosts-from no.csv --horizon 0 -> --horizon = '0' | above 0
watch STUDY --hosts-from FOLDER/events.csv --config tp=4 -> --config | cannot run on the 1 hosts
watch STUDY --hosts-from FOLDER/events.csv --state FOLDER/events.csv -> --state | is no state of a watch
watch STUDY --hosts-from FOLDER/events.csv --state no/such/state.json -> --state = 'no/such/state.json'
rank STUDY --top 0 -> --top = '0' | at least 1
rank STUDY --top 99999999999999999999 -> --top = '99999999999999999999' | has more than 19 digits
estimate STUDY --tokens 1e99 -> --tokens = '1e99' | from 1 to 1e+18
estimate STUDY --tokens nan -> --tokens = 'nan' | must be a number of tokens
rank STUDY --tpo 3 -> --tpo | --top
rank STUDY another -> another
space -> STUDY | `meshtune space --help`
spcae STUDY -> 'spcae' | Did you mean | 'space'
space no-such-study.yaml -> no-such-study.yaml: no such file | did you mean 'study.yaml'?
"""
"""A command line in each row, and the words of its message between bars."""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.partition(" -> ")[0])
def test_bad_options(meshtune, simulated, row):
    """A mistake on the command line is one message that shows the option, the value and what would be right."""
    line, words = row.split(" -> ")
    (simulated.parent / "deep.toml").write_text(f"a = {'[' * 10_000}{']' * 10_000}")
    (simulated.parent / "digits.toml").write_text(f"[training]\nseq_len = {'9' * 5_001}")
    (simulated.parent / "events.csv").write_text("time_s,link,share\n", encoding="utf-8")
    line = line.replace("LONG_NAME", "a" * 263).replace("FOLDER", str(simulated.parent))

    done = meshtune(*(simulated if word == "STUDY" else word for word in line.split(" ")))

    assert_users_mistake(done, *words.split(" | "))


@pytest.mark.parametrize("text", ["{", "[1]", "null", "[" * 100_000])
def test_foreign_value_of_the_own_variable_is_left_alone(meshtune, simulated, monkeypatch, text):
    """A variable that this program sets for itself, with somebody else's text in it, changes nothing."""
    monkeypatch.setenv("_MESHTUNE_ARGUMENTS", text)

    assert meshtune("space", simulated, "--json").status == 0


def test_an_unwritable_report(finished, meshtune):
    """A report that cannot be written is the user's mistake, told with the path."""
    path, storage, _ = finished

    done = meshtune("report", path, "--storage", storage, "--out", "no/such/folder/r.html")

    assert_users_mistake(done, "--out = 'no/such/folder/r.html'", "cannot be written")


@pytest.mark.usefixtures("no_ray")
def test_a_database_that_cannot_be_made(meshtune, simulated):
    """A storage in a folder that does not exist is the user's mistake, told after the progress."""
    done = meshtune("run", simulated, "--storage", "sqlite:///no/such/folder/x.db", "--json")

    assert (done.status, done.out) == (2, "")
    assert "meshtune: storage = 'sqlite:///no/such/folder/x.db': " in done.err
    assert "Traceback" not in done.err


HOSTILE = "\x1b[31mred\nline\u202e\x07"


@pytest.mark.parametrize(
    "arguments",
    [
        ("space", HOSTILE),
        (HOSTILE,),
        ("space", "STUDY", f"--{HOSTILE}"),
        ("space", "STUDY", "--set", f"{HOSTILE}=1"),
        ("space", "STUDY", "--set", f'name="{HOSTILE}"'),
        ("space", "STUDY", "--set", f"space.without=['{HOSTILE}']"),
        ("space", "STUDY", "--why", f"{HOSTILE}=1"),
        ("predict", "STUDY", "--config", f"recompute={HOSTILE}"),
        ("simulate", "STUDY", "--config", "tp=8", "--schedule", HOSTILE),
        ("simulate", "STUDY", "--config", "tp=8", "--trace", f"no/{HOSTILE}"),
        ("export", "STUDY", "--to", HOSTILE),
        ("rank", "STUDY", "--hosts", HOSTILE),
        ("estimate", "STUDY", "--tokens", HOSTILE),
        ("status", "STUDY", "--storage", HOSTILE),
        ("export", "STUDY", "--to", "json", "--out", f"no/{HOSTILE}"),
        ("run", "STUDY", "--trials", HOSTILE),
        ("replan", "STUDY", "--trace", HOSTILE),
        ("replan", "STUDY", "--until", HOSTILE),
        ("watch", "STUDY", "--hosts-from", HOSTILE),
        ("watch", "STUDY", "--hosts-from", "ray", "--ray-address", HOSTILE),
        ("simulate", "STUDY", "--config", "tp=8", "--at", "1", "--network", HOSTILE),
    ],
    ids=lambda arguments: repr(" ".join(arguments)),
)
def test_hostile_text_is_shown_escaped(meshtune, simulated, arguments):
    """No text of a user's steers the terminal or breaks the message's one line."""
    done = meshtune(*(simulated if argument == "STUDY" else argument for argument in arguments))

    assert_users_mistake(done, r"\x1b[31mred")
    assert done.err.rstrip("\n").isprintable()


def test_a_hostile_key_of_a_study(meshtune, tmp_path):
    """A key with control characters is shown escaped, too."""
    path = tmp_path / "study.yaml"
    path.write_text(study() + '"\\e[31mkey\\n": 1\n', encoding="utf-8")

    assert_users_mistake(meshtune("space", path), r"\x1b[31mkey\n = 1", "unknown key")


def test_a_control_character_in_a_study(meshtune, tmp_path):
    """A raw control character is no YAML; the message names its line."""
    path = tmp_path / "study.yaml"
    path.write_text(study() + "runtime: \x1b[31mmindspeed\n", encoding="utf-8")

    assert_users_mistake(meshtune("space", path), "study.yaml: line 5", "is not valid YAML")


def test_our_own_mistakes_keep_their_traceback(monkeypatch, simulated):
    """What is no ConfigError is our bug, and is not disguised as the user's mistake."""

    def fail(*_arguments, **_options):
        raise ZeroDivisionError

    monkeypatch.setattr("tuner.study_file.config.load_study", fail)
    monkeypatch.setattr(sys, "argv", ["meshtune", "space", str(simulated)])

    with pytest.raises(ZeroDivisionError):
        main()
