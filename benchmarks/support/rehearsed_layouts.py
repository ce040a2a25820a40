"""Layouts of training frameworks, rehearsed: what the framework itself says of each stage.

A framework is an entry of FRAMEWORKS: the program and its flags for a configuration, the packages it needs, and its
layouts. All layouts of a framework run in one process, which imports the framework once.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.support.megatron_parser import model_flags
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig, parse_config
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import find_cluster
from tests.support.rehearsal.megatron_study import ENGINE
from tuner.export import find_exporter
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.program import Program
from tuner.rehearsal.run import cases_of, one_rank_a_stage, rehearse
from tuner.space.enumeration import SpaceOptions, broken_rules

CLUSTER, DEVICES = "dgx-h100", 8
LIMIT_S = 7200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One configuration of a job on a cluster of CLUSTER's hosts.

    Attributes:
        text: Degrees and dimensions, as `--config` takes them.
        model: Model of the catalog.
        fields: Fields of the model that are replaced.
        length: Tokens of a sequence.
        rounds: Micro-batches of each replica, as a multiple of pp.
        further: Further flags of the framework.
    """

    text: str
    model: str = "llama3-8b"
    fields: tuple[tuple[str, Any], ...] = (("num_layers", 4),)
    length: int = 4096
    rounds: int = 1
    further: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Framework that can be rehearsed.

    Attributes:
        runtime: Its runtime profile.
        target: Its export.
        script: Training program.
        flags: Flags of model and data of a setting, beside those of the export.
        missing: Returns what is not installed; empty if all is.
        packages: Further folder of Python packages; None without one.
        layouts: Layouts.
    """

    runtime: str
    target: str
    script: Path
    flags: Callable[[Setting], list[str]]
    missing: Callable[[], str]
    packages: Path | None = None
    layouts: tuple[Layout, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RehearsedLayout:
    """What a framework said of a layout.

    Attributes:
        layout: The layout.
        setting: Its job, cluster and runtime.
        config: Its configuration.
        broken: Sentences of our rules that it breaks, by rule.
        answers: Answer of the first rank of each stage.
    """

    layout: Layout
    setting: Setting
    config: ParallelConfig
    broken: dict[str, str]
    answers: tuple[RankAnswer, ...]


def rehearsed(framework: Framework, layouts: Sequence[Layout]) -> Iterator[RehearsedLayout]:
    """Rehearse layouts of a framework and yield each as soon as its last stage has answered."""
    settings = [setting_of(framework, layout) for layout in layouts]
    cases = [
        cases_of(program_for(framework, *setting, *layout.further), setting[1], one_rank_a_stage(setting[1]), None)
        for layout, setting in zip(layouts, settings, strict=True)
    ]
    answers = rehearse(
        [case for of_layout in cases for case in of_layout],
        device=settings[0][0].cluster.devices[0],
        limit_s=LIMIT_S,
        unconfined=True,
        environment=environment_for(framework),
    )
    for layout, (setting, config), own in zip(layouts, settings, cases, strict=True):
        yield RehearsedLayout(
            layout=layout,
            setting=setting,
            config=config,
            broken=broken_rules(setting, SpaceOptions(), config),
            answers=tuple(next(answers) for _ in own),
        )


def setting_of(framework: Framework, layout: Layout) -> tuple[Setting, ParallelConfig]:
    """Return the setting and the configuration of a layout, on as many hosts as it has devices."""
    runtime = find_runtime(framework.runtime)
    config = parse_config(layout.text, {"sequence_parallel": runtime.sequence_parallel, "zero_stage": 1})
    model = find_model(layout.model).changed(**dict(layout.fields))
    batch = config.dp * config.mbs * config.pp * layout.rounds
    job = TrainingJob(model=model, sequence_length=layout.length, global_batch_size=batch)
    hosts = -(-config.num_devices // DEVICES)
    return Setting(job=job, cluster=find_cluster(CLUSTER, hosts=hosts), runtime=runtime), config


def program_for(framework: Framework, setting: Setting, config: ParallelConfig, *further: str) -> Program:
    """Return a framework's training program with the flags of model and data, those of the export, and `further`."""
    exported = find_exporter(framework.target)(setting, config)
    return Program(
        interpreter=sys.executable,
        script=framework.script,
        module=None,
        arguments=(*framework.flags(setting), *exported.arguments, *further),
        directory=framework.script.parent,
        environment=dict(exported.environment),
    )


def environment_for(framework: Framework) -> dict[str, str]:
    """Return the variables of this process, with the framework's packages on the path."""
    searched = [str(framework.packages)] * (framework.packages is not None)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*searched, os.environ.get("PYTHONPATH", "")])}


def _megatron_flags(setting: Setting) -> list[str]:
    """Return flags of the model, of no data, and of a fused rotary embedding, which is the default."""
    model = setting.job.model
    left_out = {"--no-rope-fusion"} | ({"--swiglu"} if not model.plain.gated_ffn else set())
    flags = [flag for flag in model_flags(setting) if flag not in left_out]
    vocabulary = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size))
    moe = ["--moe-grouped-gemm"] * model.is_moe
    norm = "RMSNorm" if model.norm == "rms" else "LayerNorm"
    return [*flags, *vocabulary, *moe, "--normalization", norm]


@cache
def _missing_megatron() -> str:
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core"
    return "" if ENGINE.is_dir() else "Transformer Engine's Python code"


_MEGATRON = (
    Layout(text="dp=8,mbs=1", rounds=2),
    *(Layout(text=text) for text in ("dp=8,mbs=2", "dp=8,mbs=1,zero_stage=0")),
    *(Layout(text=f"tp={tp},dp={8 // tp},mbs=1") for tp in (2, 4, 8)),
    Layout(text="tp=4,dp=2,mbs=1,sequence_parallel=false"),
    Layout(text="tp=2,dp=4,mbs=2,zero_stage=0"),
    *(Layout(text=f"tp=2,dp=4,mbs=1,recompute={mode}") for mode in ("selective", "full")),
    *(Layout(text=f"dp=8,mbs=1,recompute={mode}") for mode in ("selective", "full")),
    Layout(text="pp=2,dp=4,mbs=1"),
    Layout(text="pp=2,tp=2,dp=2,mbs=1"),
    Layout(text="pp=4,tp=2,dp=1,mbs=1"),
    Layout(text="pp=4,tp=2,dp=2,mbs=1,recompute=full"),
    Layout(text="pp=4,tp=2,dp=2,mbs=1", rounds=3),
    Layout(text="pp=2,tp=2,dp=2,vpp=2,mbs=1"),
    Layout(text="pp=2,tp=2,dp=2,vpp=4,mbs=1", fields=(("num_layers", 8),)),
    Layout(text="pp=2,tp=2,dp=2,vpp=2,mbs=1,recompute=full"),
    Layout(text="pp=2,tp=4,dp=1,mbs=1,sequence_parallel=false"),
    Layout(text="pp=2,tp=2,dp=2,mbs=1,zero_stage=0"),
    *(Layout(text=f"cp={cp},dp={8 // cp},mbs=1", length=16384) for cp in (2, 4)),
    Layout(text="cp=4,tp=2,dp=1,mbs=1", length=16384),
    Layout(text="cp=2,dp=4,mbs=1,recompute=selective", length=16384),
    Layout(text="cp=2,tp=2,dp=2,mbs=1,recompute=full", length=16384),
    Layout(text="pp=2,cp=2,tp=2,dp=1,mbs=1", length=16384),
    Layout(text="up=4,dp=2,mbs=1", length=16384),
    *(
        Layout(text=text, model="mixtral-8x7b")
        for text in (
            "ep=8,dp=8,mbs=1",
            "ep=4,dp=8,mbs=1",
            "tp=2,ep=4,dp=4,mbs=1",
            "tp=2,ep=4,expert_tp=1,dp=4,mbs=1",
            "pp=2,ep=4,dp=4,mbs=1",
            "ep=8,dp=8,mbs=1,recompute=full",
            "pp=2,ep=2,tp=2,dp=2,vpp=2,mbs=1",
        )
    ),
    Layout(text="tp=16,dp=1,mbs=1"),
    Layout(text="cp=8,dp=1,mbs=1", length=4100),
)

FRAMEWORKS: dict[str, Framework] = {
    "megatron-core": Framework(
        runtime="megatron-core",
        target="megatron",
        script=Path(__file__).parents[2] / "tests" / "support" / "rehearsal" / "pretrain.py",
        flags=_megatron_flags,
        missing=_missing_megatron,
        packages=ENGINE,
        layouts=_MEGATRON,
    )
}
"""Frameworks by name."""
