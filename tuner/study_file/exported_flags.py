"""Exporters of framework flags, in the form in which trials that run a user's command ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError
from trials.command.own_words import flag_of
from trials.framework_flags import FlagExporter, Flags, ReadFlags, WordRules
from tuner.export import find_exporter, torchtitan_flags
from tuner.export.bridge import BRIDGE
from tuner.export.megatron_flags import GROUPS, NEVER_ADDED, NEVER_REMOVED, PP
from tuner.export.megatron_refused import refused_flags
from tuner.export.renamed import STAGES, keys_of
from tuner.export.swift import SWIFT
from tuner.export.verl import VERL
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import flags_among
from tuner.imports.megatron import import_flags
from tuner.imports.present import present_of

WITH_FLAGS = ("bridge", "maxtext", "megatron", "mindspeed", "swift", "torchtitan", "verl")
"""Exporters that write flags."""

ENDS_COMMAND = ("torchtitan",)
"""Exporters whose flags end with a subcommand, after which the program takes no other flags."""

WITH_FILE = "torchtitan-toml"
"""Name of torchtitan's flags in versions before 0.3, whose commands name a TOML file."""

_LAYERS, _BRIDGE_LAYERS = "--num-layers", "model.num_layers="
_OF_SMALLER_JOB = frozenset({"--load", "--pretrained-checkpoint", "--save", "--rampup-batch-size"})
"""Flags of a command that its smaller jobs do without: checkpoints are of the full model, and so is a ramp's batch."""
# divisions of the layers that a command says are those of its own number of layers
_OF_MEGATRON = WordRules(
    groups=GROUPS, follows={GROUPS[PP]: (_LAYERS,)}, never_added=NEVER_ADDED, never_removed=NEVER_REMOVED
)
_OF_TORCHTITAN = WordRules(
    groups={flag_of(flag): flag_of(group) for flag, group in torchtitan_flags.GROUPS.items()},
    follows={flag_of(flag): tuple(map(flag_of, others)) for flag, others in torchtitan_flags.FOLLOWS.items()},
    never_removed=frozenset(map(flag_of, torchtitan_flags.NEVER_REMOVED)),
)
_RULES = {"megatron": _OF_MEGATRON, "mindspeed": _OF_MEGATRON}
"""Rules by which the flags of a command are exchanged in place, by the exporters whose words say a configuration."""
_RENAMED = {
    program.target: WordRules(groups={flag_of(f"--{key}"): PP for key in keys_of(program, STAGES)})
    if program is SWIFT
    else WordRules(
        groups={flag_of(f"{key}="): PP for key in keys_of(program, STAGES)}, follows={PP: (flag_of(_BRIDGE_LAYERS),)}
    )
    for program in (BRIDGE, SWIFT, VERL)
} | {"maxtext": WordRules(), "torchtitan": _OF_TORCHTITAN, WITH_FILE: _OF_TORCHTITAN}
"""The same for programs with settings over a recipe: their words say a part, and `current` the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFlags:
    """Function that writes configurations as the flags of one framework; it pickles into workers.

    Attributes:
        setting: Job, cluster and runtime of the configurations.
        target: Name of the exporter.
        is_smaller: Whether the job is a smaller one than the command's, so that flags tell its number of layers.
    """

    setting: Setting
    target: str
    is_smaller: bool = False

    def reduced(self, to: Reduction) -> ExportedFlags:
        """Return the function that writes the configurations of a smaller job."""
        setting = replace(self.setting, job=to.job(self.setting.job), cluster=to.cluster(self.setting.cluster))
        return replace(self, setting=setting, is_smaller=True)

    def __call__(self, config: ParallelConfig) -> Flags:
        """Return the flags of one configuration."""
        export = find_exporter(self.target.removesuffix("-toml"))(self.setting, config)
        words = export.arguments
        if self.target == WITH_FILE:
            words = torchtitan_flags.before_0_3(words)
        model = self.setting.job.model
        if self.is_smaller and tells_layers(self.target, model):
            words = (*words, *_words_of_layers(self.target, model, said=_LAYERS in words))
        elif self.target == "mindspeed" and _LAYERS not in words:  # with no-op layers the export says it
            words = (*words, _LAYERS, str(model.num_layers))
        refused = refused_flags(config) if self.target in _RULES else frozenset()
        refused |= _OF_SMALLER_JOB if self.is_smaller and self.target in _RULES else frozenset()
        return Flags(arguments=words, environment=export.environment, refused=refused)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidFlags:
    """Function that reads the configuration off the words of a command, and writes it as the exporter does.

    Attributes:
        setting: Job, cluster and runtime of the study; keys of the job that the words do not say are the study's.
        target: Name of the exporter.
    """

    setting: Setting
    target: str

    def __call__(self, words: Sequence[str]) -> Flags | None:
        """Return the flags that the words say; None if they do not tell a configuration."""
        try:
            setting, config = self._read(words)
        except ConfigError:
            return None
        return ExportedFlags(setting=setting, target=self.target)(config)

    def _read(self, words: Sequence[str]) -> tuple[Setting, ParallelConfig]:
        """Return the job and the configuration of a command; it may run on any multiple of the devices of a replica.

        Raises:
            ConfigError: a degree is missing, or a value is none.
        """
        cluster, runtime, stated = self.setting.cluster, self.setting.runtime, self.setting.job
        imported = import_flags(flags_among([Argument(text=word, line=0) for word in words], dashed=True))
        if imported.unsaid:
            raise ConfigError("cannot be read", key=imported.unsaid[0])
        one_copy = math.prod(imported.degrees.get(name, 1) for name in ("pp", "tp", "cp", "up"))
        dp = max(1, cluster.num_devices // one_copy // imported.copies) * imported.copies
        present = present_of(replace(imported, open={}), devices=one_copy * dp, model=stated.model, runtime=runtime)
        known = {field.name for field in fields(TrainingJob)}
        job = replace(stated, **{key: value for key, value in present.job.items() if key in known})
        fixed = job.fixed_values(sequence_parallel=runtime.sequence_parallel)
        return replace(self.setting, job=job), ParallelConfig(**{**fixed, **present.current})  # type: ignore[arg-type] # checked by it


@dataclass(frozen=True, kw_only=True, slots=True)
class PresentFlags:
    """Function that writes the configuration in use today, whatever the words of a command say of it.

    Attributes:
        write: Function that writes a configuration.
        current: Configuration in use today; without one the command says nothing, and a trial states all.
    """

    write: ExportedFlags
    current: ParallelConfig | None

    def __call__(self, _: Sequence[str]) -> Flags:
        """Return the flags of the configuration in use today."""
        return Flags() if self.current is None else self.write(self.current)


def flag_exporters(setting: Setting, current: ParallelConfig | None = None) -> dict[str, FlagExporter]:
    """Return the exporters of all frameworks that take flags, by name.

    Args:
        setting: Job, cluster and runtime of the study.
        current: Configuration in use today, if the study states it.
    """
    return {
        name: _exporter(name, ExportedFlags(setting=setting, target=name), current) for name in (*WITH_FLAGS, WITH_FILE)
    }


def _exporter(name: str, write: ExportedFlags, current: ParallelConfig | None) -> FlagExporter:
    read: ReadFlags | None = None
    if name in _RULES:
        read = SaidFlags(setting=write.setting, target=name)
    elif name in _RENAMED:
        read = PresentFlags(write=write, current=current)
    return FlagExporter(
        write=write,
        ends_command=name in ENDS_COMMAND,
        tells_layers=tells_layers(name, write.setting.job.model),
        read=read,
        rules={**_RULES, **_RENAMED}.get(name, WordRules()),
    )


def tells_layers(target: str, model: ModelSpec) -> bool:
    """Return whether flags of a framework tell the number of layers of a smaller model.

    Those of models whose layers are of several kinds would have to list the kinds.
    """
    if not model.is_plain or target not in {*_RULES, BRIDGE.target}:
        return False
    dense, period = model.plain.num_dense_layers, model.plain.moe_layer_period
    return not dense or (target in _RULES and period == 1)


def _words_of_layers(target: str, model: ModelSpec, *, said: bool) -> tuple[str, ...]:
    """Return the words for the number of layers; where they are said with no-op layers, for its dense ones only.

    Sources: Megatron-LM megatron/training/arguments.py (`moe_freq_type`, a list with an entry for each layer);
    MindSpeed-LLM mindspeed_llm/training/arguments.py (`--first-k-dense-replace`); Megatron-Bridge
    models/gpt_provider.py, whose `num_layers` a recipe sets.
    """
    if target == BRIDGE.target:
        return (f"{_BRIDGE_LAYERS}{model.num_layers}",)
    words = () if said else (_LAYERS, str(model.num_layers))
    dense = model.plain.num_dense_layers
    if not dense:
        return words
    if target == "mindspeed":
        return (*words, "--first-k-dense-replace", str(dense))
    return (*words, "--moe-layer-freq", f"([0]*{dense}+[1]*{model.num_layers - dense})")
