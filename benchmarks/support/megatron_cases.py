"""Training cases of Megatron-LM's functional tests: flags, variables, world, and the memory that their CI measured."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hardware.device import Device, find_device
from hardware.io.errors import ConfigError
from tuner.rehearsal.program import Program
from tuner.rehearsal.run import Case

FILE = "megatron_lm_ci_golden.csv"
_CASES = "tests/functional_tests/test_cases"
_PEAK = "mem-max-allocated-bytes"
_OF_FILES = (
    *("--data-path", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type"),
    *("--load", "--save", "--pretrained-checkpoint", "--tensorboard-dir", "--wandb-project", "--wandb-entity"),
    *("--wandb-exp-name", "--wandb-save-dir", "--exit-duration-in-mins", "--mock-data", "--vocab-size"),
    *("--auto-detect-ckpt-format", "--verify-integrity", "--finetune", "--async-save", "--async-strategy"),
    *("--use-persistent-ckpt-worker", "--fim-data", "--fim-rate", "--fim-spm-rate"),
)
"""Flags of a case that name files of the CI, or say what is done with them; the tokenizer is named by its size."""
_VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000, "GPTSentencePieceTokenizer": 256_000}
"""Number of entries of the tokenizers that cases name without their size (huggingface.co: openai-community/gpt2,
mistralai/Mixtral-8x7B-v0.1, nvidia/Nemotron-4-340B-Base)."""
_DEFAULT_TOKENIZER = "GPT2BPETokenizer"
"""Tokenizer of a case that gives a vocabulary and merges (Megatron-LM, megatron/training/arguments.py)."""
_GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CiCase:
    """Training run of Megatron-LM's CI on one kind of device.

    Attributes:
        name: Folder of the case below `test_cases`.
        environment: Software of the run: `dev` or `lts`.
        device: Device.
        world: Number of ranks.
        flags: Words of `pretrain_gpt.py`.
        variables: Environment variables.
        two_steps_bytes: Largest number of bytes allocated by rank `world - 1` within the first two steps; None where
            the second was not recorded.
        peak_bytes: The same within the whole run.
        place: Row of the file of measured runs, as `file.csv:line`.
    """

    name: str
    environment: str
    device: Device
    world: int
    flags: tuple[str, ...]
    variables: dict[str, str]
    two_steps_bytes: int | None
    peak_bytes: int
    place: str

    def as_rank(self, megatron: Path, path: str) -> Case:
        """Return its run as the rank that writes the memory to the log, which is the last of the world.

        Source: Megatron-LM, megatron/training/global_vars.py, `_set_tensorboard_writer`.

        Args:
            megatron: Tree of Megatron-LM.
            path: Folders in which Python finds Transformer Engine.
        """
        program = Program(
            interpreter=sys.executable,
            script=megatron / "pretrain_gpt.py",
            module=None,
            arguments=self.flags,
            directory=megatron,
            environment=self.variables | {"PYTHONPATH": path},
        )
        return Case(program=program, world=self.world, rank=self.world - 1, stage=0)


def read_cases(measured: Path, megatron: Path) -> tuple[list[CiCase], dict[str, str]]:
    """Read the cases that a file of measured runs has, and why others are left out, by their place.

    Raises:
        OSError: a file is missing.
    """
    cases, left_out = [], {}
    with (measured / FILE).open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            place = f"{FILE}:{line}"
            try:
                cases.append(_case(row, place, megatron))
            except ConfigError as error:
                left_out[f"{place} {row['model']}"] = str(error)
    return cases, left_out


def _case(row: dict[str, str], place: str, megatron: Path) -> CiCase:
    if "device count not public" in row["notes"]:
        raise ConfigError("does not say how many devices it ran on", key="devices")
    golden = megatron / row["source_url_or_repo_path"].split(" ", 1)[1]
    found = yaml.safe_load((golden.parent / "model_config.yaml").read_text(encoding="utf-8"))
    series = json.loads(golden.read_text(encoding="utf-8"))[_PEAK]["values"]
    early = [float(value) for step, value in series.items() if int(step) <= 2 and value != "nan"]
    environment = re.search(r"golden_values_(\w+?)_dgx", golden.name)
    assert environment is not None, "files of golden values name their environment"
    return CiCase(
        name=str(golden.parent.relative_to(megatron / _CASES)),
        environment=environment[1],
        device=find_device(row["device"]),
        world=_world(golden.parent, megatron, golden.stem.rsplit("_", 1)[1]),
        flags=_flags(found["MODEL_ARGS"]),
        variables={name: str(value) for name, value in found["ENV_VARS"].items()},
        two_steps_bytes=round(max(early)) if "2" in series else None,
        peak_bytes=round(float(row["peak_mem_gib"]) * 2**30),
        place=place,
    )


def _flags(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the words of a case's flags, as its CI makes them (shell_test_utils/_run_training.sh)."""
    kept = {name: value for name, value in given.items() if name not in _OF_FILES}
    tokenizer = given.get("--tokenizer-type", _DEFAULT_TOKENIZER)
    size = given.get("--vocab-size") if tokenizer == "NullTokenizer" else _VOCABULARIES.get(tokenizer)
    if size is None:
        raise ConfigError("is a tokenizer of unknown size", key="--tokenizer-type", value=tokenizer)
    words = [word for name, value in kept.items() for word in (name, *_words(value))]
    return (*words, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))


def _words(value: Any) -> Sequence[str]:
    if value is True or value == "":
        return ()
    if isinstance(value, list):
        return [str(one) for one in value]
    text = " ".join(str(value).split())
    if text.startswith("["):
        return text.strip("[]").replace(",", " ").split()
    # the CI leaves values with blanks in quotes; others are single words
    return text.split() if re.fullmatch(r"[\d ]+", text) else (text,)


def _world(case: Path, megatron: Path, platform: str) -> int:
    """Return the number of ranks by the recipe that names the case; recipes of the CI have eight by default."""
    for recipe in sorted((megatron / "tests/test_utils/recipes").rglob("*.yaml")):
        if platform == "gb200" and recipe.parent.name != "gb200":
            continue
        if platform != "gb200" and recipe.parent.name == "gb200":
            continue
        text = recipe.read_text(encoding="utf-8")
        if f"[{case.name}]" in text or f"- {case.name}\n" in text:
            spec = yaml.safe_load(text)["spec"]
            return int(spec["nodes"]) * int(spec["gpus"])
    return _GPUS_PER_NODE
