"""Flags of a command that no importer reads: which are known, and what each may change.

`megatron_arguments.yaml` lists the arguments of the known programs with their effects, but for those in the table of
tuner/export/megatron_flags.py and those of facts (costmodels/catalog/facts.yaml). A flag that none of them lists
belongs to a fork, or to the user's own program: its name alone says what it may be about.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from costmodels.job.fact_words import all_names
from hardware.io.config_file import read_mapping
from tuner.export.megatron_flags import FLAGS
from tuner.imports.flags import Flags
from tuner.imports.imported import Doubt, Unread

_HARMLESS_FIRST = re.compile(
    "--(no-)?(data|dataset|dataloader|train-data|log|logging|logger|save|load|eval|evaluation|valid|validation|test|wandb"
    "|tensorboard|tb|swanlab|mlflow|profile|profiler|profiling|trace|print|report|monitor|debug|tokenizer|lr|seed|exit"
    "|ckpt|timing|git|job|run|experiment|exp|rdzv|master|resume|auto-resume|fim|label|metric)(-|$)"
)
"""Beginnings of names about data, reports, checkpoints, evaluation and learning rates."""
_HARMLESS_LAST = re.compile(
    "-(path|paths|dir|dirs|directory|file|files|folder|root|url|host|port|address|name|names|interval|intervals|tag|token"
    "|seed|timeout|version|verbose|iters|iterations|epochs|steps|samples|prob|probability|rate|coeff|coefficient|std|eps"
    "|epsilon|alphas?|beta[0-9]?|gamma|momentum|template|format|workers|logging|logs|ckpt|dataset)$"
)
"""Ends of names about files, places, durations and constants of training."""
_IN_SPITE_OF_END = re.compile(
    "batch|seq|accum|recompute|offload|swap|zero|shard|parallel|optim|model-name|config|arch|preset"
)
"""Parts of names that are not harmless, whatever their end."""
_CHANGES = re.compile(
    "batch|seq|context|parallel|pipeline|layer|hidden|head|attention|attn|norm|mlp|ffn|embed|expert|moe|router|rope|rotary"
    "|fp8|fp4|fp16|bf16|fp32|precision|quant|dtype|zero|shard|fsdp|optim|recompute|activation|offload|swap|cpu|memory|lora"
    "|adapter|freeze|vocab|model-name|model-type|model-config|config|arch|preset|accum"
)
"""Parts of names that may be about the model, the batch, the layout or memory."""
_HARMLESS = re.compile(
    "data|corpus|shuffle|epoch|logg|wandb|tensorboard|eval|valid|test|save|load|tokenizer|prompt|seed|warmup|decay|dropout"
    "|loss|init|timeout|debug|profil|monitor|metric"
)
"""Parts of names about data, reports, evaluation and numerics, which count only without one of _CHANGES."""
_KEYS = {
    "recompute": "recompute|checkpoint-(activation|attention|attn|layer|mlp)|(activations?|gradient)-checkpoint",
    "offload": "optim[a-z]*-(cpu-)?offload|offload-optim|cpu-(adam|optim)",
    "zero_stage": "zero-?(stage|optim|[123])|fsdp|shard",
    "sequence_parallel": "sequence-parallel",
    "up": "ulysses",
    "cp": "context-parallel|ring-attention|ring-attn",
    "ep": "expert.*parallel",
    "vpp": "virtual-(pipeline|stage)",
    "pp": "pipeline.*size|pp-size",
    "tp": "tensor.*parallel|tp-size",
    "precision": "fp8|fp4|precision|\\$.*(dtype|precision)|\\$.*(fp|bf)16",
    "sequence_length": "seq(uence)?-len",
}
"""Keys of a study that an unknown flag may be about, with the parts of names that say so."""
MAX_LISTED = 40
"""Limit on the names in a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """Effect of a known flag on a study.

    Attributes:
        kind: told or asked.
        because: Reason.
        key: Key of the study that may say it instead; empty if none can.
        values: Values that have the effect, or that have it not.
        is_exception: Whether `values` are those without the effect.
    """

    kind: str
    because: str
    key: str = ""
    values: frozenset[str] = frozenset()
    is_exception: bool = True

    def has_value(self, value: str) -> bool:
        """Return whether a value is one of `values`, which may end in `*`."""
        return any(fnmatchcase(value, pattern) for pattern in self.values)


@functools.cache
def _listed() -> Mapping[str, Any]:
    return read_mapping(Path(__file__).parent / "megatron_arguments.yaml")


@functools.cache
def effects() -> Mapping[str, tuple[Effect, ...]]:
    """Return the effects of the flags that are told or asked for, by name with dashes."""
    found: dict[str, tuple[Effect, ...]] = {}
    for kind in ("asked", "told"):  # of several effects the first that a value has counts
        for row in _listed()[kind]:
            for entry in row["flags"].split():
                name, sign, values = re.fullmatch(r"([^=!]+)(!?=)?(.*)", entry).groups()  # type: ignore[union-attr]  # matches any entry
                effect = Effect(
                    kind=kind,
                    because=row["because"],
                    key=row.get("key", ""),
                    values=frozenset(values.split("|")) if sign else frozenset(),
                    is_exception=sign != "=",
                )
                found[f"--{name}"] = (*found.get(f"--{name}", ()), effect)
    return found


@functools.cache
def known_flags() -> frozenset[str]:
    """Return the names of all known flags, with dashes."""
    listed = _listed()
    texts = [program.get(kind, "") for program in listed["programs"] for kind in ("modelled", "harmless")]
    names = {f"--{name}" for text in (*texts, listed["refused"]) for name in text.split()}
    return frozenset(names | effects().keys() | FLAGS.keys() | all_names("megatron") | all_names("mindspeed"))


@functools.cache
def launcher_flags() -> frozenset[str]:
    """Return the names of the launchers' own flags, with dashes."""
    harmless = next(program["harmless"] for program in _listed()["programs"] if program["name"] == "launchers")
    return frozenset(f"--{name}" for name in harmless.split())


@functools.cache
def programs() -> tuple[str, ...]:
    """Return the names of the programs whose flags are known."""
    return tuple(program["name"] for program in _listed()["programs"] if program["name"] != "launchers")


def unread_effects(
    flags: Flags, names: Sequence[str], job: Mapping[str, Any], *, is_log: bool
) -> tuple[list[Unread], list[Doubt]]:
    """Return what known flags change that no importer reads: what is told, and what is asked for.

    Args:
        flags: Flags of the command.
        names: Names of all flags.
        job: Keys of the job that were read. Full recomputation leaves no part to be recomputed or kept in its own way.
        is_log: Whether a log printed the flags with all defaults; those whose default has an effect are left out.
    """
    told, doubts = [], []
    for name in dict.fromkeys(names):
        value = flags.text_if_known(name)
        for effect in effects().get(name, ()):
            if effect.values and (is_log or effect.has_value(value) == effect.is_exception):
                continue
            if effect.kind == "told":
                told.append(Unread(what=name, why=f"not modelled: {effect.because}", line=flags.line(name)))
            elif not (effect.key == "recompute" and job.get("recompute") == "full"):
                doubts.append(Doubt(flag=name, why=effect.because, key=effect.key, line=flags.line(name)))
            break
    return told, doubts


def unknown_flags(flags: Flags, names: Sequence[str]) -> tuple[list[str], list[Doubt]]:
    """Return the flags that no known program has, and doubts about those that may change what a study has.

    Args:
        flags: Flags of the command.
        names: Names of all flags. Those that the importer has asked for so far are known to it.
    """
    known = known_flags() | flags.asked
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    why = f"not known to any version of {in_words(programs())}"
    doubts = [
        Doubt(flag=name, why=why, key=_key(name), line=flags.line(name)) for name in unknown if not is_harmless(name)
    ]
    return unknown, doubts


def is_harmless(name: str) -> bool:
    """Return whether the name of an unknown flag says that it changes nothing that a study has."""
    name = name.lower().replace("_", "-")
    if _HARMLESS_FIRST.match(name) or (_HARMLESS_LAST.search(name) and not _IN_SPITE_OF_END.search(name)):
        return True
    return not _CHANGES.search(name) and _HARMLESS.search(name) is not None


def _key(name: str) -> str:
    return next((key for key, pattern in _KEYS.items() if re.search(pattern, name.lower())), "")


def in_words(names: Sequence[str]) -> str:
    """Return names as `A, B or C`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def note(unknown: Sequence[str]) -> str:
    """Return the note that lists the unknown flags by name."""
    further = ", ..." if len(unknown) > MAX_LISTED else ""
    return f"not known to any version of {in_words(programs())}: {', '.join(unknown[:MAX_LISTED])}{further}"
