"""Study that `meshtune init` makes of a script, with its questions answered from the truth, and its facts."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.launch_scripts.truth import Truth
from hardware.io.errors import ConfigError
from tuner.imports import Imported
from tuner.study_file.answers import Added, parse_ignored
from tuner.study_file.config import load_study
from tuner.study_file.new_study import new_study
from tuner.study_file.questions import IGNORE
from tuner.subject.problem import Problem

_CLUSTERS = {8: "dgx-h100", 16: "ascend-a3", 32: "trn1"}
"""Cluster that answers the question for one, by the devices of a host that it has at least."""
_PER_HOST = 8
_ANY_VOCABULARY = 50304
_ANY_MODELS = {1: "llama3-8b", 8: "mixtral-8x7b", 256: "deepseek-v3"}
"""Model that answers the question for one, by the expert-parallel degree that it allows at most."""
_MOST_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of `meshtune init` for one script by one way in.

    Attributes:
        facts: Facts of the study, by the names of truth.FACTS; empty if there is no study.
        asked: Questions that were answered.
        answered: Names of the facts that an answer stated.
        refused: Error message, if there is no study.
        told: Keys that the study's notes mention as not read.
    """

    facts: dict[str, Any]
    asked: tuple[str, ...] = ()
    answered: frozenset[str] = frozenset()
    refused: str = ""
    told: tuple[str, ...] = ()


def study_of(read: Callable[[], Imported], truth: Truth, file: Path) -> Outcome:
    """Make the study of an imported file, answering what is asked."""
    try:
        imported = read()
    except ConfigError as error:
        return Outcome(facts={}, refused=str(error))
    per_host = imported.devices_per_host or _PER_HOST
    cluster = next((name for size, name in _CLUSTERS.items() if size >= per_host), _CLUSTERS[_PER_HOST])
    added, asked = Added(cluster=cluster), list[str]()
    answered: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                made = new_study(imported, added, file=file, out=folder / "study.yaml")
                if made.model_file:
                    (folder / made.model_file).write_text(made.model_text, encoding="utf-8")
                (folder / "study.yaml").write_text(made.text, encoding="utf-8")
                facts = _facts(load_study(folder / "study.yaml").problem)
                told = tuple(str(one) for one in made.imported.unread)
                return Outcome(facts=facts, asked=tuple(asked), answered=frozenset(answered), told=told)
            except ConfigError as error:
                questions = _questions(error)
                if not questions or set(questions) <= set(asked):
                    return Outcome(facts={}, asked=tuple(asked), refused=str(error))
                asked += questions
                added, names = _answer(added, questions, truth, imported)
                answered |= names
    return Outcome(facts={}, asked=tuple(asked), refused="asks without end")


def _questions(error: ConfigError) -> list[str]:
    """Return the options that a message asks for, such as `--hosts`, and `--ignore-flags` with the flags."""
    line = next((line for line in error.listed if line.startswith("Add what it leaves open: ")), "")
    found = [f"--{option}" for option, _ in re.findall(r"--([a-z-]+) (N|NAME|BOOL)\b", line)]
    return found + [f"{IGNORE.option} {names}" for names in re.findall(rf"{IGNORE.option} ([\w,.-]+)", line)[-1:]]


def _answer(added: Added, questions: list[str], truth: Truth, imported: Imported) -> tuple[Added, set[str]]:
    """Return the options with an answer to each question, and the names of the facts that the answers state."""
    facts = truth.facts
    per_host = imported.devices_per_host or _PER_HOST
    copy = facts.get("tp", 1) * facts.get("pp", 1) * facts.get("cp", 1)
    # as many hosts as hold one replica, and all experts
    hosts = -(-facts.get("world", copy * facts.get("dp", facts.get("ep", 1))) // per_host)
    dp = facts.get("dp", max(1, (imported.hosts or hosts) * per_host // copy))
    batch = facts.get("gbs") or dp * facts.get("mbs", 1) * facts.get("pp", 1)
    answers: dict[str, Any] = dict(added.answers)
    names: set[str] = set()
    values = {
        "hosts": hosts,
        "devices_per_host": per_host,
        "vocab_size": (truth.padded or (_ANY_VOCABULARY,))[0],
        "sequence_length": facts.get("sequence", 2048),
        "global_batch_size": batch,
        "precision": facts.get("precision", "bf16"),
        "recompute": facts.get("recompute", "none"),
        "offload": facts.get("offload", "none"),
        "zero_stage": facts.get("zero_stage", 0),
        "sequence_parallel": facts.get("sequence_parallel", False),
        "up": 1,
    }
    stands_for = {"vocab_size": "vocab", "sequence_length": "sequence", "global_batch_size": "gbs", "up": "cp"}
    for question in questions:
        if question.startswith(IGNORE.option):
            added = replace(added, ignored=parse_ignored(question.removeprefix(IGNORE.option)))
            continue
        key = question.removeprefix("--").replace("-", "_")
        if key == "model":
            added, names = replace(added, model=_any_model(facts.get("ep", 1))), names | {"model"}
        elif key == "hosts":
            names |= {"world", "dp", "gbs"} if "world" not in facts else {"world"}
            answers[key] = hosts
        else:
            answers[key] = values.get(key, facts.get(key, 1))
            names.add(stands_for.get(key, key))
    return replace(added, answers=answers), names


def _any_model(ep: int) -> str:
    return next((name for most, name in _ANY_MODELS.items() if most >= ep), _ANY_MODELS[1])


def _facts(problem: Problem) -> dict[str, Any]:
    """Return the facts of a study by the names of truth.FACTS."""
    job, model, config = problem.setting.job, problem.setting.job.model, problem.current
    facts: dict[str, Any] = {
        "world": problem.setting.cluster.num_devices,
        "gbs": job.global_batch_size,
        "sequence": job.sequence_length,
        "precision": job.precision,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.plain.num_heads,
        "kv_heads": model.plain.num_kv_heads,
        "ffn": model.plain.ffn_size,
        "vocab": model.vocab_size,
        "experts": max(model.num_experts, 1),
        "top_k": model.top_k,
    }
    if config is None:
        return facts
    facts |= {name: getattr(config, name) for name in ("tp", "pp", "vpp", "ep", "dp", "mbs")}
    facts |= {"cp": config.cp * config.up, "recompute": config.recompute, "zero_stage": config.zero_stage}
    return facts | {"offload": config.offload, "sequence_parallel": config.sequence_parallel}
