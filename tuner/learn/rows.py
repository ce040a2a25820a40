"""Write a run as a row of measured runs (configs/measured/README.md), and check it by reading the row back.

A row has columns for the sizes of a plain decoder. The remarks that the reader knows (costmodels/calibration) say the
rest: tied embeddings, gates, a size of heads, uneven stages. Where they cannot, a file of the model stands beside the
rows. A run that no row can say is refused, never written in part.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from costmodels.calibration.measured_runs import COLUMNS, GIB, OPTIONAL_COLUMNS, read_measured
from costmodels.calibration.sources import NO_FACTS, setting_of
from costmodels.job.facts import facts, shown
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile, find_runtime, shipped_runtimes
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from costmodels.step.memory.peak import MemoryMeaning, estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from hardware.io.temporary import temporary_folder
from tuner.study_file.text import model_text

ROW_COLUMNS = (*COLUMNS[:-1], *OPTIONAL_COLUMNS, COLUMNS[-1])
"""Columns of a pool's file; the remarks are last."""

PROVENANCE = ("source", "source_url_or_repo_path", "notes")
"""Columns that say where a row comes from, and nothing of the run."""

RESULTS = ("step_seconds", "peak_mem_gib")

ROUGH = 0.1
"""Largest difference of the logarithms of two predictions of one run, as it was read and from its row. Columns know a
network by its kind and bandwidth only, and what they do not know must not matter more (assumed: half of the error that
predictions have at best)."""

_OF_ROW = ("sequence_length", "global_batch_size", "precision", "optimizer", "recompute_unit", "shared_master_weights")
_OF_MODEL = ("hidden_size", "layers", "embedding", "head", "norm", "tied_embeddings", "num_mtp_layers", "mtp_layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRun:
    """Run of the user's own, or of a row that is written anew.

    Attributes:
        setting: Job, cluster and runtime of the run; of the runtime's profile the name and the facts count.
        config: Parallelism configuration of the run.
        step_time_s: Time of a step [s]; None where the run failed or stated its memory alone.
        peak_memory_bytes: Peak memory of a device [bytes]; None if unknown.
        memory: Meaning of that peak.
        failure: Reason why it gave no result, such as `out of memory`; empty if it gave one.
        source: Name of the runs that share software and cluster with it.
        place: Path or address of what it was read from; empty if that must not be told.
        remarks: Further remarks of the row.
    """

    setting: Setting
    config: ParallelConfig
    step_time_s: float | None
    peak_memory_bytes: int | None
    memory: MemoryMeaning
    failure: str = ""
    source: str
    place: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Row of a pool, and the model's file that it names.

    Attributes:
        cells: Texts by column, of ROW_COLUMNS.
        model_file: Text of the file that `architecture` names; empty where the columns say the model.
    """

    cells: Mapping[str, str]
    model_file: str = ""

    @property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """Cells that say what ran, without its results and where the row comes from."""
        return identity_of(self.cells)


def identity_of(cells: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the cells that say what ran; degrees of 1 may be left out."""
    left_out = {*PROVENANCE, *RESULTS, "model", "tokens_per_s_per_device", "tflops_per_device", "mfu"}
    return tuple((name, text) for name in ROW_COLUMNS if name not in left_out and (text := cells.get(name, "")))


def row_of(run: OwnRun, models: str) -> Row:
    """Return the row of a run, which reads back as that run.

    Args:
        run: Run.
        models: Folder of model files, as the rows shall name it.

    Raises:
        ConfigError: No row can say the run; the message names the parts.
    """
    base = _base_of(run.setting.runtime)
    with temporary_folder("checking a row") as folder:
        row, differs = _attempt(run, base, models, folder, of_file=False)
        if "model" in differs:
            row, differs = _attempt(run, base, models, folder, of_file=True)
    if differs:
        rule = "is not what the columns of measured runs can say"
        raise ConfigError(rule, key=", ".join(sorted(differs)), nearest="leave the run out")
    return row


def _base_of(runtime: RuntimeProfile) -> str:
    """Return the catalog's name of a runtime's profile; for a profile of the user's own, the nearest by its facts.

    A profile that `learn` or `calibrate` wrote has the facts of the profile that its fit began with.
    """
    names = shipped_runtimes()
    if runtime.name in names:
        return runtime.name
    return min(names, key=lambda name: len(_other_facts(runtime, find_runtime(name))))


def _other_facts(runtime: RuntimeProfile, other: RuntimeProfile) -> set[str]:
    """Return the fields of two profiles that are facts, and differ."""
    names = {field.name for field in fields(RuntimeProfile)} - NO_FACTS
    return {name for name in names if getattr(runtime, name) != getattr(other, name)}


def _attempt(run: OwnRun, base: str, models: str, folder: Path, *, of_file: bool) -> tuple[Row, set[str]]:
    """Return a row, and the parts of the run that are others when it is read back."""
    job, cluster, config = run.setting.job, run.setting.cluster, run.config
    name, text = _name_of(job.model), ""
    if of_file:
        text = model_text(_nameless(job.model), Path("a measured run"))
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    shared = ["reuse-fp32-param"] if job.shared_master_weights else []
    remarks = [*_of_model(job.model), *_of_config(config), *shared, *run.remarks]
    cells = dict.fromkeys(ROW_COLUMNS, "") | {
        "source": run.source,
        "source_url_or_repo_path": run.place,
        "model": name,
        **_sizes(job.model),
        "seq_len": str(job.sequence_length),
        "gbs": str(job.global_batch_size),
        "devices": str(config.num_devices),
        "device": _device_of(cluster),
        **{degree: str(getattr(config, degree)) for degree in ("mbs", "tp", "pp", "vpp", "cp", "up", "ep", "dp")},
        "recompute": _recompute_of(job, config),
        "zero_stage": str(config.zero_stage),
        "seq_parallel": str(int(config.sequence_parallel)),
        "precision": job.precision,
        "step_seconds": "" if run.step_time_s is None else f"{run.step_time_s:.6g}",
        "peak_mem_gib": "" if run.peak_memory_bytes is None else f"{run.peak_memory_bytes / GIB:.6g}",
        "architecture": f"{models}/{name}.yaml" if text else "",
        "offload": "" if config.offload == "none" else config.offload,
        "runtime": base,
        "devices_per_host": str(cluster.devices_per_host),
        **_network_of(cluster),
        "facts": _facts_beyond(run.setting.runtime, find_runtime(base)),
        "peak_mem_counts": "" if run.peak_memory_bytes is None else run.memory,
        "notes": "; ".join([*([f"FAILED: {run.failure}"] if run.failure else []), *remarks]),
    }
    row = Row(cells=cells, model_file=text)
    return row, _differences(run, _read_back(row, folder))


def _read_back(row: Row, folder: Path) -> tuple[Setting, ParallelConfig] | None:
    """Return the setting and configuration that the reader sees in a row; None if it cannot use the row."""
    if row.model_file:
        file = folder / row.cells["architecture"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(row.model_file, encoding="utf-8")
    (folder / "row.csv").write_text(csv_text([row.cells]), encoding="utf-8")
    try:
        (run,) = read_measured(["row.csv"], {}, folder)
        return setting_of(run, {}).setting, run.config
    except ConfigError:
        return None


def _differences(run: OwnRun, read: tuple[Setting, ParallelConfig] | None) -> set[str]:
    """Return the parts of a run that are others in its row."""
    if read is None:
        return {"model"}
    setting, config = read
    job, found = run.setting.job, setting.job
    differs = {f"job.{name}" for name in _OF_ROW if getattr(job, name) != getattr(found, name)}
    if job.sequences is not None:
        differs.add("job.sequences")
    if run.config.recompute == "selective" and job.recompute_modules != found.recompute_modules:
        differs.add("job.recompute_modules")
    if any(getattr(job.model, name) != getattr(found.model, name) for name in _OF_MODEL) or job.model.towers:
        differs.add("model")
    for field in fields(ParallelConfig):
        if getattr(run.config, field.name) != getattr(config, field.name):
            differs.add(f"config.{field.name}")
    own = run.setting.runtime
    differs |= {f"facts.{name}" for name in _other_facts(own, setting.runtime)}
    if not differs and not _is_near(run, replace(setting, runtime=own)):
        differs.add("cluster")
    return differs - {"facts.splits_documents"}  # it says nothing where all sequences fill their rows


def _is_near(run: OwnRun, read: Setting) -> bool:
    """Return whether both settings, which differ in their clusters alone, predict nearly the same."""
    if run.setting.cluster == read.cluster:
        return True
    grid = ConfigGrid.from_configs([run.config])
    ours, theirs = (
        float(estimate_step(one, grid, memory=estimate_memory(one, grid)).step_time_s[0]) for one in (run.setting, read)
    )
    return abs(math.log(ours / theirs)) <= ROUGH and run.setting.cluster.memory_bytes == read.cluster.memory_bytes


def _name_of(model: ModelSpec) -> str:
    """Return a name that says sizes alone. The reader builds models called gpt like GPT, and all others like LLaMA."""
    plain = model.decoder
    kind = "gpt" if plain is not None and plain.norm == "layer" and not plain.gated_ffn else "decoder"
    experts = f"x{model.num_experts}" if model.num_experts else ""
    return f"{kind}-{model.num_layers}x{model.hidden_size}{experts}{'-tied' if model.tied_embeddings else ''}"


def _nameless(model: ModelSpec) -> ModelSpec:
    """Return a model without its name, and without what its sizes were read from."""
    if not model.is_plain:
        return replace(model, name=_name_of(model), source="")
    return model.changed(name=_name_of(model), source="a measured run", assumed=())


def _sizes(model: ModelSpec) -> dict[str, str]:
    def largest(role: str) -> str:
        return str(max(model.sizes(role), default="") or "")

    return {
        "layers": str(model.num_layers),
        "hidden": str(model.hidden_size),
        "heads": largest("heads"),
        "kv_heads": largest("kv_heads"),
        "ffn": largest("ffn"),
        "vocab": str(model.vocab_size),
        "experts": str(model.num_experts or ""),
        "topk": str(model.top_k or ""),
        "moe_ffn": largest("expert_ffn"),
    }


def _of_model(model: ModelSpec) -> Iterator[str]:
    """Yield the remarks from which costmodels/calibration/measured_model.py reads a model."""
    yield "tied" if model.tied_embeddings else "untied"
    yield "swiglu" if model.gated_ffn else "non-gated"
    if model.norm == "rms":
        yield "rms-norm"
    plain = model.decoder
    if plain is None:
        return
    yield "learned positions" if plain.learned_positions else "rotary"
    if plain.head_dim * plain.num_heads != plain.hidden_size and not plain.kv_lora_rank:
        yield f"head_dim={plain.head_dim}"
    if plain.num_shared_experts:
        yield f"{plain.num_shared_experts} shared experts"
        yield f"shared expert ffn={plain.shared_expert_ffn_size}"
    if plain.num_dense_layers:
        yield f"first {plain.num_dense_layers} layers dense"
    if plain.num_mtp_layers:
        yield f"mtp-num-layers={plain.num_mtp_layers}"


def _of_config(config: ParallelConfig) -> Iterator[str]:
    """Yield the remarks that costmodels/calibration/measured_runs.py reads in place of columns."""
    splits_evenly = (config.dp * config.cp * config.up) % config.ep == 0
    if config.expert_tp or not splits_evenly:
        yield f"ETP={config.expert_tp or config.tp}"
    if config.dp_shard:
        yield f"zero1 group size {config.dp_shard} of dp"
    layers = config.assignment.layers
    if layers and config.assignment == Assignment(layers=layers) and config.vpp == 1 and config.pp > 1:
        with_ends = [*layers]
        with_ends[0] += 1
        with_ends[-1] += 1
        yield f"layers per stage incl. embedding(1)+head(1): {'/'.join(map(str, with_ends))}"


def _recompute_of(job: TrainingJob, config: ParallelConfig) -> str:
    if config.recompute == "none" and config.recompute_layers:
        return f"full:block:{config.recompute_layers}"
    if config.recompute != "selective" or job.recompute_modules == ("core_attn",):
        return config.recompute
    return f"selective:[{', '.join(job.recompute_modules)}]"


def _device_of(cluster: Cluster) -> str:
    if len(cluster.devices) == 1:
        return cluster.devices[0].name
    return "mixed:" + "+".join(f"{group.num_devices}x{group.device.name}" for group in cluster.groups)


def _network_of(cluster: Cluster) -> dict[str, str]:
    """Return the columns of the network between hosts, where it is one link for all of them and not the usual one."""
    links = {link for group in cluster.groups for link in group.nic_links}
    usual = {group.device.scale_out for group in cluster.groups}
    if len(links) != 1 or links == usual:
        return {}
    (link,) = links
    return {"link": link.kind, "nic_gb_per_s": f"{link.bandwidth_bytes_per_s / link.sharers / 1e9:g}"}


def _facts_beyond(runtime: RuntimeProfile, base: RuntimeProfile) -> str:
    """Return the facts of a run that the catalog's profile does not say, as a cell."""
    rows = facts()
    exact = {name for name, fact in rows.items() if not fact.sets}
    said = {}
    for name, fact in rows.items():
        value = fact.holds_in(runtime)
        # of a fact that names several fields, the rows of single fields say what they can
        needed = name in exact or not fact.fields_of(value).keys() <= exact if value is not None else False
        if needed and value != fact.holds_in(base):
            said[name] = value
    said.pop("splits_documents", None)
    return "; ".join(f"{name}={shown(value)}" for name, value in said.items())


def csv_text(rows: Iterable[Mapping[str, str]], columns: Iterable[str] = ROW_COLUMNS) -> str:
    """Return rows as the text of a CSV file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
