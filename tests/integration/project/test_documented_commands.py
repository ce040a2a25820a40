"""Every command and every YAML block of the documentation does what the page around it says."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shutil
import signal
import sys
import tomllib

import pytest
import typer

import tuner.run.loop
from hardware.io.config_file import parse_yaml, validate_mapping
from tests.support.documented import PAGES, ROOT, blocks_of, command_lines, quoted_commands
from tests.support.studies.broken_studies import rows
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.launch_scripts import ARRAYS, ASCEND, DEEPSPEED, NANOTRON, TORCHTITAN
from tests.support.studies.training_logs import LOG
from tuner.cli.main import app, main
from tuner.study_file.study_keys import StudyKeys

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = typer.main.get_command(app).commands
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(value):
    """A page or block as its test is called."""
    page = getattr(value, "page", value)
    place = page.relative_to(ROOT).as_posix()
    return place if page is value else f"{place}:{value.line}"


def of_language(*languages):
    """The blocks in these languages, as parameters."""
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=name_of)


def test_every_block_says_what_it_is():
    """No code block is without a language, and none has one that nothing checks."""
    assert [name_of(block) for block in BLOCKS if block.language not in {"sh", "yaml", "python", "text"}] == []


def test_what_is_not_run_is_a_command():
    """A reason for not running stands beside shell and YAML blocks alone, and names commands that are in its block."""
    for block in BLOCKS:
        used = {words[1] for words in command_lines(block.text)} if block.language == "sh" else set()

        assert not block.reason or block.language in {"sh", "yaml"}, name_of(block)
        assert set(block.not_run) <= used, name_of(block)


@of_language("sh")
def test_commands_are_understood(block, monkeypatch):
    """Programs, targets, extras and options that a block names exist, also where the block is not run."""
    for words in command_lines(block.text):
        understood(words, monkeypatch, strange=bool(block.reason))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_prose_are_understood(page):
    """Commands that a sentence names exist, with the options that it names."""
    for words in quoted_commands(page):
        if words[0] == "meshtune":
            command = COMMANDS[words[1]] if words[1] in COMMANDS else typer.main.get_command(app)
            known = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h"}
            assert {word for word in words if word.startswith("--")} <= known | {"--"}, words
        else:
            assert importlib.util.find_spec(words[2]) is not None, words


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.language == "sh" for block in blocks_of(page))], ids=name_of
)
def test_commands_run(page, scene, capsys):
    """The commands of a page, one after the other in one folder, end with status 0; a search after three trials, the
    search for a placement after a second.
    """
    blocks = [block for block in blocks_of(page) if block.language == "sh"]
    lines = [words for block in blocks for words in command_lines(block.text) if block.runs(words)]
    if any(words[1] == "init" for words in lines):
        (scene / "study.yaml").unlink()
    for words in lines:
        assert words[0] == "meshtune", f"{words} would need a reason for not being run"
        if "--jax" in words:
            pytest.importorskip("jax")
        if "--torch" in words:
            pytest.importorskip("torch")
        sys.argv = [*words, *SHORT.get(words[1], ())]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, f"{words}: {capsys.readouterr().err}"
        capsys.readouterr()


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml" and not block.reason], ids=name_of
)
def test_yaml_is_a_study(block):
    """A YAML block is a study, or sections of one, unless it is another program's and a comment says so."""
    sections = parse_yaml(block.text)
    base = {"name": "a", "cluster": {"name": "dgx-h100"}}

    validate_mapping(StudyKeys, base | sections)


@of_language("python")
def test_python_is_python(block):
    """A Python block has no mistake in its grammar."""
    ast.parse(block.text)


def understood(words, monkeypatch, *, strange):
    """Fails where a command line names what does not exist.

    Args:
        words: The command line; what stands behind `--`, as for `ray job submit`, is one of its own, but for a command
            of ours, which takes such words itself.
        monkeypatch: Pytest's.
        strange: Whether it may begin with a program that is not ours.
    """
    if words[:3] == ["python", "-m", "tuner"]:
        words = ["meshtune", *words[3:]]
    program, *arguments = words
    if "--" in arguments and program != "meshtune":
        understood(arguments[arguments.index("--") + 1 :], monkeypatch, strange=strange)
        assert strange
        return
    if program == "meshtune":
        COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])
    elif program == "make":
        assert arguments[0] in re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    elif program == "pip":
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", arguments[-1])
        assert arguments[0] == "install"
        assert extras is None or set(filter(None, (extras[1] or "").split(","))) <= set(
            PROJECT["optional-dependencies"]
        )
    elif words[:2] != ["python", "-m"]:
        assert strange, f"{program} is not ours, and would need a reason for not being run"
    else:
        parsed_by(arguments[1], arguments[2:], monkeypatch)


class Parsed(Exception):  # noqa: N818 # it is no error
    """Raised in place of what a program would do next."""


def parsed_by(module, arguments, monkeypatch):
    """Fails where a program of ours refuses its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser, given=None, namespace=None):
        parse(parser, given, namespace)
        raise Parsed

    found = importlib.util.find_spec(module)
    program = importlib.import_module(f"{module}.__main__" if found.submodule_search_locations else module)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        program.main(*([arguments] if inspect.signature(program.main).parameters else []))
    monkeypatch.undo()


@pytest.fixture
def scene(page, tmp_path, monkeypatch):
    """A folder with the files that pages name, in which trials run in this process."""
    network = (ROOT / "configs" / "traces" / "dgx-h100-8-hosts.csv").read_text(encoding="utf-8")
    of_64_devices = (ROOT / "configs" / "studies" / "llama3-8b-dgx-h100.yaml").read_text(encoding="utf-8")
    study = of_64_devices.replace("../models", "configs/models").replace("hosts: 8}", "hosts: 8, trace: trace.csv}")
    if page in ON_ONE_HOST:
        study = "name: small\nmodel: llama3-8b\ncluster: {name: dgx-h100}\njob: " + str(JOB)
    files = {
        # its command is not known in whole, so that trials are simulated
        "train.sh": ARRAYS.replace('"4"', '"8"').replace("--mock-data", "--data-path $1"),
        "pretrain.sh": ASCEND,
        "train.log": LOG,
        "train.toml": TORCHTITAN,
        "ds_config.json": DEEPSPEED,
        "nanotron.yaml": NANOTRON,
        "config.json": (ROOT / "configs" / "models" / "llama-3-8b.json").read_text(encoding="utf-8"),
        "study.yaml": study,
        "runs.csv": rows({"tp": 8, "step_seconds": 1.0}),
        "my_training.py": MY_TRAINING,
        "step.mlir": STEP,
    } | dict.fromkeys(("trace.csv", "a.csv", "b.csv", "c.csv"), network)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for folder in ("configs", "docs/examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tuner.run.loop, "RayExecutor", lambda backend, **_options: InProcessExecutor(backend))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


STEP = """\
module @step {
  func.func @main(%arg0: tensor<64x32xf32>, %arg1: tensor<32x16xf32>) -> tensor<64x16xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0]
      : (tensor<64x32xf32>, tensor<32x16xf32>) -> tensor<64x16xf32>
    return %0 : tensor<64x16xf32>
  }
}
"""
"""What a framework has lowered."""

SHORT = {"run": ("--trials", "3"), "place": ("--time-limit", "1")}
"""Options that end a long command soon; they count for more than what stands on the page, since they come last."""

JOB = {"sequence_length": 4096, "global_batch_size": 64}
ON_ONE_HOST = (ROOT / "docs" / "sharding-plans.md",)
"""Pages that speak of a study on eight devices; elsewhere it has 64."""

MY_TRAINING = """
def step():
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return (lambda weight, x: weight - jax.grad(lambda w: (x @ w).sum())(weight)), (shape, shape)


def model():
    import torch

    return torch.nn.Linear(8, 8), (torch.empty(8, 8),), lambda module, x: module(x).sum()
"""
