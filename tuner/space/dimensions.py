"""Table of all dimensions of a configuration, the way studies name, enumerate and print them.

A row holds the keys of a dimension in study files, its values before any rule is applied, and the message for values
that it cannot have. Code of the tuner that only lists dimensions loops over `SEARCHED`. The cost models below the tuner
have a table of their own in costmodels/job/parallel_config.py, with the codes and checks of the further dimensions;
rows refer to it by name.

A further dimension is added by a row here, by a row and two fields (of `FurtherValues` and `ConfigGrid`) in
costmodels/job/parallel_config.py, by its rules in tuner/space/rules, and by the cost terms and exporters that it
changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ENUMERATED_DIMENSIONS, Dimension, Value
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from tuner.space.rules.pipeline import UNEQUAL_CHUNKS, shortens_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Possible:
    """Values that a dimension of numbers may have before most rules.

    Attributes:
        values: The values, ascending.
        demand: Condition on the values in words, for messages about others.
    """

    values: tuple[int, ...]
    demand: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedDimension:
    """Dimension as studies search it: its keys in study files, and its values before any rule.

    Attributes:
        name: Name of the dimension, and its key in study files.
        space_key: Meaning of the key under `space:`, for the reference of study files.
        job_key: Meaning of the key under `job:`; None for a degree, which no job fixes.
        job_default: Value where `job:` leaves the key out; None leaves it to the runtime.
        possible: Function from a setting and the names of the rules in force to the values; None for a dimension of
            choices.
        offered: Function from a runtime to the choices that it has; None for a dimension of numbers.
    """

    name: str
    space_key: str
    job_key: str | None = None
    job_default: Value | None = None
    possible: Callable[[Setting, Collection[str]], Possible] | None = None
    offered: Callable[[RuntimeProfile], Sequence[Value]] | None = None

    @property
    def further(self) -> Dimension | None:
        """Values and codes of a further dimension; None for a degree."""
        return DIMENSIONS.get(self.name)

    def code_of(self, value: Value) -> int:
        """Return the integer that stands for a value in the grid's arrays."""
        return self.further.code_of(value) if self.further else int(value)

    def show(self, code: int) -> str:
        """Print the value of a code the way study files spell it."""
        return self.further.show(code) if self.further else str(code)

    def codes(self, setting: Setting, rules: Collection[str]) -> list[int]:
        """Return the values that a configuration of the setting may have before most rules, as codes."""
        if self.offered is not None:
            return [self.code_of(value) for value in self.offered(setting.runtime)]
        assert self.possible is not None, "a dimension has choices or numbers"
        zero = [0] if self.further else []  # stands for another dimension's value, as expert_tp = 0 does for tp
        return [*zero, *self.possible(setting, rules).values]


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _divisors(number: int, demand: str) -> Possible:
    return Possible(values=tuple(divisors(number)), demand=demand)


def _devices(setting: Setting, _: Collection[str]) -> Possible:
    devices = setting.cluster.num_devices
    return _divisors(devices, f"must divide the cluster's {devices:,} devices")


def _devices_or_zero(setting: Setting, _: Collection[str]) -> Possible:
    devices = setting.cluster.num_devices
    return _divisors(devices, f"must be 0, or divide the cluster's {devices:,} devices")


def _batch(setting: Setting, _: Collection[str]) -> Possible:
    batch = setting.job.global_batch_size
    return _divisors(batch, f"must divide the global batch of {batch:,} sequences")


def _chunks(setting: Setting, rules: Collection[str]) -> Possible:
    """Return the chunks per stage: divisors of the layers or, where chunks may be unequal, whatever fills them."""
    layers = setting.padded_layers
    without = [number for rule, number in UNEQUAL_CHUNKS.items() if rule in rules]
    if not without or "vpp_layers" in rules:
        return _divisors(layers, f"must divide the model's {layers} layers, padding included")
    most = layers + without[0]
    values = np.arange(1, most + 1)
    if "vpp_shortens" in rules:
        # chunks need a pipeline; vpp = 1 stays where there is none
        stages = np.array(divisors(setting.cluster.num_devices))[:, None]
        is_worth = shortens_chunks(layers, stages, values) & (stages * values <= most) & (stages > 1)
        values = values[is_worth.any(axis=0) | (values == 1)]
    return Possible(values=tuple(values.tolist()), demand=f"must be from 1 to {most}, for a model of {layers} layers")


def _experts(setting: Setting, _: Collection[str]) -> Possible:
    experts = setting.job.model.num_experts
    return _divisors(
        max(experts, 1), f"must divide the model's {experts} experts" if experts else "must be 1 without experts"
    )


def _expert_width(setting: Setting, _: Collection[str]) -> Possible:
    widths = setting.job.model.sizes("expert_ffn")
    told = " and ".join(f"{width:,}" for width in widths or (0,))
    return _divisors(max(math.gcd(*widths), 1), f"must be 0, or divide the experts' width of {told}")


def _layers_of_stage(setting: Setting, _: Collection[str]) -> Possible:
    layers = setting.job.model.num_layers
    return Possible(values=tuple(range(1, layers + 1)), demand=f"must be from 0 to the model's {layers} layers")


_ALL = "\n\nDefault: all"
_FIXED = "\n\nDefault: the job's"

_ROWS = (
    SearchedDimension(name="pp", space_key=f"Allowed pipeline stages.{_ALL}", possible=_devices),
    SearchedDimension(name="tp", space_key=f"Allowed tensor parallel degrees.{_ALL}", possible=_devices),
    SearchedDimension(name="dp", space_key=f"Allowed data parallel degrees.{_ALL}", possible=_devices),
    SearchedDimension(
        name="cp", space_key=f"Allowed context parallel degrees (ring attention).{_ALL}", possible=_devices
    ),
    SearchedDimension(name="up", space_key=f"Allowed Ulysses degrees.{_ALL}", possible=_devices),
    SearchedDimension(name="vpp", space_key=f"Allowed model chunks per stage.{_ALL}", possible=_chunks),
    SearchedDimension(name="ep", space_key=f"Allowed expert parallel degrees.{_ALL}", possible=_experts),
    SearchedDimension(name="mbs", space_key=f"Allowed sequences per micro-batch.{_ALL}", possible=_batch),
    SearchedDimension(
        name="recompute",
        space_key=f"Opens this dimension: the values of the list are searched.{_FIXED}",
        job_key="Activations that the backward pass computes again.",
        job_default="none",
        offered=lambda runtime: runtime.recompute_modes,
    ),
    SearchedDimension(
        name="offload",
        space_key=f"Opens this dimension; `[none, optimizer]` tries both.{_FIXED}",
        job_key="States that are kept and updated on the host: `optimizer` for those of the optimizer, its copy of the "
        "weights included.",
        job_default="none",
        offered=lambda runtime: runtime.offload_modes,
    ),
    SearchedDimension(
        name="zero_stage",
        space_key=f"Opens this dimension, as `recompute` does.{_FIXED}",
        job_key="Training states sharded over data parallel ranks: 0 none, 1 optimizer, 2 gradients, 3 weights."
        "\n\nDefault: `1`, or the lowest above 0 that the runtime offers",
        offered=lambda runtime: runtime.offered_stages,
    ),
    SearchedDimension(
        name="sequence_parallel",
        space_key=f"Opens this dimension, as `recompute` does.{_FIXED}",
        job_key="Whether norms and residuals are split over tp.\n\nDefault: the runtime's",
        offered=lambda _: (False, True),
    ),
    SearchedDimension(
        name="expert_tp",
        space_key=f"Opens this dimension; `[0, 1]` tries experts split as the rest is, and not at all.{_FIXED}",
        job_key="Tensor parallel degree of the experts; 0 is that of the rest, `tp`.\n\nDefault: the runtime's, 0 or 1",
        possible=_expert_width,
    ),
    SearchedDimension(
        name="dp_shard",
        space_key=f"Opens this dimension; `[0, 8]` tries shards over all of dp, and over eight neighbours.{_FIXED}",
        job_key="Data parallel ranks over which ZeRO shards, the others hold copies (HSDP); 0 is all of `dp`.",
        job_default=0,
        possible=_devices_or_zero,
    ),
    SearchedDimension(
        name="recompute_layers",
        space_key=f"Opens this dimension; `[0, 2, 4]` tries none, two and four.{_FIXED}",
        job_key="Layers of each virtual stage, its first ones, that the backward pass runs again in full, whatever "
        "`recompute` says of the others.",
        job_default=0,
        possible=_layers_of_stage,
    ),
)
SEARCHED = {row.name: row for row in _ROWS}
"""All dimensions whose values are enumerated, by name: the degrees, then the further ones."""
assert tuple(SEARCHED) == (*DEGREES, *ENUMERATED_DIMENSIONS), (
    "the cost models' dimensions are those of the table, in its order"
)

MESH_DEGREES = ("pp", "tp", "dp", "cp", "up")
"""Degrees whose product is the number of devices, so that their values are enumerated together."""
STAGES: tuple[tuple[str, ...], ...] = (
    MESH_DEGREES,
    ("expert_tp",),  # early, for the rule on the experts' inner size takes most of its values away
    ("mbs",),
    *((name,) for name in SEARCHED if name not in (*MESH_DEGREES, "expert_tp", "mbs")),
)
"""Dimensions in the order in which enumeration adds them, those of one stage together."""
