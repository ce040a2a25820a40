"""Reader of published measurements: one training run per CSV row, with its model and configuration.

The columns are those of COLUMNS, and of OPTIONAL_COLUMNS those that the file has; `configs/measured/README.md` explains
them. A row counts as failed if its notes begin with FAILED, or if it has none of RESULTS. A row is skipped and counted
if its configuration is incomplete or contradictory, for example if its degrees do not multiply to the devices. A row
that lacks its recomputation alone is skipped too, unless the caller asks for such rows.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from costmodels.calibration.measured_model import model_of
from costmodels.calibration.stated_setup import NOTHING, STATED_COLUMNS, StatedSetup, parse_stated
from costmodels.job.model_catalog import read_model_file
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, RECOMPUTE_MODES, ParallelConfig, Value
from costmodels.job.training_job import RECOMPUTE_MODULES
from costmodels.job.uneven_work import Assignment
from hardware.io.config_file import number_in, read_text
from hardware.io.errors import ConfigError, did_you_mean, quote_value

SIZE_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "topk", "moe_ffn")

RESULTS = ("tokens_per_s_per_device", "tflops_per_device", "mfu", "step_seconds", "peak_mem_gib")
"""Result columns. A finished run has a value in at least one of them."""

COLUMNS = (
    *("source", "source_url_or_repo_path", "model", *SIZE_COLUMNS, "seq_len", "gbs", "mbs", "devices", "device"),
    *("tp", "pp", "vpp", "cp", "up", "ep", "dp", "recompute", "zero_stage", "seq_parallel", "precision"),
    *(*RESULTS, "notes"),
)

OPTIONAL_COLUMNS = ("architecture", "offload", *STATED_COLUMNS)
"""Columns that a file may have too. `architecture` is the path of a model's file from the folder of the CSV, and stands
in place of the columns of sizes. An empty `offload` is none."""

RECOMPUTE_NOT_STATED = "recomputation not stated"
"""Reason to skip a row that is whole but for this."""

GIB = 2**30

KNOWN_SCHEDULES = ("1f1b", "1f1b-i", "1f1b-interleaved", "interleaved1f1b")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One published training run.

    Attributes:
        model: Model that was trained, from the row's columns.
        sequence_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step.
        devices: Number of devices that the run occupied.
        device: Kind of device, as the file spells it.
        precision: Type of the matrix products, in the words of `TrainingJob` if it has one.
        config: Parallelism configuration of the run.
        recompute_modules: Modules that `selective` recomputation repeated.
        is_failed: Whether the run ended without any result.
        step_time_s: Wall clock of one optimizer step; None if the run failed or published another figure only.
        peak_memory_bytes: Peak device memory; sources count it differently, see their notes.
        notes: Remarks of the row.
        source: Publisher of the run.
        place: Position of the row as `file.csv:line`.
        stated: Runtime, network and kernels as far as the row states them.
        architecture: Path of the model's file as the row writes it; empty if the columns state the model.
    """

    model: ModelSpec
    sequence_length: int
    global_batch_size: int
    devices: int
    device: str
    precision: str
    config: ParallelConfig
    recompute_modules: tuple[str, ...]
    is_failed: bool
    step_time_s: float | None
    peak_memory_bytes: int | None
    notes: str
    source: str
    place: str
    stated: StatedSetup = NOTHING
    architecture: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnstatedRun:
    """Run whose source does not say what it recomputed, so that nothing can be fitted to it.

    Attributes:
        run: The run as if it had recomputed nothing.
    """

    run: MeasuredRun

    def under(self, recompute: str) -> MeasuredRun:
        """Return the run as if it had recomputed in this mode."""
        return replace(self.run, config=replace(self.run.config, recompute=recompute))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredGroup:
    """Runs of one job on one cluster, which differ only in their configuration.

    Attributes:
        model: Model that all of them trained.
        sequence_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step.
        devices: Number of devices that each run occupied.
        device: Kind of device, as the file spells it.
        precision: Type of the matrix products.
        runs: Timed and failed runs, in file order.
        skipped: Number of matching rows that could not be used: their configuration is incomplete or inconsistent, or
            they have no step time.
    """

    model: ModelSpec
    sequence_length: int
    global_batch_size: int
    devices: int
    device: str
    precision: str
    runs: tuple[MeasuredRun, ...]
    skipped: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """CSV row with its position."""

    file: str
    line: int
    cells: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def number(self, column: str) -> float | None:
        """Return the cell as a number; None if it is empty."""
        text = self.cells[column]
        if not text:
            return None
        number = number_in(text)
        if number is None or not math.isfinite(number) or number < 0:
            raise ConfigError("must be a number of at least 0, or empty", key=column, value=text, file=self.place)
        return number

    def count(self, column: str) -> int | None:
        """Return the cell as a whole number; None if it is empty."""
        number = self.number(column)
        if number is None:
            return None
        if number != int(number):
            rule, nearest = "must be a whole number, or empty", f"nearest: {round(number)}"
            raise ConfigError(rule, key=column, value=self.cells[column], nearest=nearest, file=self.place)
        return int(number)


def read_measured(paths: Sequence[str | Path], where: Mapping[str, object], base_dir: Path) -> tuple[MeasuredRun, ...]:
    """Read the runs in the rows of `paths` that `where` selects, in file order.

    Args:
        paths: CSV files with the columns of COLUMNS; relative paths start at `base_dir`.
        where: Required value of each named column. Numbers are compared as numbers, everything else as text.
        base_dir: Folder where relative paths start.

    Raises:
        ConfigError: a file is missing or malformed, or `where` names no column or matches nothing.
    """
    return _read_usable(paths, where, base_dir)[0]


def read_measured_and_skipped(
    paths: Sequence[str | Path], base_dir: Path
) -> tuple[tuple[MeasuredRun, ...], dict[str, int]]:
    """Read every usable run of `paths`, and count the rows left out, by reason.

    Raises:
        ConfigError: as `read_measured`.
    """
    runs, skipped = _read_usable(paths, {}, base_dir)
    return runs, dict(skipped)


def read_measured_and_unstated(
    paths: Sequence[str | Path], base_dir: Path
) -> tuple[tuple[MeasuredRun, ...], tuple[UnstatedRun, ...], dict[str, int]]:
    """Read every usable run of `paths` and those that lack their recomputation alone; count the other rows, by reason.

    Raises:
        ConfigError: as `read_measured`.
    """
    runs, unstated, skipped, place = _read_matching(paths, {}, base_dir)
    if not runs and not unstated:
        raise _nothing_usable(skipped, place)
    return runs, unstated, {reason: n for reason, n in skipped.items() if reason != RECOMPUTE_NOT_STATED}


def read_measured_group(paths: Sequence[str | Path], where: Mapping[str, object], base_dir: Path) -> MeasuredGroup:
    """Read rows that must share one job and one cluster; see `read_measured`. Count the rows that were skipped.

    Raises:
        ConfigError: as `read_measured` and `one_group`.
    """
    runs, skipped = _read_usable(paths, where, base_dir)
    return one_group(runs, skipped=skipped.total())


def one_group(runs: Sequence[MeasuredRun], *, skipped: int = 0) -> MeasuredGroup:
    """Return the runs as one group; `skipped` is the number of rows that the reader has left out before.

    Raises:
        ConfigError: the runs differ in more than their configuration; the message names the column that differs.
    """
    if not runs:
        raise ConfigError("matches no measured run", key="where")
    for column, values in _group_columns(runs).items():
        distinct = tuple(dict.fromkeys(values))
        if len(distinct) > 1:
            rule = f"must leave one job and one cluster, but the rows have {len(distinct)} values of `{column}`"
            nearest = f"add `{column}` to `where`; values: {_list_values(distinct)}"
            raise ConfigError(rule, key="where", nearest=nearest)
    first = runs[0]
    # a run with a throughput in other units only can be neither replayed nor compared
    usable = tuple(run for run in runs if run.is_failed or run.step_time_s is not None)
    if not usable:
        raise ConfigError("matches only rows without a step time", key="where", file=_file_of(first))
    return MeasuredGroup(
        model=first.model,
        sequence_length=first.sequence_length,
        global_batch_size=first.global_batch_size,
        devices=first.devices,
        device=first.device,
        precision=first.precision,
        runs=usable,
        skipped=skipped + len(runs) - len(usable),
    )


def varying_dimensions(runs: Iterable[MeasuredRun]) -> tuple[str, ...]:
    """Return the further dimensions in which runs with equal degrees differ, in the order of FURTHER_DIMENSIONS."""
    seen: dict[tuple[Value, ...], ParallelConfig] = {}
    varying = set()
    for run in runs:
        first = seen.setdefault(tuple(run.config.values(DEGREES).values()), run.config)
        varying |= {name for name in FURTHER_DIMENSIONS if getattr(first, name) != getattr(run.config, name)}
    return tuple(name for name in FURTHER_DIMENSIONS if name in varying)


def _size(model: ModelSpec, role: str) -> int:
    return max(model.sizes(role), default=0)


def _group_columns(runs: Sequence[MeasuredRun]) -> dict[str, list[Value | str]]:
    """Return the values that the runs of a group must share, by column."""
    return {
        "model": [run.model.name for run in runs],
        "source": [run.source for run in runs],
        "layers": [run.model.num_layers for run in runs],
        "hidden": [run.model.hidden_size for run in runs],
        "heads": [_size(run.model, "heads") for run in runs],
        "kv_heads": [_size(run.model, "kv_heads") for run in runs],
        "ffn": [_size(run.model, "ffn") for run in runs],
        "vocab": [run.model.vocab_size for run in runs],
        "experts": [run.model.num_experts for run in runs],
        "topk": [run.model.top_k for run in runs],
        "moe_ffn": [_size(run.model, "expert_ffn") for run in runs],
        "seq_len": [run.sequence_length for run in runs],
        "gbs": [run.global_batch_size for run in runs],
        "devices": [run.devices for run in runs],
        "device": [run.device for run in runs],
        "precision": [run.precision for run in runs],
        **{column: [run.stated.cells()[column] for run in runs] for column in STATED_COLUMNS},
        "notes": [str(run.model) for run in runs],  # covers all that is read from the notes, such as tied embeddings
    }


def _read_usable(
    paths: Sequence[str | Path], where: Mapping[str, object], base_dir: Path
) -> tuple[tuple[MeasuredRun, ...], Counter[str]]:
    """Return the matching runs, at least one, and count matching rows that are unusable, by reason."""
    runs, _, skipped, place = _read_matching(paths, where, base_dir)
    if not runs:
        raise _nothing_usable(skipped, place)
    return runs, skipped


def _nothing_usable(skipped: Counter[str], place: str) -> ConfigError:
    rule = f"matches {skipped.total()} rows, none of which has a complete and consistent configuration"
    reasons = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.most_common(3))
    return ConfigError(rule, key="where", nearest=reasons, file=place)


def _read_matching(
    paths: Sequence[str | Path], where: Mapping[str, object], base_dir: Path
) -> tuple[tuple[MeasuredRun, ...], tuple[UnstatedRun, ...], Counter[str], str]:
    """Return the matching runs, those without recomputation, counts of unusable rows by reason, and the first place."""
    if not paths:
        raise ConfigError("names no file", key="measured", nearest="give at least one CSV")
    files = [path if path.is_absolute() else base_dir / path for path in map(Path, paths)]
    rows = [row for file in files for row in _read_rows(file, where)]
    matching = _select_rows(rows, where, ", ".join(str(file) for file in files))
    tied = _find_tied_embeddings(rows)
    runs: list[MeasuredRun] = []
    unstated: list[UnstatedRun] = []
    skipped: Counter[str] = Counter()
    # an incomplete row is common in published tables and no mistake of the user
    for row in matching:
        try:
            run = _parse_run(row, tied)
        except _UnusableRow as reason:
            skipped[str(reason)] += 1
            continue
        if row.cells["recompute"]:
            runs.append(run)
        else:
            unstated.append(UnstatedRun(run=run))
            skipped[RECOMPUTE_NOT_STATED] += 1
    return tuple(runs), tuple(unstated), skipped, matching[0].place


def _read_rows(path: Path, where: Mapping[str, object]) -> list[_Row]:
    """Read every row of one file, without blank lines."""
    file = str(path)
    reader = csv.reader(io.StringIO(read_text(path).removeprefix("\ufeff"), newline=""), strict=True)
    rows = []
    try:
        header = next(reader, [])
        _check_header(header, where, file)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"has {len(cells)} cells where the header has {len(header)}", file=f"{file}:{reader.line_num}"
                )
            stripped = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
            cells_of = dict.fromkeys(OPTIONAL_COLUMNS, "") | stripped
            rows.append(_Row(file=file, line=reader.line_num, cells=cells_of))
    except csv.Error as error:
        raise ConfigError(f"is not valid CSV ({error})", file=f"{file}:{reader.line_num}") from None
    return rows


def _check_header(header: list[str], where: Mapping[str, object], file: str) -> None:
    for column in COLUMNS:
        if column not in header:
            unknown = [name for name in header if name not in COLUMNS]
            nearest = f"the header has {_list_values(unknown)} instead" if unknown else "add it to the header"
            raise ConfigError("is a missing column", key=column, file=f"{file}:1", nearest=nearest)
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError("appears twice in the header; keep one", key=doubled, file=f"{file}:1")
    for column in sorted({*header} - {*COLUMNS, *OPTIONAL_COLUMNS}):
        # other columns are the user's own, but a misspelt one would be ignored
        if difflib.get_close_matches(column, OPTIONAL_COLUMNS, n=1, cutoff=0.8):
            nearest = did_you_mean(column, OPTIONAL_COLUMNS)
            raise ConfigError("is no column", key=column, nearest=nearest, file=f"{file}:1")
    for column in where:
        if column not in header:
            nearest = did_you_mean(column, header)
            raise ConfigError("is no column of the file", key=f"where.{column}", nearest=nearest, file=file)


def _select_rows(rows: list[_Row], where: Mapping[str, object], files: str) -> list[_Row]:
    if not rows:
        raise ConfigError("holds no measured run", file=files)
    matching = rows
    for column, value in where.items():
        left = [row for row in matching if _is_equal(row.cells[column], value)]
        if not left:
            values = sorted({row.cells[column] for row in matching}, key=lambda text: (number_in(text) or 0, text))
            others = [name for name in where if name != column]
            given = f" in the rows with the {', '.join(others)} asked for" if len(matching) < len(rows) else ""
            rule, nearest = f"matches no row{given}", f"the column has {_list_values(values)}"
            raise ConfigError(rule, key=f"where.{column}", value=value, nearest=nearest, file=files)
        matching = left
    return matching


def _is_equal(cell: str, wanted: object) -> bool:
    if wanted is None:
        return not cell
    numbers = number_in(cell), number_in(str(int(wanted) if isinstance(wanted, bool) else wanted))
    return numbers[0] == numbers[1] if None not in numbers else cell == str(wanted)


def _list_values(values: Iterable[object], limit: int = 12) -> str:
    texts = [str(value) if value != "" else "(empty)" for value in values]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return quote_value(", ".join(texts[:limit]) + more, limit=400)[1:-1]


def _find_tied_embeddings(rows: list[_Row]) -> dict[tuple[str, str], bool]:
    """Return whether each model of a source ties its embeddings, as far as the notes of any row state it."""
    # a source often states this in one of its rows only; "untied" is the stronger statement
    tied: dict[tuple[str, str], bool] = {}
    for row in rows:
        notes = row.cells["notes"]
        key = (row.cells["source"], row.cells["model"])
        if re.search(r"\buntied\b", notes):
            tied[key] = False
        elif re.search(r"\btied\b", notes):
            tied.setdefault(key, True)
    return tied


def _parse_run(row: _Row, tied: Mapping[tuple[str, str], bool]) -> MeasuredRun:
    """Return the run of one row; one that does not state its recomputation as if there were none.

    Raises:
        _UnusableRow: the row lacks or contradicts a value that identifies a run.
    """
    stated = parse_stated(
        row.cells,
        devices_per_host=row.count("devices_per_host"),
        nic_gb_per_s=row.number("nic_gb_per_s"),
        place=row.place,
    )
    config = _parse_config(row)
    sequence_length, batch = row.count("seq_len"), row.count("gbs")
    if not sequence_length or not batch:
        raise _UnusableRow("no sequence length or batch")
    if config.num_devices // config.pp % ((config.expert_tp or config.tp) * config.ep):
        raise _UnusableRow("ep doesn't divide the ranks of a stage")
    if config.num_devices != (row.count("devices") or config.num_devices):
        raise _UnusableRow("degrees don't multiply to the devices")
    if batch % (config.dp * config.mbs):
        raise _UnusableRow("dp*mbs doesn't divide the batch")
    model = _model_in(row, sequence_length, tied)
    layers = find_stated_layers(row.cells["notes"], model.num_layers, config.pp) if config.vpp == 1 else ()
    config = replace(config, assignment=Assignment(layers=layers))
    step_time_s, tokens_per_s = row.number("step_seconds"), row.number("tokens_per_s_per_device")
    # throughput and step time are the same figure for a known batch
    if not step_time_s and tokens_per_s:
        step_time_s = sequence_length * batch / (tokens_per_s * config.num_devices)
    memory_gib = row.number("peak_mem_gib")
    results = [row.number(column) for column in RESULTS]
    is_failed = row.cells["notes"].startswith("FAILED") or not any(results)
    return MeasuredRun(
        model=model,
        sequence_length=sequence_length,
        global_batch_size=batch,
        devices=config.num_devices,
        device=row.cells["device"],
        precision=_parse_precision(row.cells["precision"]),
        config=config,
        recompute_modules=_parse_recompute_modules(row.cells["recompute"]),
        is_failed=is_failed,
        step_time_s=None if is_failed or not step_time_s else step_time_s,
        peak_memory_bytes=round(memory_gib * GIB) if memory_gib else None,
        notes=row.cells["notes"],
        source=row.cells["source"],
        place=f"{Path(row.file).name}:{row.line}",
        stated=stated,
        architecture=row.cells["architecture"],
    )


def _model_in(row: _Row, sequence_length: int, tied: Mapping[tuple[str, str], bool]) -> ModelSpec:
    """Return the row's model, from the file that it names, or else from its sizes and remarks.

    Raises:
        ConfigError: the row names a file that is not there.
        _UnusableRow: the model cannot be read, or a size is missing or impossible.
    """
    name = row.cells["model"]
    if row.cells["architecture"]:
        path = Path(row.file).parent / row.cells["architecture"]
        if not path.is_file():
            raise ConfigError("no such file", key="architecture", value=row.cells["architecture"], file=row.place)
        try:
            return replace(read_model_file(path), name=name)
        except ConfigError as error:
            rule = f"{error.key}: {error.value} {error.rule}"
            raise _UnusableRow(f"no reader for {path.name}: {rule}") from None
    # the architecture of columns and remarks has its own module
    sizes = {column: row.count(column) for column in SIZE_COLUMNS}
    is_tied = tied.get((row.cells["source"], name), False)
    try:
        model = model_of(name, row.cells["source"], sizes, row.cells["notes"], sequence_length, is_tied=is_tied)
    except ConfigError as error:
        raise _UnusableRow(f"impossible architecture: {error}") from None
    if model is None:
        raise _UnusableRow("incomplete architecture")
    return model


class _UnusableRow(Exception):  # noqa: N818 # a reason to skip a row, no error
    """Reason to skip a row."""


def _parse_config(row: _Row) -> ParallelConfig:
    """Return the row's configuration. A missing dp follows from the devices; a missing sequence_parallel is off."""
    degrees = {name: row.count(name) for name in DEGREES}
    for name in ("vpp", "cp", "up", "ep"):
        degrees[name] = 1 if degrees[name] is None else degrees[name]
    devices = row.count("devices")
    model_parallel = [degrees[name] for name in ("pp", "tp", "cp", "up")]
    # many sources publish devices and the model's degrees only
    if degrees["dp"] is None and devices and None not in model_parallel:
        degrees["dp"] = devices // math.prod(size for size in model_parallel if size)
    known = {name: value for name, value in degrees.items() if value is not None}
    zero_stage, sequence_parallel = row.count("zero_stage"), row.count("seq_parallel") or 0
    mode, layers_again = _parse_recompute(row.cells["recompute"] or "none", row.cells["notes"])
    if len(known) < len(degrees) or zero_stage is None:
        raise _UnusableRow("incomplete configuration")
    if mode is None:
        raise _UnusableRow("recomputation of a kind that the cost model does not know")
    if _parse_schedule(row.cells["notes"], row.cells["model"]) not in KNOWN_SCHEDULES:
        raise _UnusableRow("a pipeline schedule that the cost model does not know")
    if sequence_parallel > 1:
        stated = row.cells["seq_parallel"]
        raise ConfigError("must be 0 or 1, or empty", key="seq_parallel", value=stated, file=row.place)
    try:
        config = ParallelConfig(
            **known,  # type: ignore[arg-type] # known degrees, all of them integers
            recompute=mode,
            recompute_layers=layers_again,
            offload=row.cells["offload"] or "none",
            zero_stage=zero_stage,
            sequence_parallel=bool(sequence_parallel),
        )
        return replace(
            config,
            expert_tp=_parse_expert_tp(known, row.cells["notes"]),
            dp_shard=_parse_dp_shard(known, row.cells["notes"]),
        )
    except ConfigError as error:
        raise error.in_file(row.place) from None


def find_stated_layers(notes: str, num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage that a run's remarks state; empty if they state none.

    There are two forms: `layers per stage incl. embedding(1)+head(1): 8/9/9`, and bounds in DeepSpeed's list of
    modules, `partition: [0, 9, 16, 23, 30]`. That list has the embedding and one function before the layers, and two
    functions, the head and the loss behind them.
    """
    # digits are bounded so that a forged file cannot make huge integers
    counts = re.search(r"layers per stage incl\. embedding\(1\)\+head\(1\): (\d{1,9}(?:/\d{1,9})*)(?!\d)", notes)
    if counts:
        held = [int(count) for count in counts[1].split("/")]
        held[0] -= 1
        held[-1] -= 1
    else:
        bounds = re.search(r"partition\W+(0(?:,\s*\d{1,9})+)(?!\d)", notes)
        ends = [int(end) for end in bounds[1].split(",")] if bounds else []
        # positions in DeepSpeed's list become positions among the layers
        inside = [min(max(end - 2, 0), num_layers) for end in ends if ends[-1] == num_layers + 6]
        held = [end - start for start, end in pairwise(inside)]
    is_whole = len(held) == pp and sum(held) == num_layers and all(count >= 0 for count in held)
    return tuple(held) if is_whole else ()


def _parse_expert_tp(degrees: Mapping[str, int], notes: str) -> int:
    """Return the experts' tensor degree that the remarks name; else 1 if ep needs it, and 0 for the degree tp."""
    named = re.search(r"(?:expert[_-]tensor[_-]parallel[_-]size=|ETP=|[-_]etp)(\d{1,9})(?!\d)", notes)
    if named:
        return 0 if int(named[1]) == degrees["tp"] else int(named[1])
    replicas = degrees["dp"] * degrees["cp"] * degrees["up"]
    return 0 if replicas % degrees["ep"] == 0 else 1


def _parse_dp_shard(degrees: Mapping[str, int], notes: str) -> int:
    """Return the number of ranks that shard the states if the remarks name fewer than dp; else 0."""
    named = re.search(r"zero1 group size[ =](\d{1,9}) ", notes)
    size = int(named[1]) if named else 0
    return size if 0 < size < degrees["dp"] and degrees["dp"] % size == 0 else 0


def _parse_recompute(text: str, notes: str) -> tuple[str | None, int]:
    """Return the recompute mode of the cell, and the layers of each virtual stage that it repeats beside that mode.

    `full:block:N` and `full:N layers` repeat the first N layers of each virtual stage (megatron-core
    transformer_block.py, _checkpointed_forward). Named modules are selective. MaxText's policy `full` is full, and
    `minimal`, which keeps all matrix products, is none. The mode is None if the cost model has no such mode.
    """
    if some := re.fullmatch(r"full:(?:block:)?(\d{1,4})(?: layers)?", text):
        return "none", int(some[1])
    if text.startswith("modules:"):
        return "selective", 0
    if text.startswith("selective") and re.search(r"selective AC = every n-?th block", notes):
        return "full", 0
    if text.startswith("maxtext:"):
        policies = {"full": "full", "minimal": "none", "minimal_with_context": "none"}
        return policies.get(text.removeprefix("maxtext:")), 0
    mode = re.match(rf"({'|'.join(RECOMPUTE_MODES)})\b", text)
    return (mode[1] if mode else None), 0


def _parse_recompute_modules(text: str) -> tuple[str, ...]:
    """Return the modules that a selective cell names: `selective:[moe_act]`, `modules:layernorm+moe_act`."""
    named = tuple(name for name in re.findall(r"[a-z_]+", text.partition(":")[2]) if name in RECOMPUTE_MODULES)
    return named or ("core_attn",)


def _parse_schedule(notes: str, model: str) -> str:
    """Return the pipeline schedule that the remarks or the model's name state; 1f1b if they are silent."""
    stated = re.search(r"\b[Ss]chedule ([\w-]+)|\b([Vv]-?[Hh]alf|DualPipe)\b|(ZB-\dp)", f"{notes} {model}")
    return next(filter(None, stated.groups())).lower() if stated else "1f1b"


def _parse_precision(text: str) -> str:
    """Return the type of the matrix products in the words of `TrainingJob`: `bf16 (fp32 grad accum)` is bf16."""
    lowered = re.sub(r"\(.*", "", text, flags=re.DOTALL).strip().lower()
    found = re.findall(r"bf16|fp16|fp8|fp4|fp32", lowered)
    # of several types the narrowest one is that of the matrix products
    for narrow, name in (("fp4", "nvfp4"), ("fp8", "fp8")):
        if narrow in found:
            return name
    return found[0] if found else lowered or "bf16"


def _file_of(run: MeasuredRun) -> str:
    return run.place.rpartition(":")[0]
