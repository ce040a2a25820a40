"""RuntimeProfile: what a training framework does, as data.

A profile holds facts (which degrees and schedules exist, what overlaps with what, how wide gradients are) and a few
efficiencies. Facts carry their source in the catalog file; efficiencies say whether they are measured or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hardware.config_file import StrictModel, checked, read_mapping
from hardware.errors import ConfigError, did_you_mean

Share = Annotated[float, Field(ge=0, le=1)]
Efficiency = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeProfile:
    """One training framework.

    Attributes:
        name: Catalog name.
        rule_set: Name of the rules that its configurations obey.
        layer_split: How layers fall to stages: "even" (no-op layers at the end fill a padded count) or "balanced"
            (contiguous blocks of equal cost, embedding and head counted).
        layer_padding: Layer counts are padded with no-op layers to a multiple of this; 1 pads nothing.
        recompute_modes: Recompute modes that it offers.
        zero_stages: ZeRO stages that it offers.
        sequence_parallel: Whether norms are split over tp unless the job says otherwise.
        gradient_bytes: Bytes of gradient memory per parameter (accumulation buffers included).
        gradient_message_bytes: Bytes per parameter on the wire when gradients are reduced.
        overlaps_gradients: Whether gradient reduction runs beside the last micro-batch's backward pass.
        overlaps_weight_gather: Whether sharded weights are gathered beside the forward pass.
        overlaps_ring: Whether ring-attention exchanges run beside attention.
        overlaps_p2p: Whether pipeline transfers run beside compute when vpp > 1.
        matmul_efficiency: Share of the peak that matrix products reach in training.
        grouped_matmul_efficiency: The same for the experts' grouped products.
        attention_efficiency: The same for flash attention.
        memory_efficiency: Share of the memory bandwidth that memory-bound operators reach.
        network_efficiency: Share of a link's bandwidth that collectives reach.
        launch_s: Host time to launch one operator of costmodels/operators.py, all its kernels together.
        collective_launch_s: Host time to issue one collective inside a layer.
        memory_overhead_bytes: Device memory outside the tally (context, communicators).
        activation_slack: Share that the runtime and its allocator hold beyond the tally of activations.
    """

    name: str
    rule_set: str
    layer_split: str
    layer_padding: int
    recompute_modes: tuple[str, ...]
    zero_stages: tuple[int, ...]
    sequence_parallel: bool
    gradient_bytes: int
    gradient_message_bytes: int
    overlaps_gradients: bool
    overlaps_weight_gather: bool
    overlaps_ring: bool
    overlaps_p2p: bool
    matmul_efficiency: float
    grouped_matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    network_efficiency: float
    launch_s: float
    collective_launch_s: float
    memory_overhead_bytes: int
    activation_slack: float


class _Layers(StrictModel):
    split: Literal["even", "balanced"]
    padding: Annotated[int, Field(ge=1)] = 1


class _Supports(StrictModel):
    recompute: list[Literal["none", "selective", "full"]]
    zero_stages: list[Annotated[int, Field(ge=0, le=3)]]
    sequence_parallel: bool


class _Gradients(StrictModel):
    memory_bytes_per_parameter: Annotated[int, Field(ge=1)]
    message_bytes_per_parameter: Annotated[int, Field(ge=1)]


class _Overlaps(StrictModel):
    gradients: bool
    weight_gather: bool
    ring_attention: bool
    pipeline_transfers: bool


class _Efficiency(StrictModel):
    matmul: Efficiency
    grouped_matmul: Efficiency
    attention: Efficiency
    memory: Efficiency
    network: Efficiency


class _ProfileFile(StrictModel):
    sources: dict[str, str]
    rule_set: str
    layers: _Layers
    supports: _Supports
    gradients: _Gradients
    overlaps: _Overlaps
    efficiency: _Efficiency
    launch_us: Annotated[float, Field(ge=0)]
    collective_launch_us: Annotated[float, Field(ge=0)]
    memory_overhead_gib: Annotated[float, Field(ge=0)]
    activation_slack: Share


def runtime_names() -> tuple[str, ...]:
    """Catalog names of all runtime profiles, sorted."""
    folder = files("costmodels") / "catalog" / "runtimes"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


@cache
def find_runtime(name: str) -> RuntimeProfile:
    """The catalog's profile of that name.

    Raises:
        ConfigError: no profile has the name.
    """
    if name not in runtime_names():
        raise ConfigError("is no runtime profile", value=name, nearest=did_you_mean(name, runtime_names()))
    path = Path(str(files("costmodels") / "catalog" / "runtimes" / f"{name}.yaml"))
    return read_profile(path)


def read_profile(path: Path) -> RuntimeProfile:
    """The profile that a YAML file holds; its name is the file's."""
    entry = checked(_ProfileFile, read_mapping(path), file=str(path))
    return RuntimeProfile(
        name=path.stem,
        rule_set=entry.rule_set,
        layer_split=entry.layers.split,
        layer_padding=entry.layers.padding,
        recompute_modes=tuple(entry.supports.recompute),
        zero_stages=tuple(entry.supports.zero_stages),
        sequence_parallel=entry.supports.sequence_parallel,
        gradient_bytes=entry.gradients.memory_bytes_per_parameter,
        gradient_message_bytes=entry.gradients.message_bytes_per_parameter,
        overlaps_gradients=entry.overlaps.gradients,
        overlaps_weight_gather=entry.overlaps.weight_gather,
        overlaps_ring=entry.overlaps.ring_attention,
        overlaps_p2p=entry.overlaps.pipeline_transfers,
        matmul_efficiency=entry.efficiency.matmul,
        grouped_matmul_efficiency=entry.efficiency.grouped_matmul,
        attention_efficiency=entry.efficiency.attention,
        memory_efficiency=entry.efficiency.memory,
        network_efficiency=entry.efficiency.network,
        launch_s=entry.launch_us * 1e-6,
        collective_launch_s=entry.collective_launch_us * 1e-6,
        memory_overhead_bytes=round(entry.memory_overhead_gib * 2**30),
        activation_slack=entry.activation_slack,
    )
