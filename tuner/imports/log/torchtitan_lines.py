"""Lines that torchtitan logs when it starts: the device mesh, the model, batch sizes, recomputation, the schedule.

With `print_config` (or, in versions up to 0.2, `job.print_args`) it logs its whole configuration, too. Without it, the
log leaves a few options open, which are then reported with the default that is assumed.

Sources: torchtitan 0.3.0 trainer.py, distributed/parallel_dims.py, distributed/activation_checkpoint.py,
distributed/pipeline_parallel.py, distributed/compile.py, components/loss.py, components/quantization/float8.py; the
same lines of its first releases in train.py and parallelisms/parallel_dims.py; models/llama3/model.py (inner size of
the MLP).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported, Unread
from tuner.imports.log.block import MOST_LINES, AbstractFinder, indent_of, parse_mapping
from tuner.imports.log.lines import Line
from tuner.imports.torchtitan import import_torchtitan

_CONFIG = re.compile(r"Running with (?:args|configs?): (\{.*)$")
_MESH = re.compile(r"Building [1-9]-D device mesh with [\[(]([^\])]*)[\])], \[([0-9, ]+)\]")
_PARALLELISM = re.compile(r"Building device mesh with parallelism: (pp=.*)$")
_MODEL = re.compile(r"^Building (\w+) (\w[\w.-]*)(?: with \w*Args\((.*)\))?$")
_BATCH = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),.*?sequence length (\d{1,9}), total steps"
)
_RECOMPUTES = re.compile(r"Applied (\w+) activation checkpointing to the model")
_SCHEDULE = re.compile(r"Using pipeline schedule (\w+) with (\d{1,6}) microbatches and (\d{1,6}) stages")
_FLOAT8 = re.compile(r"Float8 .*training active|Swapped to Float8Linear|Converted Linear layers to (?:MXFP8|Float8)")
_COMPILES = re.compile(r"Compil(?:ing|ed) (?:(the loss)|(?:each|model|the model)\b).* torch\.compile")
_REPLICATES = "Applied DDP to the model"

_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "dp": "data_parallel_shard_degree",
}
"""Key of `[parallelism]` for each dimension of the mesh; `dp` is that of the first releases."""
_SECTIONS = ("parallelism", "training", "experimental", "activation_checkpoint", "model", "optimizer")
_LLAMA = ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of")


class TorchtitanLines(AbstractFinder):
    """Finder of the lines that describe the job."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, Any]] = {}
        self._printed: dict[str, Any] | None = None
        self._open: tuple[Line, list[str]] | None = None
        self._mesh: dict[str, int] | None = None
        self._mesh_rank = ""
        self._model_arguments = ""
        self._stages: int | None = None
        self._has_float8 = self._is_replicated = False
        self._compiled: set[str] = set()

    def begins(self, line: Line) -> bool:
        """Return whether the line is that of the device mesh, which every start builds first."""
        return " device mesh with " in line.text and bool(_MESH.search(line.text) or _PARALLELISM.search(line.text))

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self._open is not None and self._take_config(line):
            return
        if self.begins(line):
            self._take_mesh(line)
        elif "Running with " in line.text and (found := _CONFIG.search(line.text)) is not None:
            self._open = (line, [found[1]])
            self._close()
        elif self._mesh is not None:
            self._take_fact(line.message.strip())

    def _take_config(self, line: Line) -> bool:
        """Take a line of the printed configuration; return whether it is one."""
        assert self._open is not None, "the configuration has begun"
        begun, texts = self._open
        if line.rank != begun.rank:
            return False
        if len(texts) > MOST_LINES:
            raise ConfigError(
                "torchtitan's configuration is cut off",
                key=f"line {begun.number}",
                value=begun.message[:80],
                nearest="a log with all lines of it",
            )
        texts.append(line.text)
        self._close()
        return True

    def _close(self) -> None:
        assert self._open is not None, "the configuration has begun"
        found = parse_mapping(self._open[1], indent_of(self._open[0].text))
        if found is not None:
            self._printed, self._open = found, None

    def _take_mesh(self, line: Line) -> None:
        found = _MESH.search(line.text)
        if found is not None:
            names = re.findall(r"\w+", found[1])
            sizes = [int(size) for size in re.findall(r"[0-9]+", found[2])]
            mesh = dict(zip(names, sizes, strict=False))
        else:
            told = _PARALLELISM.search(line.text)
            assert told is not None, "`begins` has found one of both"
            mesh = {name: int(size) for name, size in re.findall(r"(\w+)=([0-9]{1,7})", told[1])}
        if self._mesh is not None and line.rank == self._mesh_rank:  # a new start
            self._sections, self._stages, self._has_float8, self._is_replicated = {}, None, False, False
            self._compiled = set()
        self._mesh, self._mesh_rank = mesh, line.rank

    def _take_fact(self, text: str) -> None:
        def put(section: str, **values: Any) -> None:
            self._sections.setdefault(section, {}).update(values)

        if (found := _MODEL.match(text)) is not None:
            put("model", name=found[1], flavor=found[2])
            self._model_arguments = found[3] or ""
        elif (found := _BATCH.search(text)) is not None:
            put("training", local_batch_size=int(found[1]), global_batch_size=int(found[2]), seq_len=int(found[3]))
        elif (found := _RECOMPUTES.search(text)) is not None:
            put("activation_checkpoint", mode=found[1].lower().removesuffix("ac"))
        elif (found := _SCHEDULE.search(text)) is not None:
            put("parallelism", pipeline_parallel_schedule=found[1], pipeline_parallel_microbatches=int(found[2]))
            self._stages = int(found[3])
        elif _FLOAT8.search(text):
            self._has_float8 = True
        elif (found := _COMPILES.search(text)) is not None:
            self._compiled.add("loss" if found[1] else "layers")
        elif _REPLICATES in text:
            self._is_replicated = True

    def imported(self) -> Imported | None:
        """Return what the lines say."""
        if self._mesh is None:
            return None
        training = self._sections.get("training")
        if training is None and self._printed is None:
            raise ConfigError(
                "the log has torchtitan's device mesh, but no line with its batch sizes",
                nearest="a log that reaches the first step",
            )
        sections = {name: dict(self._of_printed(name)) for name in _SECTIONS}
        for name, values in self._sections.items():
            sections[name].update(values)
        mesh, open_keys = self._degrees()
        sections["parallelism"].update(mesh)
        if "activation_checkpoint" not in self._sections and training is not None:
            sections["activation_checkpoint"] = {"mode": "none"}
        if self._has_float8:
            sections["model"]["converters"] = ["float8"]
        sections |= {name: dict(self._of_printed(name)) for name in ("compile", "loss")}
        imported = import_torchtitan(_toml(sections))
        if self._printed is None:
            # lines alone do not say what is off, but for a compiler, which every version logs
            imported = replace(imported, facts={"compiled": "+".join(sorted(self._compiled)) or "none"})
        degrees = dict(imported.degrees)
        if self._stages is not None:
            degrees["vpp"] = max(1, self._stages // degrees["pp"])
        for name in open_keys:
            degrees.pop(name, None)
        model = {} if imported.model_name else self._llama()
        return replace(
            imported,
            degrees=degrees,
            model=model,
            open={**imported.open, **open_keys},
            unread=(*imported.unread, *self._assumed()),
            notes=() if model else imported.notes,
        )

    def _of_printed(self, section: str) -> Mapping[str, Any]:
        found = (self._printed or {}).get(section)
        return found if isinstance(found, dict) else {}

    def _degrees(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return the keys of `[parallelism]` that the mesh states, and the degrees that it leaves open.

        A dimension of 1 is not built. In 2025 the mesh split dp_shard in two for experts; their product is dp_shard.
        """
        assert self._mesh is not None, "the mesh is known"
        mesh = dict(self._mesh)
        open_keys = {}
        if "dp_shard_in_ep" in mesh:
            inner, outer = mesh.pop("dp_shard_in_ep"), mesh.pop("dp_shard_mod_ep", 1)
            mesh["dp_shard"] = inner * outer
            if self._of_printed("parallelism").get("expert_parallel_degree") is None:
                open_keys["ep"] = "the log's device mesh does not state it"
            else:
                mesh["ep"] = self._of_printed("parallelism")["expert_parallel_degree"]
        elif "dp_shard_mod_ep" in mesh:
            mesh["dp_shard"] = mesh.pop("dp_shard_mod_ep")
        if self._is_replicated and "dp" in mesh:
            mesh["dp_replicate"] = mesh.pop("dp")
            mesh["dp_shard"] = 1
        found = dict.fromkeys(_DEGREES.values(), 1)
        found.update({_DEGREES[name]: size for name, size in mesh.items() if name in _DEGREES})
        return found, open_keys

    def _assumed(self) -> tuple[Unread, ...]:
        if self._printed is not None:
            return ()
        return (
            Unread(
                what="print_config",
                why="is off, so that the log does not say precision, sequence parallelism and resharding; read as "
                "torchtitan's defaults: check job.precision, job.sequence_parallel and job.zero_stage",
            ),
        )

    def _llama(self) -> dict[str, Any]:
        """Return the fields of a ModelSpec from a Llama's arguments; empty if the log has none of them."""
        name = str(self._sections.get("model", {}).get("name", ""))
        given = dict(re.findall(r"(\w+)=([0-9.e+-]+)(?:,|$)", self._model_arguments))
        if not name.startswith("llama") or not set(_LLAMA) <= given.keys():
            return {}
        dim, layers, heads, vocabulary, multiple = (int(given[key]) for key in _LLAMA)
        inner = int(2 * 4 * dim / 3)
        if "ffn_dim_multiplier" in given:
            inner = int(float(given["ffn_dim_multiplier"]) * inner)
        return {
            "num_layers": layers,
            "hidden_size": dim,
            "num_heads": heads,
            "num_kv_heads": int(given.get("n_kv_heads", heads)),
            "head_dim": dim // heads,
            "vocab_size": vocabulary,
            "ffn_size": math.ceil(inner / multiple) * multiple,
            "gated_ffn": True,
            "norm": "rms",
            "tied_embeddings": False,
        }


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the plain values of sections as TOML, whose texts, numbers and lists are those of JSON."""
    lines = []
    for name, values in sections.items():
        if not values:
            continue
        lines.append(f"[{name}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items() if _is_plain(value)]
    return "\n".join(lines)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
