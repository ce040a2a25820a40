"""Parts of the golden figures: what is asked of the program, nearly all of it through its command line.

A part yields figures by name. It is called in an empty working directory, where it may write.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.support.golden_doors import ROOT, ask, measured_predictions, run_here
from benchmarks.support.shipped_runs import shipped_runs

STUDIES = ROOT / "configs" / "studies"
FLEXPARALLEL = sorted((STUDIES / "flexparallel").glob("*.yaml"))
ALL = 10_000_000
"""More configurations than any grid has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Figures with one digest.

    Attributes:
        name: Name of the figures within their part.
        whole: All values, of which the digest is taken.
        shown: Values that are recorded so that they can be read.
    """

    name: str
    whole: Any
    shown: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Figures of one kind.

    Attributes:
        figures: Function that computes them; it gets the folder of the stored studies.
        needs: Library without which they cannot be computed; empty if there is none.
    """

    figures: Callable[[Path], Iterator[Figure]]
    needs: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether the library is installed."""
        return not self.needs or find_spec(self.needs) is not None


def predictions(_: Path) -> Iterator[Figure]:
    """Predict all measured rows, each source with one digest."""
    for source, rows in measured_predictions(shipped_runs()):
        yield Figure(name=source, whole=rows, shown={"rows": len(rows), "first": rows[0]})


RANKED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    *((f"flexparallel/{path.stem}", 50, ()) for path in FLEXPARALLEL),
    *((name, 10, ()) for name in ("cpu-gpt", "cpu-jax", "cpu-moe", "cpu-torch-planned", "llama3-70b-known-knobs")),
    *((name, 10, ()) for name in ("llama3-8b-dgx-h100", "llama3-8b-sft", "ultrascale-llama-8b-128")),
    *((f"heterogeneous/{name}", 10, ()) for name in ("llama-7b-v100-8", "gpt-13b-v100-16", "gpt-22b-v100-64")),
    ("unlike-hosts", 10, ("space.mbs=[2]", "space.tp=[4]")),
    ("llama3-8b-dgx-h100", 10, ("space.recompute=[none,full]", "space.zero_stage=[1,3]")),
    (
        "llama3-8b-dgx-h100",
        10,
        ("model=deepseek-v3", "cluster.hosts=64", "space.expert_tp=[1,8]", "current={pp: 8, tp: 8, dp: 8}"),
    ),
)
"""Studies, the number of configurations that are shown of each, and changed keys. Large mixed clusters take minutes."""


def ranks(_: Path) -> Iterator[Figure]:
    """Rank the whole grid of each study, count its space, and predict some of its configurations in full."""
    for name, count, changes in RANKED:
        study, options = STUDIES / f"{name}.yaml", _set(changes)
        space, ranked = ask("space", study, *options), ask("rank", study, "--top", ALL, *options)
        assert ranked["status"] == 0, f"an example study has candidates, but {ranked['messages']}"
        rows = ranked["answer"]["configs"]
        layouts = [_config(row).replace(",assignment=", ",").rstrip(",") for row in _spread(rows, 5)]
        full = [ask("predict", study, "--config", layout, *options) for layout in layouts]
        shown = [f"{_config(row)} {row['step_time_s']!r} {row['peak_memory_bytes']!r}" for row in rows[:count]]
        yield Figure(
            name=" ".join((name, *changes)),
            whole={"space": space, "rank": ranked, "predictions": full},
            shown={"space": space["answer"], "predicted": full[0]["answer"], "top": shown},
        )


MEGATRON = ("runtime=megatron-core", "space.zero_stage=[1,3]", "space.recompute=[none,selective,full]")
EXPORTED: dict[str, tuple[str, ...]] = {
    "megatron": MEGATRON,
    "nemo": MEGATRON,
    "flagscale": MEGATRON,
    "json": MEGATRON,
    "mindspeed": ("runtime=mindspeed", "space.recompute=[none,full]"),
    "nanotron": ("runtime=nanotron", "space.zero_stage=[0,1]", "space.recompute=[none,full]"),
    "torchtitan": ("runtime=torchtitan", "job.zero_stage=3", "space.recompute=[none,full]"),
    "torchtitan-main": ("runtime=torchtitan", "job.zero_stage=3", "space.recompute=[none,full]"),
    "deepspeed": ("runtime=megatron-deepspeed", "space.recompute=[none,full]"),
    "gpt-neox": ("runtime=gpt-neox", "space.zero_stage=[0,1]", "space.recompute=[none,full]"),
}
"""Targets, and the keys of the studies whose layouts they get."""

MODELS = ("llama3-8b", "mixtral-8x7b")
LAYOUTS = 10
"""Layouts that are exported for a target and a model."""


def exports(_: Path) -> Iterator[Figure]:
    """Export layouts spread over the ranks of a dense model and of one with experts, for all targets."""
    study = STUDIES / "llama3-8b-dgx-h100.yaml"
    for target, changes in EXPORTED.items():
        for model in MODELS:
            options = _set((*changes, f"model={model}", "job.sequence_length=4096"))
            rows = ask("rank", study, "--top", ALL, *options)["answer"]["configs"]
            layouts = [_config(row) for row in _spread(rows, LAYOUTS)]
            done = [ask("export", study, "--to", target, "--config", layout, *options) for layout in layouts]
            yield Figure(
                name=f"{target} {model}",
                whole=done,
                shown={"layouts": layouts, "first": done[0]["answer"], "statuses": [one["status"] for one in done]},
            )


STORED = {"replayed": "sqlite:///replayed.db", "simulated": "journal:///simulated.log"} | {
    name: f"sqlite:///{name}.db" for name in ("knobs", "proxied")
}
"""Studies in the folder `stored`, and the storage of each."""

QUESTIONS = (
    ("status",),
    ("trials",),
    ("best",),
    ("estimate", "--tokens", "1e12"),
    ("rank", "--top", ALL),
    ("export", "--to", "megatron"),
    ("export", "--to", "json"),
)
"""Commands that answer from a study's trials."""


def record_studies(folder: Path) -> None:
    """Run the studies whose storage is not yet in the folder, and keep what each has stored."""
    for name, storage in STORED.items():
        packed = _packed(folder, storage)
        if packed.exists():
            continue
        _bring(folder)
        run_here(Path(f"{name}.yaml"), storage)
        copy = Path(f"copy-{packed.stem}")
        done = ask("backup", f"{name}.yaml", copy, "--storage", storage)
        assert done["status"] == 0, f"a study that has just run can be copied, but {done['messages']}"
        packed.write_bytes(gzip.compress(copy.read_bytes(), mtime=0))


def stored(folder: Path) -> Iterator[Figure]:
    """Ask the stored studies, which a version before may have run."""
    _bring(folder)
    for name, storage in STORED.items():
        packed = _packed(folder, storage)
        Path(packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        yield from _answers(name, storage, Path(f"{name}.yaml"))


SOUGHT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ultrascale-llama-8b-128", ("search.max_trials=6", "search.draws=100", "search.parallel_trials=1")),
    ("flexparallel/llama2-34b-16", ("search.max_trials=6", "search.draws=100", "search.seed=3")),
    ("llama3-8b-sft", ("search.max_trials=4", "search.draws=50")),
)
"""Studies that are run anew beside those of the folder `stored`, and changed keys."""


def sequences(folder: Path) -> Iterator[Figure]:
    """Run studies anew from fixed seeds, without Ray, and ask for what they tried and concluded."""
    _bring(folder)
    for name, storage in STORED.items():
        run_here(Path(f"{name}.yaml"), storage)
        yield from _answers(name, storage, Path(f"{name}.yaml"), QUESTIONS[:3])
    for name, changes in SOUGHT:
        study, storage = STUDIES / f"{name}.yaml", f"sqlite:///{Path(name).name}.db"
        run_here(study, storage, changes)
        yield from _answers(name, storage, study, QUESTIONS[:3], changes)


def _answers(
    name: str,
    storage: str,
    study: Path,
    questions: Sequence[tuple[Any, ...]] = QUESTIONS,
    changes: tuple[str, ...] = (),
) -> Iterator[Figure]:
    for question in questions:
        told = ask(question[0], study, "--storage", storage, *question[1:], *_set(changes))
        shown = _tried(told["answer"]) if question == ("trials",) else told["status"]
        yield Figure(name=f"{name}: {' '.join(map(str, question))}", whole=told, shown=shown)


def _tried(answer: dict[str, Any]) -> list[str]:
    return [f"{_text(one['config'])} {one['status']} {one['step_time_s']!r}" for one in answer["trials"]]


PLANNED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("flexparallel/llama-7b-8", "tp=4,dp=2,mbs=1", ()),
    ("flexparallel/llama-7b-8", "tp=4,dp=2,mbs=1", ("--planner", "recursive")),
    (
        "flexparallel/llama-7b-8",
        "tp=8,mbs=1",
        ("--planner", "recursive", "--diagnose", "--pin", "op=*.up,dim=ffn,axis=tp", "--explain", "colours"),
    ),
    ("flexparallel/llama3-8b-8", "tp=2,dp=4,mbs=1", ("--planner", "recursive", "--whole-axes")),
    ("flexparallel/mixtral-8x7b-64", "pp=8,tp=2,dp=4,ep=4,mbs=1", ("--planner", "recursive")),
    ("cpu-torch-planned", "tp=2,dp=4,mbs=2", ()),
)
"""Studies, configurations and further options of `meshtune plan`."""


def plans(_: Path) -> Iterator[Figure]:
    """Plan a step of models of the catalog, and predict a configuration with its plan."""
    for name, config, options in PLANNED:
        told = ask("plan", STUDIES / f"{name}.yaml", "--config", config, *options)
        yield Figure(name=" ".join((name, config, *options)), whole=told, shown=_plan_shown(told))
    for name in ("llama3-8b-dgx-h100", "cpu-torch-planned"):
        told = ask("predict", STUDIES / f"{name}.yaml", "--config", "tp=2,dp=4", "--plan")
        yield Figure(name=f"{name} predict --plan", whole=told, shown=told["status"])


def _plan_shown(told: dict[str, Any]) -> dict[str, Any]:
    kept = ("mesh", "comm_s", "step_time_s", "peak_memory_bytes", "order")
    answer = told["answer"] or {}
    return {"status": told["status"], **{key: answer[key] for key in kept if key in answer}}


SIMULATED: tuple[tuple[str, str, str], ...] = (
    ("flexparallel/gpt-13b-32", "pp=2,tp=8,dp=2,mbs=2", "1f1b"),
    ("flexparallel/gpt-13b-32", "pp=4,tp=2,dp=4,mbs=1", "gpipe"),
    ("flexparallel/gpt-13b-32", "pp=4,tp=2,dp=4,mbs=1", "zero-bubble"),
    ("flexparallel/gpt-13b-32", "pp=4,tp=1,dp=8,vpp=10,mbs=1", "1f1b"),
    ("flexparallel/mixtral-8x7b-64", "tp=8,dp=2,cp=4,ep=8,mbs=1", "1f1b"),
    ("heterogeneous/llama-7b-v100-8", "pp=2,tp=4,mbs=2", "1f1b"),
    ("unlike-hosts", "pp=3,tp=8,dp=1,mbs=2", "1f1b"),
)
"""Studies, configurations and schedules of `meshtune simulate`."""


def simulations(_: Path) -> Iterator[Figure]:
    """Simulate single steps."""
    for name, config, schedule in SIMULATED:
        told = ask("simulate", STUDIES / f"{name}.yaml", "--config", config, "--schedule", schedule)
        yield Figure(name=f"{name} {config} {schedule}", whole=told, shown=told["answer"] or told["messages"])


def _own_steps(model: str, target: str, *questions: tuple[str, ...]) -> Iterator[Figure]:
    for file in (ROOT / "docs" / "examples" / "own-step").glob("*.py"):
        shutil.copy(file, ".")
    study = Path("own.yaml")
    study.write_text(
        f"name: own\nmodel: {{{model}}}\ncluster: {{name: cpu-host, hosts: 1, devices_per_host: 4}}\n"
        f"trial: {{backend: {target}}}\n",
        encoding="utf-8",
    )
    ranked = ask("rank", study, "--top", ALL)
    rows = (ranked["answer"] or {}).get("configs", [])
    yield Figure(name="rank", whole=ranked, shown=[f"{_config(row)} {row['step_time_s']!r}" for row in rows[:10]])
    for question in questions:
        told = ask(question[0], study, *question[1:])
        yield Figure(name=" ".join(question), whole=told, shown=told["messages"])


def own_jax_steps(_: Path) -> Iterator[Figure]:
    """Rank a JAX step of the documentation; each further command would trace it for many seconds."""
    return _own_steps("jax: 'tiny_decoder:step'", "jax")


def own_torch_steps(_: Path) -> Iterator[Figure]:
    """Rank and export a torch step of the documentation."""
    return _own_steps("torch: 'tiny_torch:step'", "torch", ("export", "--to", "torch"))


PARTS = {
    "predictions": Part(figures=predictions),
    "ranks": Part(figures=ranks),
    "exports": Part(figures=exports),
    "stored": Part(figures=stored),
    "plans": Part(figures=plans),
    "simulations": Part(figures=simulations),
    "sequences": Part(figures=sequences),
    "own_jax_steps": Part(figures=own_jax_steps, needs="jax"),
    "own_torch_steps": Part(figures=own_torch_steps, needs="torch"),
}
"""All parts by name."""


def _set(changes: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for change in changes for word in ("--set", change))


def _text(config: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in config.items())


def _config(row: dict[str, Any]) -> str:
    """Return the configuration of a row of `rank`, whose dimensions come first, as `--config` takes it."""
    names = list(row)
    return _text({name: row[name] for name in names[: names.index("step_time_s")]})


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Return `count` rows from the first to the last at equal distances."""
    last = len(rows) - 1
    return [rows[at] for at in sorted({round(last * each / max(1, count - 1)) for each in range(count)})]


def _packed(folder: Path, storage: str) -> Path:
    return folder / f"{storage.rpartition('/')[2]}.gz"


def _bring(folder: Path) -> None:
    for file in (*folder.glob("*.yaml"), *folder.glob("*.csv")):
        shutil.copy(file, ".")
