"""Importer for launch scripts of Megatron-LM, Megatron-DeepSpeed and MindSpeed-LLM, and for lists of their flags.

Sources: Megatron-LM megatron/training/arguments.py (names, defaults, derived values), megatron-core 0.16.1
model_parallel_config.py, distributed_data_parallel_config.py and transformer/pipeline_parallel_layer_layout.py (grammar
of layouts); MindSpeed mindspeed/features_manager (context parallel algorithms, --moe-tp-extend-ep); torchrun's
documentation for the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from costmodels.job.training_job import RECOMPUTE_MODULES
from hardware.io.errors import ConfigError
from tuner.imports.bash.script import Script, read_script
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, Flags, flag_name, flags_among
from tuner.imports.imported import Imported, Unread
from tuner.imports.megatron_command import command_of
from tuner.imports.megatron_model import model_of, num_experts
from tuner.imports.megatron_refusals import refuse_other_models
from tuner.imports.megatron_runtime import DEEPSPEED, runtime_of
from tuner.imports.torchrun import Launch, launch_of

_T = TypeVar("_T")
SIGNS = {
    "--num-layers",
    "--hidden-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--micro-batch-size",
    "--seq-length",
}
"""Flags that identify a command of Megatron-LM."""
_NOT_MODELLED = {
    "--rampup-batch-size": "Meshtune assumes the full global batch from the first step",
    "--cpu-offloading": "Meshtune assumes that activations stay on the device",
    "--swap-optimizer": "Meshtune assumes that the optimizer states stay on the device",
    "--schedules-method": "Meshtune assumes the 1F1B schedule",
    "--overlap-moe-expert-parallel-comm": "Meshtune assumes that the exchange of tokens does not overlap",
    "--moe-fb-overlap": "Meshtune assumes that the exchange of tokens does not overlap",
    "--cpu-optimizer": "Meshtune assumes that the optimizer states stay on the device",
    "--checkpoint-in-cpu": "Meshtune assumes that kept activations stay on the device",
    "--partition-activations": "Meshtune assumes that each rank keeps its whole inputs of layers",
    "--distribute-checkpointed-activations": "Meshtune assumes that each rank keeps its whole inputs of layers",
    "--distribute-saved-activations": "Meshtune assumes that each rank keeps its whole inputs of layers",
    "--window-size": "Meshtune assumes attention over the whole sequence",
    "--account-for-embedding-in-pipeline-split": "Meshtune assumes stages of equal length",
    "--account-for-loss-in-pipeline-split": "Meshtune assumes stages of equal length",
}
"""Flags that change a step in a way that Meshtune does not model, with the assumption that it makes instead."""
_WITHOUT_EFFECT = frozenset(
    [
        "--no-async-tensor-model-parallel-allreduce",
        "--use-checkpoint-opt_param-scheduler",
        "--recompute-num-layers",
        "--checkpoint-num-layers",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--fp8-margin",
        "--fp8-interval",
        "--log-num-zeros-in-grad",
        "--no-data-sharding",
        "--allow-missing-vision-projection-checkpoint",
        "--pretrained-checkpoint",
        "--no-pipeline-parallel",
        "--fp16-lm-cross-entropy",
    ]
)
"""Flags whose names look as if they changed the layout, and that do not."""
_NOT_READ = "; flags in it were not read"
MAX_NAMES = 12
"""Limit on the names in a note."""
MAX_LAYOUT = 20_000
"""Limit on the length of a layout [characters]; longer texts are cut."""
_OF_CHUNKS = (
    "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)
"""Flags that state virtual stages."""
_OF_RECOMPUTE = (
    "--recompute-granularity",
    "--recompute-activations",
    "--checkpoint-activations",
    "--activations-checkpoint-method",
)
"""Flags that turn recomputation on."""
_OF_ZERO = (
    *("--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"),
    *("--deepspeed", "--zero-stage"),
)
"""Flags that shard training states."""
_SHARDING = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
"""ZeRO stage of each sharding strategy of Megatron-FSDP."""


def import_megatron(text: str, *, tells_unused: bool = True) -> Imported:
    """Read a launch script without running any part of it.

    Args:
        text: Text of the script, or a list of flags.
        tells_unused: Whether flags about the layout that were not read are told; a log lists all flags there are.

    Raises:
        ConfigError: the script has no flag of Megatron-LM, the value of a flag is invalid, or the model is of a kind
            that is not modelled.
    """
    script = read_script(text)
    words, launch = _training_words(script)
    listed = flags_among(words, dashed=True)
    if not SIGNS & {flag.name for flag in listed}:
        raise ConfigError(
            "has no flags of Megatron-LM, such as --tensor-model-parallel-size, or they stand in a script that it runs",
            nearest="`meshtune init --capture -- bash SCRIPT` finds the command that it starts",
        )
    hidden = _hidden(words, script)
    name = launch.name if launch else ""
    described = import_flags(listed, program=name, beside=text, hidden=hidden, tells_unused=tells_unused)
    unread: list[Unread] = []
    hosts, devices_per_host = _devices(text, launch, unread)
    return replace(
        described,
        hosts=hosts,
        devices_per_host=devices_per_host,
        command=None if launch is None else command_of(launch, script, runtime=described.runtime),
        unread=(*described.unread, *unread, *(one.word for one in hidden), *_sourced(script)),
        notes=(*_defaulted(script), *described.notes),
    )


def import_flags(
    listed: Sequence[Flag],
    *,
    program: str = "",
    beside: str = "",
    hidden: tuple[Hidden, ...] = (),
    tells_unused: bool = False,
) -> Imported:
    """Read the flags of one command, whose names have dashes.

    Args:
        listed: Flags in their order; of a flag that is given several times the last occurrence counts.
        program: Name of the program's file; empty if unknown.
        beside: Further text of the script, where DeepSpeed's configuration may stand.
        hidden: Words of the command that may hold further flags.
        tells_unused: Whether flags about the layout that were not read are told.

    Raises:
        ConfigError: the value of a flag is invalid, or the flags describe a model that Meshtune does not model.
    """
    flags = Flags(listed)
    refuse_other_models(flags, tuple(flag.name for flag in listed), program)
    found = _Found(flags=flags, hidden=hidden)
    model, missing = model_of(flags)
    degrees = _degrees(found, model.get("num_layers"))
    job = _job(found, beside)
    runtime, why = runtime_of(flags, degrees, job)
    job |= _offload(flags, is_mindspeed=runtime == "mindspeed")
    for name, reason in _NOT_MODELLED.items():
        if flags.has(name):
            flags.leave(name, f"not modelled: {reason}")
    micro_batches = None if flags.has("--global-batch-size") else 1
    if micro_batches and found.absent("global_batch_size", 1, "--global-batch-size") is None:
        micro_batches = None
    return Imported(
        framework="megatron",
        runtime=runtime,
        model=model,
        missing=missing,
        job=job,
        degrees=degrees,
        open=found.open,
        micro_batches=micro_batches,
        layers=found.layers,
        copies=flags.count("--num-distributed-optimizer-instances") or 1,
        unread=(*dict.fromkeys(flags.unread), *(flags.unused(_WITHOUT_EFFECT) if tells_unused else ())),
        notes=(*_notes(flags, model, program), *([why] if why else [])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """Unknown word of the command that may hold further flags.

    Attributes:
        word: The word, with the reason.
        flags: Names of the only flags that it may hold; empty if it may hold any.
    """

    word: Unread
    flags: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Found:
    """Flags of the command, with the facts that are collected while they are read.

    Attributes:
        flags: Flags of the training program.
        hidden: Words of the command that may hold further flags.
        open: Degrees and keys of the job whose values could not be read, with the reason for each.
        layers: Number of layers of each virtual stage, or empty.
    """

    flags: Flags
    hidden: tuple[Hidden, ...] = ()
    open: dict[str, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()

    def number(self, name: str, *flags: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return the integer value of the first flag that is given, otherwise the default.

        A flag with an unreadable value is recorded in `open` under `name`, and so is a missing one if a part of the
        command that is not known may hold it.
        """
        given = next((flag for flag in flags if self.flags.has(flag)), None)
        if given is None:
            return self.absent(name, default, *flags)
        if why := self._why_hidden(flags, surely=True):
            self.open[name] = why
            return None
        number = self.flags.count(given, minimum=minimum)
        if number is None:
            unread = next(one for one in reversed(self.flags.unread) if one.what == given)
            self.open[name] = str(unread)
        return number

    def absent(self, name: str, default: _T, *flags: str) -> _T | None:
        """Return the default of a key whose flags are missing; None, and an open key, if they may be hidden."""
        if default is not None and (why := self._why_hidden(flags)):
            self.open[name] = why
            return None
        return default

    def _why_hidden(self, flags: Sequence[str], *, surely: bool = False) -> str:
        """Return why one of the flags may be in a word that is not known, or nothing.

        With `surely` only words count whose flags are known, and known to be there under some condition.
        """
        words = [one.word for one in self.hidden if one.flags & set(flags) or not (surely or one.flags)]
        return "; ".join(str(word).removesuffix(_NOT_READ) for word in words)


def _training_words(script: Script) -> tuple[tuple[Argument, ...], Launch | None]:
    """Return the words of the training program, and its launch command if the script has one.

    Of several commands the one with the most flags of Megatron-LM is used.
    """

    def signs(words: tuple[Argument, ...]) -> int:
        return len(SIGNS & {flag_name(word.text) for word in words})

    best = max(script.commands, key=lambda command: signs(command.words), default=None)
    launch = launch_of(best) if best is not None and signs(best.words) else None
    if launch is not None:
        return launch.training, launch
    # A list of flags without a launch command: take them from arrays, strings and plain lines.
    plain = [word for command in script.commands if signs(command.words) for word in command.words]
    held = [word for words in script.variables.values() if words and words[0].text.startswith("--") for word in words]
    return (*held, *plain), None


def _degrees(found: _Found, num_layers: int | None) -> dict[str, int]:
    """Return the parallel degrees and the micro-batch size that could be read."""
    flags = found.flags
    tp = found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1)
    pp = found.number("pp", "--pipeline-model-parallel-size", default=1)
    degrees = {"pp": pp, "tp": tp, **_context(found), "vpp": 1, "ep": 1}
    degrees["mbs"] = found.number("mbs", "--micro-batch-size", "--batch-size")
    degrees["vpp"] = _chunks(found, pp, num_layers)
    if _has_experts(flags):
        degrees["ep"] = found.number("ep", "--expert-model-parallel-size", "--moe-expert-parallel-size", default=1)
        # MindSpeed: each tensor parallel rank holds whole experts of its own, so that tp multiplies ep.
        if flags.has("--moe-tp-extend-ep") and degrees["ep"] and tp:
            degrees["ep"] *= tp
    if degrees["mbs"] is None and "mbs" not in found.open:
        found.open["mbs"] = "--micro-batch-size is missing"
    return {name: value for name, value in degrees.items() if value is not None}


def _has_experts(flags: Flags) -> bool:
    """Return whether the model has experts.

    A list of flags without the model's sizes has experts if it contains a flag for their parallelism.
    """
    of_experts = flags.has("--expert-model-parallel-size", "--expert-tensor-parallel-size")
    return num_experts(flags) > 0 or (of_experts and not flags.has("--num-layers", "--num-experts"))


def _context(found: _Found) -> dict[str, int | None]:
    """Return the degrees of ring attention (cp) and Ulysses (up), whose product is --context-parallel-size.

    Megatron-DeepSpeed has Ulysses only, whose degree is --ds-sequence-parallel-size.
    """
    flags = found.flags
    if flags.has("--ds-sequence-parallel-size"):
        return {"cp": 1, "up": found.number("up", "--ds-sequence-parallel-size")}
    size = found.number("cp", "--context-parallel-size", default=1)
    if size is None or size == 1:
        return {"cp": size, "up": 1}
    kinds = {"p2p": "cp", "a2a": "up", "a2a+p2p": "both", "allgather": "cp"}
    algorithms = {
        "megatron_cp_algo": "cp",
        "ulysses_cp_algo": "up",
        "hybrid_cp_algo": "both",
        "hybrid_adaptive_cp_algo": "both",
    }
    name = "--cp-comm-type"
    kind = flags.one_of(name, kinds, "cp")
    if flags.has("--context-parallel-algo"):
        name = "--context-parallel-algo"
        kind = flags.one_of(name, algorithms, "cp")
    if flags.has(name) and flags.text(name) is None:
        found.open |= dict.fromkeys(("cp", "up"), f"{name} (line {flags.line(name)})")
        return {"cp": None, "up": None}
    if flags.text("--cp-comm-type") == "allgather":
        flags.leave("--cp-comm-type", "allgather is not modelled; read as the ring of p2p")
    if kind != "both":
        return {"cp": size if kind == "cp" else 1, "up": size if kind == "up" else 1}
    sizes = flags.counts("--hierarchical-context-parallel-sizes")
    up = sizes[0] if len(sizes) == 2 else flags.count("--ulysses-degree-in-cp")
    if not up or size % up:
        raise ConfigError(
            "needs two sizes whose product is the context parallel size",
            key=flags.place(name),
            value=flags.text(name),
            nearest=f"--hierarchical-context-parallel-sizes, for example 2 {size // 2}",
        )
    return {"cp": size // up, "up": up}


def _chunks(found: _Found, pp: int | None, num_layers: int | None) -> int | None:
    """Return the number of virtual stages per pipeline rank, or None, and an open key, if it cannot be told.

    If the script states the layers of each virtual stage, they are stored in `found.layers`.
    """
    flags = found.flags
    stated = next((name for name in _OF_CHUNKS if flags.has(name)), None)
    if pp is None or (stated and flags.text(stated) is None):
        if stated:
            found.open["vpp"] = f"{stated} (line {flags.line(stated)})"
        return None if stated else found.absent("vpp", 1, *_OF_CHUNKS)
    if pp == 1 and stated is None:
        return 1
    layout = flags.text("--pipeline-model-parallel-layout")
    if layout is not None:
        found.layers = _layers_of(layout, flags.place("--pipeline-model-parallel-layout"))
        if len(found.layers) % pp == 0:
            return len(found.layers) // pp
        raise ConfigError(
            f"must have a multiple of {pp} parts, the number of pipeline stages; it has {len(found.layers)}",
            key=flags.place("--pipeline-model-parallel-layout"),
            value=layout,
        )
    # The layers that the first and the last stage leave are divided equally among the stages between them.
    first, last = (flags.count(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if (first or last) and num_layers and pp > 1:
        inner = pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        if inner and rest >= 0 and rest % inner == 0:
            ends = ((first,) if first else ()), ((last,) if last else ())
            found.layers = (*ends[0], *[rest // inner] * inner, *ends[1])
    per_chunk = flags.count("--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        if num_layers:
            return max(1, num_layers // pp // per_chunk)
        found.open["vpp"] = "--num-layers is not known"
        return None
    return found.number("vpp", "--num-virtual-stages-per-pipeline-rank", default=1)


def _layers_of(layout: str, place: str) -> tuple[int, ...]:
    """Parse a pipeline layout such as `Et*3|(tt|)*2t*3L` into the number of layers of each part."""
    text = layout.replace(",", "").replace(" ", "")
    # Expand repeated groups before repeated letters; the limit on length bounds each expansion.
    for pattern in (r"\(([^)]+)\)\*([0-9]{1,3})", r"(.)\*([0-9]{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text[:MAX_LAYOUT])
    if not re.fullmatch(r"[EtmL|]+", text):
        raise ConfigError("is not a layout of E, t, m, L and |", key=place, value=layout)
    return tuple(part.count("t") for part in text.split("|"))


def _job(found: _Found, beside: str) -> dict[str, Any]:
    """Return the keys of a study's `job:` that could be read.

    The sequence of a multimodal program is that of its decoder; --seq-length is then that of the images.
    """
    flags = found.flags
    lengths = ("--decoder-seq-length", "--seq-length", "--encoder-seq-length")
    job: dict[str, Any] = {
        "sequence_length": found.number("sequence_length", *lengths),
        "global_batch_size": found.number("global_batch_size", "--global-batch-size"),
        "precision": _precision(found),
        "optimizer": flags.one_of("--optimizer", {"adam": "adam", "sgd": "sgd"}, "adam"),
        **_recompute(found),
        "zero_stage": _zero_stage(found, beside),
    }
    is_parallel = flags.has("--sequence-parallel")
    if found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1) != 1:
        job["sequence_parallel"] = is_parallel or found.absent("sequence_parallel", False, "--sequence-parallel")
    if _has_experts(flags):
        tp = found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1)
        expert_tp = flags.count("--expert-tensor-parallel-size") or tp
        if flags.has("--moe-tp-extend-ep") or _has_whole_experts(flags):
            expert_tp = 1
        job["expert_tp"] = None if expert_tp == tp else expert_tp
    return {key: value for key, value in job.items() if value is not None}


def _has_whole_experts(flags: Flags) -> bool:
    """Return whether experts are DeepSpeed's, which tp splits only with --enable-expert-tensor-parallelism."""
    return flags.has("--moe-expert-parallel-size") and not flags.has("--enable-expert-tensor-parallelism")


def _precision(found: _Found) -> str | None:
    """Return the number format of matrix products; fp32 without a flag."""
    flags = found.flags
    formats = {
        "nvfp4": ("--fp4-format",),
        "fp8": ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3"),
        "bf16": ("--bf16",),
        "fp16": ("--fp16",),
    }
    given = [name for name, names in formats.items() if flags.has(*names)]
    return given[0] if given else found.absent("precision", "fp32", *chain.from_iterable(formats.values()))


def _recompute(found: _Found) -> dict[str, Any]:
    """Return the recomputation.

    Megatron-LM v2 had --checkpoint-activations and --activations-checkpoint-method, which recompute whole layers, and
    v3 --activations-checkpoint-granularity. DeepSpeed's flag only changes who recomputes.
    """
    flags = found.flags
    if flags.has("--recompute-activations"):
        return {"recompute": "selective"}
    kinds = {"full": "full", "selective": "selective", "none": "none"}
    whole = flags.has("--checkpoint-activations", "--activations-checkpoint-method")
    name = "--activations-checkpoint-granularity"
    name = name if flags.has(name) else "--recompute-granularity"
    if flags.has(name) and flags.text(name) is None:
        found.open["recompute"] = f"{name} (line {flags.line(name)})"
        return {}
    if not whole and not flags.has(name) and found.absent("recompute", "none", *_OF_RECOMPUTE) is None:
        return {}
    granularity = flags.one_of(name, kinds, "full" if whole else "none")
    if flags.has("--deepspeed-activation-checkpointing") and granularity == "none":
        flags.leave(
            "--deepspeed-activation-checkpointing",
            "recomputes nothing without --checkpoint-activations or --recompute-granularity; read as none",
        )
    method = "--activations-checkpoint-method" if whole else "--recompute-method"
    if granularity == "full" and flags.text(method) == "block":
        flags.leave(method, "block recomputes only some layers of a stage; read as full recomputation of all layers")
    if granularity != "selective" or not flags.has("--recompute-modules"):
        return {"recompute": granularity}
    modules = _values(flags, "--recompute-modules")
    known = [module for module in modules if module in RECOMPUTE_MODULES]
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            flags.leave("--recompute-modules", f"{module} is not modelled; left out")
    return {"recompute": "selective", **({"recompute_modules": known} if known else {})}


def _offload(flags: Flags, *, is_mindspeed: bool) -> dict[str, str]:
    """Return the key of `job:` for optimizer states on the host; MindSpeed's way is not modelled."""
    name, part = "--optimizer-cpu-offload", "--optimizer-offload-fraction"
    has_part = flags.has(part)
    flags.has("--use-precision-aware-optimizer")  # which offloading needs
    if not flags.has(name):
        return {}
    if is_mindspeed:
        flags.leave(name, "not modelled for MindSpeed: Meshtune assumes that the optimizer states stay on the device")
        return {}
    fraction = flags.text(part) if has_part else "1"
    if fraction is not None and not re.fullmatch(r"1(\.0*)?", fraction):
        flags.leave(part, "a part of the states is not modelled; read as all")
    return {"offload": "optimizer"}


def _values(flags: Flags, name: str) -> list[str]:
    return [value.text for value in flags.values(name) if not value.unknown]


def _zero_stage(found: _Found, beside: str) -> int | None:
    """Return the ZeRO stage: 1 is the distributed optimizer, others come from FSDP or DeepSpeed.

    DeepSpeed's stage is in its configuration file, which many scripts write themselves.
    """
    flags = found.flags
    if flags.has("--zero-stage"):
        return found.number("zero_stage", "--zero-stage", minimum=0)
    if flags.has(*DEEPSPEED) and flags.has("--deepspeed"):
        stages = set(re.findall(r"\"stage\"\s*:\s*([0-3])\b", beside))
        if len(stages) == 1:
            return int(stages.pop())
        found.open["zero_stage"] = "--zero-stage is missing; the stage is in DeepSpeed's configuration file"
        return None
    if flags.has("--use-megatron-fsdp", "--use-custom-fsdp"):
        return int(flags.one_of("--data-parallel-sharding-strategy", _SHARDING, "0"))
    for flag, stage in (("--use-torch-fsdp2", 3), ("--use-distributed-optimizer", 1)):
        if flags.has(flag):
            return stage
    return found.absent("zero_stage", 0, *_OF_ZERO)


def _devices(text: str, launch: Launch | None, unread: list[Unread]) -> tuple[int | None, int | None]:
    """Return the number of hosts and of devices per host, each None if unknown.

    The flags of torchrun take precedence over the `#SBATCH` lines of a Slurm script.
    """
    launcher = Flags(launch.launcher_flags if launch else [])
    slurm = dict(re.findall(r"^#SBATCH[ \t]+--([a-z-]+)[= ](?:[a-z0-9]+:)?([0-9]{1,6})[ \t]*(?:#.*)?$", text, re.M))
    found: list[int | None] = []
    in_slurm = {"--nnodes": ("nodes",), "--nproc-per-node": ("gpus-per-node", "gres", "ntasks-per-node")}
    in_deepspeed = {"--nnodes": "--num-nodes", "--nproc-per-node": "--num-gpus"}
    for name, keys in in_slurm.items():
        flag = in_deepspeed[name] if launcher.has(in_deepspeed[name]) else name
        value = launcher.text(flag)
        number = int(value) if value and re.fullmatch(r"[1-9][0-9]{0,5}", value) else None
        if value is not None and number is None:
            launcher.leave(flag, f"{value} is not a number of hosts or devices")
        by_slurm = next((int(slurm[key]) for key in keys if key in slurm), None)
        if flag == "--nnodes" and not launcher.has(flag) and launcher.has("--nproc-per-node"):
            by_slurm = by_slurm or 1  # torchrun's default
        found.append(number if number is not None else by_slurm)
    unread += [one for one, number in zip(launcher.unread, found, strict=False) if number is None]
    return found[0], found[1]


_SWITCH = re.compile(
    r"--(use|no|disable|enable|overlap|untie|add|apply|log)-|--(bf16|fp16|swiglu|sequence-parallel|deepspeed)$|--.*="
    r"|--(group-query-attention|multi-latent-attention|checkpoint-activations|recompute-activations|mock-data)$"
)
"""Flags that take no further word as their value."""


def _hidden(words: tuple[Argument, ...], script: Script) -> tuple[Hidden, ...]:
    """Return the unknown words that may contain flags.

    A word may contain flags if it does not follow a flag that takes a value, if it is an array, or if its name contains
    ARG, OPT, FLAG, PARAM, CONFIG or EXTRA.
    """
    hidden = []
    for before, word in zip((None, *words), words, strict=False):
        follows_value = before is None or not before.text.startswith("--") or _SWITCH.match(before.text) is not None
        is_named_so = re.search(r"^\$\{?\w*(ARG|OPT|FLAG|PARAM|CONFIG|EXTRA|@|\*)", word.text, re.I) is not None
        is_part = len(script.variables.get(word.text.removeprefix("$"), ())) > 1
        if word.unknown and (follows_value or is_named_so or is_part) and not word.text.startswith("-"):
            unread = Unread(what=word.text, why=f"{word.unknown}{_NOT_READ}", line=word.line)
            names = [text.partition("=")[0] for text in word.otherwise.split() if text.startswith("--")]
            if names or not word.otherwise:
                hidden.append(Hidden(word=unread, flags=frozenset(names)))
    return tuple(hidden)


def _sourced(script: Script) -> tuple[Unread, ...]:
    """Return the other scripts that the script sources, none of which is read."""
    return tuple(
        Unread(
            what=f"source {one.text}",
            why="sourced scripts are not read; source it in the shell that runs the trials",
            line=one.line,
        )
        for one in script.sourced
    )


def _defaulted(script: Script) -> tuple[str, ...]:
    """Return a note on the variables that were read with the script's defaults."""
    if not script.defaulted:
        return ()
    further = ", ..." if len(script.defaulted) > MAX_NAMES else ""
    names = ", ".join(script.defaulted[:MAX_NAMES])
    return (f"read with the defaults in the script, as if the environment did not set them: {names}{further}",)


def _notes(flags: Flags, model: dict[str, Any], program: str) -> tuple[str, ...]:
    notes = []
    if "vocab_size" in model and not flags.has("--padded-vocab-size"):
        notes.append(
            "Megatron-LM pads the vocabulary to a multiple of 128 times tp; the imported model ignores the factor tp"
        )
    if flags.has("--decoder-seq-length"):
        notes.append("the language model alone is modelled, over --decoder-seq-length; the encoder of images is not")
    if program not in ("", "pretrain_gpt.py"):
        notes.append(f"{program} may set values that are not among its flags: check the model")
    return tuple(notes)
