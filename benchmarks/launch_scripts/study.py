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
from tuner.study_file.config import StudyConfig, load_study
from tuner.study_file.new_study import Added, new_study

_CLUSTERS = {8: "dgx-h100", 16: "ascend-a3", 32: "trn1"}
"""Cluster that answers the question for one, by the devices of a host that it has at least."""
_PER_HOST = 8
_ANY_VOCABULARY = 50304
_ANY_MODEL = "llama3-8b"
_MOST_ROUNDS = 4
_QUESTION = re.compile(r"--([a-z-]+) ?([A-Za-z_=,]*)")
_CONFIG = {"up": "cp"}


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
                made = new_study(imported, added, file=file, folder=folder)
                if made.model_file:
                    (folder / made.model_file).write_text(made.model_text, encoding="utf-8")
                (folder / "study.yaml").write_text(made.text, encoding="utf-8")
                facts = _facts(load_study(folder / "study.yaml"))
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
    """Return the options that a message asks for, such as `--hosts` and `--config tp`."""
    if "does not say everything" not in error.rule:
        return []
    found = []
    for option, value in _QUESTION.findall(error.rule.partition("; add ")[2]):
        if option == "config":
            found += [f"--config {part.partition('=')[0]}" for part in value.split(",") if part]
        elif option in ("hosts", "model", "vocab-size", "sequence-length", "global-batch-size", "precision"):
            found.append(f"--{option}")
    return list(dict.fromkeys(found))


def _answer(added: Added, questions: list[str], truth: Truth, imported: Imported) -> tuple[Added, set[str]]:
    """Return the options with an answer to each question, and the names of the facts that the answers state."""
    facts = truth.facts
    per_host = imported.devices_per_host or _PER_HOST
    copy = facts.get("tp", 1) * facts.get("pp", 1) * facts.get("cp", 1)
    # as many hosts as hold one replica, and all experts
    hosts = -(-facts.get("world", copy * facts.get("dp", facts.get("ep", 1))) // per_host)
    dp = facts.get("dp", max(1, (imported.hosts or hosts) * per_host // copy))
    config: dict[str, Any] = dict(added.config or {})
    names: set[str] = set()
    for question in questions:
        key = question.removeprefix("--config ")
        if key == "--hosts":
            added = replace(added, hosts=hosts)
            names |= {"world", "dp", "gbs"} if "world" not in facts else {"world"}
        elif key == "--model":
            added, names = replace(added, model=_ANY_MODEL), names | {"model"}
        elif key == "--vocab-size":
            added, names = replace(added, vocab_size=(truth.padded or (_ANY_VOCABULARY,))[0]), names | {"vocab"}
        elif key == "--sequence-length":
            added, names = replace(added, sequence_length=facts.get("sequence", 2048)), names | {"sequence"}
        elif key == "--global-batch-size":
            batch = facts.get("gbs") or dp * facts.get("mbs", 1) * facts.get("pp", 1)
            added, names = replace(added, global_batch_size=batch), names | {"gbs"}
        elif key == "--precision":
            added, names = replace(added, precision=facts.get("precision", "bf16")), names | {"precision"}
        else:
            fallback = {"recompute": "none", "zero_stage": 0, "sequence_parallel": False}.get(key, 1)
            config[key] = 1 if key == "up" else facts.get(key, fallback)
            names.add(_CONFIG.get(key, key))
    return replace(added, config=config or None), names


def _facts(study: StudyConfig) -> dict[str, Any]:
    """Return the facts of a study by the names of truth.FACTS."""
    job, model, config = study.setting.job, study.setting.job.model, study.current
    facts: dict[str, Any] = {
        "world": study.setting.cluster.num_devices,
        "gbs": job.global_batch_size,
        "sequence": job.sequence_length,
        "precision": job.precision,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "ffn": model.ffn_size,
        "vocab": model.vocab_size,
        "experts": max(model.num_experts, 1),
        "top_k": model.top_k,
    }
    if config is None:
        return facts
    facts |= {name: getattr(config, name) for name in ("tp", "pp", "vpp", "ep", "dp", "mbs")}
    facts |= {"cp": config.cp * config.up, "recompute": config.recompute, "zero_stage": config.zero_stage}
    return facts | {"offload": config.offload, "sequence_parallel": config.sequence_parallel}
