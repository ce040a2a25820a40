"""Real parsers of training frameworks, as far as each is installed: they read an export and return its values.

A parser returns values under the keys of our own reader (tests/oracles/frameworks/checks.py), so that both can be
compared and turned back into a configuration in the same way. It raises `Refused` if the framework does not accept the
export.

torchtitan: its `ConfigManager` over a recipe's `Trainer.Config`, `ParallelDims`, and the split into stages.
megatron: Megatron-LM's own parser and checks of arguments (benchmarks/support/megatron_parser.py).
mindspeed: megatron-core's `TransformerConfig` (a `ModelParallelConfig`), `DistributedDataParallelConfig` and its count
of micro-batches, for the arguments that MindSpeed-LLM passes on to it.
deepspeed: `DeepSpeedConfig`, with the number of data parallel ranks given as by a pipeline's topology.
flagscale: its keys become flags of Megatron-LM, which are read as those are.
gpt-neox: `DeepSpeedConfig`, for the keys that GPT-NeoX hands on to DeepSpeed; its own classes are in no package.
nemo: the arguments of `MegatronStrategy` and `MockDataModule` as their files declare them, then megatron-core.
nanotron: its dataclasses, read by dacite. They are extracted from their files, since 0.4 imports itself in a circle.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.support.megatron_parser import MegatronParser, layout_text
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tests.oracles.frameworks import deepspeed as deepspeed_rules
from tests.oracles.frameworks import flagscale, gpt_neox, megatron, mindspeed, renamed, torchtitan
from tests.oracles.frameworks.nemo import check_nemo
from tests.oracles.frameworks.published_rules import facts_of
from trials.command.host_program import HostPlan
from trials.knobs.places import without_flags
from tuner.export import Export
from tuner.export.flag_table import Flag, Values
from tuner.export.nemo import FIELDS
from tuner.export.parts import layers_of_parts
from tuner.imports.flags import flag_name
from tuner.imports.known_arguments import known_flags

Parser = Callable[[Export, Setting], Values]
KnobParser = Callable[[HostPlan, ParallelConfig, Setting], None]
"""Reads what a trial is given, and raises `Refused` if the framework does not accept it."""

_OF_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "bf16", "fp16"),
)
"""Keys of GPT-NeoX's file that DeepSpeed gets (gpt-neox megatron/neox_arguments/deepspeed_args.py)."""


class Refused(Exception):  # noqa: N818 # an answer of a framework, no error of ours
    """The framework does not accept an export."""


def torchtitan_parser() -> Parser:
    """Make torchtitan's parser.

    Raises:
        ImportError: torchtitan is not installed.
    """
    read_config = _torchtitan()

    def parse(export: Export, setting: Setting) -> Values:
        read = read_config(export.arguments, setting)
        found = _values_of_torchtitan(read, export.arguments, torchtitan.TORCHTITAN_FLAGS)
        if read.parallelism.pipeline_parallel_degree > 1:
            _split_by_torchtitan(read.parallelism, setting, found)
        return found

    return parse


def torchtitan_main_parser() -> Parser:
    """Make the parser of torchtitan's main branch: its dataclasses, whose fields an export's function sets.

    Raises:
        ImportError: torchtitan is not installed, or it is a release, which counts batches in sequences.
    """
    from torchtitan.config import ParallelismConfig, TrainingConfig

    if torchtitan.TOKENS.rpartition(".")[2] not in _names(TrainingConfig):
        raise ImportError("the installed torchtitan counts batches in sequences; the main branch is in no release")

    @dataclasses.dataclass(kw_only=True)
    class Recipe:
        training: Any = dataclasses.field(default_factory=TrainingConfig)
        parallelism: Any = dataclasses.field(default_factory=ParallelismConfig)
        activation_checkpoint: Any = None

    def parse(export: Export, setting: Setting) -> Values:
        said = torchtitan.check_torchtitan_main(export.text, facts_of(setting))
        scope: dict[str, Any] = {}
        with _refusals():
            exec(export.text, scope)  # noqa: S102 # what a user pastes
            read = scope["parallelise"](Recipe())
        return _values_of_torchtitan(read, said, torchtitan.TORCHTITAN_MAIN_FLAGS)

    return parse


def _torchtitan() -> Callable[[Sequence[str], Setting], Any]:
    """Make a function that reads flags with torchtitan's own classes.

    Raises:
        ImportError: torchtitan is not installed.
    """
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.tools.logging import logger

    logger.setLevel(logging.ERROR)  # each parse would log that the recipe's data are elsewhere
    recipe = ("--module", "llama3", "--config", "llama3_debugmodel")  # flags override what it says
    ConfigManager().parse_args(list(recipe))  # imports what a recipe needs

    def read_config(words: Sequence[str], setting: Setting) -> Any:
        # symmetric memory asks for the device's generation
        capability = patch("torch.cuda.get_device_capability", lambda *_: (9, 0))
        with _refusals(), patch("torch.cuda.is_available", lambda: True), capability:
            read = ConfigManager().parse_args([*recipe, *words])
            ParallelDims.from_config(read.parallelism, setting.cluster.num_devices)
        return read

    return read_config


def _values_of_torchtitan(read: Any, said: Iterable[str], table: Mapping[str, Flag]) -> dict[str, Any]:
    """Return what torchtitan read for the flags among the words of an export, and its policy of recomputation."""
    policies = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory-budget"}
    found: dict[str, Any] = {}
    for flag in table.keys() & set(said):
        section, name = flag.removeprefix("--").split(".")
        value = getattr(getattr(read, section), name.removeprefix("no_"))
        found[flag] = value != name.startswith("no_") if isinstance(value, bool) else value
    for modules in {torchtitan.MODULES, torchtitan.MAIN_MODULES} & found.keys():
        found[modules] = tuple(",".join(part) for part in found[modules])
    policy = read.activation_checkpoint
    found[torchtitan.POLICY] = "none" if policy is None else policies[type(policy).__qualname__.partition(".")[0]]
    return found


def _split_by_torchtitan(parallelism: Any, setting: Setting, found: Mapping[str, Any]) -> None:
    """Check that torchtitan cuts the model into the stages that we expect.

    Raises:
        Refused: torchtitan makes other stages, or refuses the split.
    """
    from types import SimpleNamespace

    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata

    model = SimpleNamespace(layers=[None] * setting.job.model.num_layers)
    with _refusals():
        stages, layers, first, last = _get_pipeline_metadata(
            SimpleNamespace(pp=parallelism.pipeline_parallel_degree), parallelism, model
        )
        if parallelism.module_fqns_per_model_part is None:
            parts = _generate_llm_fqn_per_model_part(stages, layers, first, last)
            held = {sum(name.startswith("layers.") for name in part) for part in parts}
            if held != {found[torchtitan.PER_STAGE]}:
                raise Refused(f"torchtitan makes stages of {sorted(held)} layers")


def _core() -> Callable[[Values, Setting, int], dict[str, Any]]:
    """Make a function that passes flags of Megatron-LM through megatron-core's classes and reads them back.

    Raises:
        ImportError: megatron-core is not installed.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {
        megatron.TP: "tensor_model_parallel_size",
        megatron.PP: "pipeline_model_parallel_size",
        megatron.CP: "context_parallel_size",
        megatron.VPP: "virtual_pipeline_model_parallel_size",
        megatron.LAYOUT: "pipeline_model_parallel_layout",
        megatron.EP: "expert_model_parallel_size",
        megatron.EXPERT_TP: "expert_tensor_parallel_size",
        "--sequence-parallel": "sequence_parallel",
        megatron.LEVELS: "hierarchical_context_parallel_sizes",
        "--moe-token-dispatcher-type": "moe_token_dispatcher_type",
        "--moe-grouped-gemm": "moe_grouped_gemm",
        megatron.GRANULARITY: "recompute_granularity",
        "--recompute-method": "recompute_method",
        "--recompute-num-layers": "recompute_num_layers",
        "--recompute-modules": "recompute_modules",
        "--bf16": "bf16",
        "--fp16": "fp16",
    }
    reduction = {
        "--use-distributed-optimizer": "use_distributed_optimizer",
        "--overlap-grad-reduce": "overlap_grad_reduce",
        "--overlap-param-gather": "overlap_param_gather",
        megatron.INSTANCES: "num_distributed_optimizer_instances",
        "--use-megatron-fsdp": "use_megatron_fsdp",
        megatron.SHARDING: "data_parallel_sharding_strategy",
        "--outer-dp-sharding-strategy": "outer_dp_sharding_strategy",
    }

    def through(values: Values, setting: Setting, num_layers: int) -> dict[str, Any]:
        model = setting.job.model
        said = {flag: list(value) if isinstance(value, tuple) else value for flag, value in values.items()}
        given = {name: said[flag] for flag, name in fields.items() if flag in said}
        if megatron.COMM in said:
            given["cp_comm_type"] = said[megatron.COMM][0]
        with _refusals():
            config = TransformerConfig(
                num_layers=num_layers,
                hidden_size=model.hidden_size,
                num_attention_heads=model.plain.num_heads,
                num_query_groups=model.plain.num_kv_heads,
                num_moe_experts=model.num_experts or None,
                add_bias_linear=False,
                pipeline_dtype=torch.bfloat16,
                **given,
            )
            ddp = DistributedDataParallelConfig(
                **{name: said[flag] for flag, name in reduction.items() if flag in said}
            )
            replicas = megatron.replicas(values, facts_of(setting))
            batches = ConstantNumMicroBatchesCalculator(said[megatron.GLOBAL], said[megatron.MICRO], replicas, False, 0)
        back = {flag: getattr(config, name) for flag, name in fields.items() if flag in said}
        back |= {flag: getattr(ddp, name) for flag, name in reduction.items() if flag in said}
        if megatron.COMM in said:
            back[megatron.COMM] = [config.cp_comm_type]
        if back.get(megatron.LAYOUT) is not None:
            back[megatron.LAYOUT] = layout_text(config.pipeline_model_parallel_layout)
        back[megatron.MICRO] = batches.micro_batch_size
        back[megatron.GLOBAL] = batches.get() * batches.micro_batch_size * replicas
        return {flag: tuple(value) if isinstance(value, list) else value for flag, value in (said | back).items()}

    return through


def megatron_parser() -> Parser:
    """Make the parser of Megatron-LM's arguments.

    Raises:
        ImportError: megatron-core is not installed.
    """
    parser = MegatronParser()

    def parse(export: Export, setting: Setting) -> Values:
        with _refusals():
            return parser.parse(export.arguments, export.environment, setting)

    return parse


def mindspeed_parser() -> Parser:
    """Make the parser of MindSpeed-LLM's arguments.

    Raises:
        ImportError: megatron-core is not installed.
    """
    through = _core()

    def parse(export: Export, setting: Setting) -> Values:
        values = _parse_published(mindspeed.MINDSPEED_FLAGS, export.arguments)
        layers = int(values.get(mindspeed.LAYERS, setting.job.model.num_layers))  # type: ignore[arg-type]
        shared = {flag: value for flag, value in values.items() if flag in megatron.MEGATRON_FLAGS}
        if shared.get("--moe-token-dispatcher-type") == "alltoall_seq":
            del shared["--moe-token-dispatcher-type"]
        if mindspeed.PER_CHUNK in values:
            each = int(values[mindspeed.PER_CHUNK]) * int(values[megatron.PP])  # type: ignore[arg-type]
            shared[megatron.VPP] = layers // each
        back = through(shared, setting, layers)
        return values | {flag: value for flag, value in back.items() if flag in values}

    return parse


def deepspeed_parser() -> Parser:
    """Make the parser of DeepSpeed's configuration.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    read_config = _deepspeed()

    def parse(export: Export, _: Setting) -> Values:
        content = json.loads(export.text)
        # the script's topology tells DeepSpeed the data parallel ranks, which the export states in a comment
        ranks = int(content["comments"][0].partition("dp=")[2].partition(",")[0])
        read = read_config(content, ranks)
        said = deepspeed_rules.flattened({name: value for name, value in content.items() if name != "comments"})
        further = {
            "zero_optimization.overlap_comm": read.zero_config.overlap_comm,
            deepspeed_rules.INTERVAL: read.pipeline["activation_checkpoint_interval"],
            deepspeed_rules.TP: read.tensor_parallel_config.autotp_size,
            "expert_parallel.enabled": read.expert_parallel_config.enabled,
            deepspeed_rules.EP: read.expert_parallel_config.autoep_size,
            # initialize() takes them from the mapping itself
            deepspeed_rules.UP: content.get("sequence_parallel_size"),
            deepspeed_rules.DP: content.get("data_parallel_size"),
        }
        return _common_values(read, said) | {key: value for key, value in further.items() if key in said}

    return parse


def _deepspeed() -> Callable[[Mapping[str, Any], int], Any]:
    """Make a function that reads a mapping with DeepSpeed's own class, given the number of data parallel ranks.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    # the CPU accelerator would compile its collectives first; no kernel of either accelerator runs here
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    import deepspeed.comm
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)

    def read_config(content: Mapping[str, Any], ranks: int) -> Any:
        class Topology:
            def get_data_parallel_world_size(self) -> int:
                return ranks

        with _refusals():
            return DeepSpeedConfig(dict(content), mpu=Topology())

    return read_config


def _common_values(read: Any, said: Values) -> dict[str, Any]:
    """Return what DeepSpeed read for the batch, ZeRO and the precision, by our keys."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    found = {
        deepspeed_rules.BATCH: read.train_batch_size,
        deepspeed_rules.MICRO: read.train_micro_batch_size_per_gpu,
        deepspeed_rules.ACCUMULATION: read.gradient_accumulation_steps,
        deepspeed_rules.STAGE: int(read.zero_config.stage),
    }
    offload = read.zero_config.offload_optimizer
    further = {
        "bf16.enabled": read.bfloat16_config.enabled,
        "fp16.enabled": read.float16_config.enabled,
        deepspeed_rules.OFFLOAD: offload and OffloadDeviceEnum(offload.device).value,
        "zero_optimization.offload_optimizer.pin_memory": offload and offload.pin_memory,
    }
    return found | {key: value for key, value in further.items() if key in said}


def gpt_neox_parser() -> Parser:
    """Make the parser of GPT-NeoX's file: DeepSpeed's, for the keys that GPT-NeoX hands on to it.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    read_config = _deepspeed()

    def parse(export: Export, setting: Setting) -> Values:
        content = yaml.safe_load(export.text)
        values = deepspeed_rules.flattened(content)
        stages = max(content[gpt_neox.PP], 1)
        handed = {name: value for name, value in content.items() if name in _OF_DEEPSPEED}
        read = read_config(handed, setting.cluster.num_devices // (stages * content[gpt_neox.TP]))
        return values | _common_values(read, values)

    return parse


def flagscale_parser() -> Parser:
    """Make the parser of FlagScale's file: its keys become flags, which Megatron-LM's parser reads.

    Raises:
        ImportError: megatron-core is not installed.
    """
    parser = MegatronParser()

    def parse(export: Export, setting: Setting) -> Values:
        # the file's keys don't say the environment, which a note tells
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        stated = [note for note in export.notes if name in note]
        variables = [(name, "1" if note.endswith(" 1") else None) for note in stated]
        with _refusals():
            return parser.parse(flagscale.arguments_of(export.text), variables, setting)

    return parse


def renamed_parser(program: str) -> Callable[[], Parser]:
    """Return a function that makes the parser of a program with keys of its own: they become Megatron-LM's flags."""

    def make() -> Parser:
        parser = MegatronParser()

        def parse(export: Export, setting: Setting) -> Values:
            job = setting.job
            given = {"batch": job.global_batch_size, "sequence": job.sequence_length} if program == "verl" else {}
            with _refusals():
                words = renamed.arguments_back(program, export.arguments, **given)
                return parser.parse(words, _without_connections(export.environment), setting)

        return parse

    return make


def _without_connections(environment: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Return the variables, without a number of connections of which Megatron-LM only wants that it is not 1."""
    return [(name, None if value == "32" else value) for name, value in environment]


def maxtext_parser() -> Parser:
    """Make the parser of MaxText's settings.

    Raises:
        ImportError: MaxText is not installed.
    """
    raise ImportError("MaxText is in no package that this project can install")


def nemo_parser() -> Parser:
    """Make the parser of NeMo's recipes.

    Raises:
        ImportError: NeMo 2 or megatron-core is not installed.
    """
    through = _core()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    root = _folder_of("nemo")
    strategy = _arguments_of(root / "lightning/pytorch/strategies/megatron_strategy.py", "MegatronStrategy")
    known = {
        "trainer.strategy.ddp": _names(DistributedDataParallelConfig),
        "trainer.strategy": strategy,
        "trainer": {"num_nodes", "devices"},  # pytorch_lightning.Trainer
        "model.config": _names(TransformerConfig),
        "optim.config": _names(OptimizerConfig),
        "data": _arguments_of(root / "collections/llm/gpt/data/mock.py", "MockDataModule"),
    }

    def parse(export: Export, setting: Setting) -> Values:
        values = check_nemo(export.text, facts_of(setting))
        for path in (*(FIELDS[flag] for flag in values if flag in FIELDS), *(v for v in values if v not in FIELDS)):
            owner, _, name = path.rpartition(".")
            if name not in known[owner]:
                raise Refused(f"NeMo knows no {path}")
        shared = {flag: value for flag, value in values.items() if flag in FIELDS and value is not None}
        back = through(shared, setting, setting.job.model.num_layers)
        return {**values, **back}

    return parse


def nanotron_parser() -> Parser:
    """Make the parser of nanotron's configuration.

    Raises:
        ImportError: nanotron or dacite is not installed.
    """
    import dacite

    root = _folder_of("nanotron")
    engines = Enum("PipelineEngine", ["afab", "1f1b"])
    scope: dict[str, Any] = {}
    exec("from dataclasses import dataclass\nfrom typing import *\nfrom enum import Enum, auto", scope)  # noqa: S102 # the files' own first lines
    # the engines themselves need process groups; their names are what the file says
    scope |= {
        "PipelineEngine": engines,
        "AllForwardAllBackwardPipelineEngine": lambda: engines["afab"],
        "OneForwardOneBackwardPipelineEngine": lambda: engines["1f1b"],
    }
    _define(root / "config/utils_config.py", ["cast_str_to_pipeline_engine"], scope)
    _define(root / "parallel/tensor_parallel/enum.py", ["TensorParallelLinearMode"], scope)
    _define(root / "config/parallelism_config.py", ["ParallelismArgs"], scope)
    _define(root / "config/config.py", ["TokensArgs"], scope)
    modes = scope["TensorParallelLinearMode"]
    hooks = {engines: scope["cast_str_to_pipeline_engine"], modes: lambda text: modes[text.upper()]}
    newer = {"recompute_layer", "context_parallel_size"} - _names(scope["ParallelismArgs"])

    def parse(export: Export, _: Setting) -> Values:
        content = yaml.safe_load(export.text)
        # keys that only the repository has: check their types by hand
        later = {name: value for name, value in content["parallelism"].items() if name in newer}
        if not all(type(value) is (bool if name == "recompute_layer" else int) for name, value in later.items()):
            raise Refused(str(later))
        of_package = {name: value for name, value in content["parallelism"].items() if name not in newer}
        strict = dacite.Config(strict=True, type_hooks=hooks)
        with _refusals():
            degrees = dacite.from_dict(scope["ParallelismArgs"], of_package, strict)
            tokens = dacite.from_dict(scope["TokensArgs"], content["tokens"] | {"train_steps": 1}, strict)
        found = {f"parallelism.{name}": getattr(degrees, name) for name in of_package}
        found |= {f"tokens.{name}": getattr(tokens, name) for name in content["tokens"]}
        found |= {f"parallelism.{name}": value for name, value in later.items()}
        found |= {f"optimizer.{name}": value for name, value in content["optimizer"].items()}
        return {key: value.name if isinstance(value, Enum) else value for key, value in found.items()}

    return parse


PARSERS: dict[str, Callable[[], Parser]] = {
    "deepspeed": deepspeed_parser,
    "bridge": renamed_parser("bridge"),
    "flagscale": flagscale_parser,
    "maxtext": maxtext_parser,
    "swift": renamed_parser("swift"),
    "verl": renamed_parser("verl"),
    "gpt-neox": gpt_neox_parser,
    "megatron": megatron_parser,
    "mindspeed": mindspeed_parser,
    "nanotron": nanotron_parser,
    "nemo": nemo_parser,
    "torchtitan": torchtitan_parser,
    "torchtitan-main": torchtitan_main_parser,
}
"""Factories of each framework's parser; a factory raises ImportError if the framework is not installed."""


OFFLOADS = (("NVTE_CPU_OFFLOAD_V1", "1"),)
"""Variable without which Transformer Engine 2.10 and later do not offload activations; the catalog says so."""


def megatron_knobs() -> KnobParser:
    """Make the parser of what Megatron-LM's trials are given.

    Raises:
        ImportError: megatron-core is not installed.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)  # each parse would log its layout
    parser = MegatronParser(transformer_engine="2.12.0")

    def parse(plan: HostPlan, _: ParallelConfig, setting: Setting) -> None:
        unknown = [word for word in plan.flags if word.startswith("--") and word not in parser.flags]
        if unknown:
            raise Refused(f"Megatron-LM has no {unknown}")
        with _refusals():
            parser.parse(plan.flags, (*plan.environment, *OFFLOADS), setting)

    return parse


def mindspeed_knobs() -> KnobParser:
    """Make the parser of what MindSpeed-LLM's trials are given: Megatron-LM's for the flags that are Megatron-LM's.

    Raises:
        ImportError: megatron-core is not installed.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)  # each parse would log its layout
    parser = MegatronParser(transformer_engine="2.12.0")
    exported = mindspeed.MINDSPEED_FLAGS.keys() - parser.flags

    def parse(plan: HostPlan, _: ParallelConfig, setting: Setting) -> None:
        own = {word for word in plan.flags if word.startswith("--") and word not in parser.flags}
        unknown = {word for word in own if flag_name(word) not in known_flags()}
        if unknown:
            raise Refused(f"MindSpeed-LLM has no {sorted(unknown)}")
        # no-op layers, the length of chunks and the kernel that permutes tokens are MindSpeed-LLM's own
        replaced = {mindspeed.LAYERS, mindspeed.PER_CHUNK, "--moe-permute-fusion"}
        words = without_flags(plan.flags, frozenset(own | exported | replaced))
        size = next(int(after) for word, after in pairwise(plan.flags) if word == megatron.PP)
        if setting.job.model.num_layers % size:
            return
        with _refusals():
            parser.parse(words, plan.environment, setting)

    return parse


def torchtitan_knobs() -> KnobParser:
    """Make the parser of what torchtitan's trials are given.

    Raises:
        ImportError: torchtitan is not installed.
    """
    read_words = _torchtitan()

    def parse(plan: HostPlan, config: ParallelConfig, setting: Setting) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read = read_words(plan.flags, setting)
        if read.parallelism.pipeline_parallel_degree > 1 and config.assignment.layers == ():
            planned = layers_of_parts(setting, config)
            _split_by_torchtitan(read.parallelism, setting, {torchtitan.PER_STAGE: planned[0]})

    return parse


def deepspeed_knobs() -> KnobParser:
    """Make the parser of what DeepSpeed's trials are given, which is a file.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    read_config = _deepspeed()

    def parse(plan: HostPlan, config: ParallelConfig, _: Setting) -> None:
        ((_, _, text),) = plan.files
        content = json.loads(text)
        read = read_config(content, config.dp)
        for key, value in deepspeed_rules.flattened(content).items():
            section, _, name = key.partition(".")
            if section == "zero_optimization" and "." not in name:
                fields = type(read.zero_config).model_fields
                field = next((own for own, one in fields.items() if name in (own, one.alias)), None)
                if field is None:
                    raise Refused(f"DeepSpeed has no {key}")
                if getattr(read.zero_config, field) != value:
                    raise Refused(f"DeepSpeed read {key} as {getattr(read.zero_config, field)}, not {value}")

    return parse


def nemo_knobs() -> KnobParser:
    """Make the check of what NeMo's trials are given: fields of the configurations that recipes hold.

    Raises:
        ImportError: megatron-core is not installed.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    owners = {
        "trainer.strategy.ddp": DistributedDataParallelConfig,
        "model.config": TransformerConfig,
        "optim.config": OptimizerConfig,
    }

    def parse(plan: HostPlan, _: ParallelConfig, __: Setting) -> None:
        for word in plan.knobs:
            path, _, text = word.partition("=")
            owner, _, name = path.rpartition(".")
            fields = {field.name: field for field in dataclasses.fields(owners[owner])}
            if name not in fields:
                raise Refused(f"NeMo has no {path}")
            value = yaml.safe_load(text)
            if not _has_type(value, str(fields[name].type)):
                raise Refused(f"{path} is a {fields[name].type}, no {text}")

    return parse


def _has_type(value: Any, declared: str) -> bool:
    """Return whether a value is of a declared type, as far as its words tell."""
    kinds = {bool: "bool", int: "int", str: "str", type(None): "None"}
    words = declared.replace("Optional", "None").replace("Literal", "str")
    return kinds[type(value)] in words


KNOB_PARSERS: dict[str, Callable[[], KnobParser]] = {
    "deepspeed": deepspeed_knobs,
    "megatron": megatron_knobs,
    "mindspeed": mindspeed_knobs,
    "nemo": nemo_knobs,
    "torchtitan": torchtitan_knobs,
}
"""Factories of the readers of trials with knobs; a factory raises ImportError if the framework is not installed."""


class _refusals:  # noqa: N801 # reads as a statement
    """Context that turns every exception of a framework into `Refused`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, Refused):
            raise Refused(f"{type(error).__name__}: {error}") from error


def _parse_published(table: Mapping[str, Flag], arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments with argparse, declared as the framework declares them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, flag in table.items():
        if flag.kind == "switch":
            parser.add_argument(name, action="store_true", dest=name, default=None)
            continue
        parser.add_argument(
            name,
            dest=name,
            type=int if flag.kind.startswith("number") else str,
            nargs="+" if flag.kind.endswith("s") else None,
            choices=flag.choices or None,
        )
    try:
        read = vars(parser.parse_args(list(arguments)))
    except (argparse.ArgumentError, SystemExit) as error:
        raise Refused(str(error)) from error
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in read.items() if value is not None
    }


def _folder_of(package: str) -> Path:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    return Path(next(iter(spec.submodule_search_locations)))


def _definitions(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    if not path.is_file():
        raise ImportError(f"{path} is not there")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node


def _define(path: Path, names: Sequence[str], scope: dict[str, Any]) -> None:
    """Execute the definitions of those names from their file."""
    chosen = [node for node in _definitions(path) if node.name in names]
    assert len(chosen) == len(names), f"{path} defines {names}"
    exec(compile(ast.Module(body=list(chosen), type_ignores=[]), str(path), "exec", dont_inherit=True), scope)  # noqa: S102 # the framework's own code


def _arguments_of(path: Path, name: str) -> set[str]:
    """Return the names of the arguments of a class, as its file declares them."""
    for node in _definitions(path):
        if node.name == name:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    return {argument.arg for argument in (*inner.args.args, *inner.args.kwonlyargs)}
    raise ImportError(f"{path} has no {name}")


def _names(dataclass: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(dataclass)}
