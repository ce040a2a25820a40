"""Description of a device for XLA's compiler, which needs no device then.

Figures of a generation that the catalog of devices does not have are those of XLA's own descriptions (openxla/xla,
`xla/backends/gpu/target_config/specs`: v100, a100_sxm_80, h100_sxm, b200 and b300.txtpb).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware.compute_capability import capability_of
from hardware.device import Device


@dataclass(frozen=True, slots=True)
class _Generation:
    """Figures of a generation of GPUs: sizes in bytes, the clock in GHz, and whether kernels use its own features."""

    per_core: int
    at_most: int
    l2_cache: int
    clock: float
    fpus: int
    is_accelerated: bool


_GENERATIONS: Mapping[tuple[int, int], _Generation] = {
    (7, 0): _Generation(98304, 98304, 6291456, 1.53, 64, is_accelerated=False),
    (8, 0): _Generation(167936, 166912, 41943040, 1.41, 64, is_accelerated=False),
    (9, 0): _Generation(233472, 232448, 52428800, 1.98, 128, is_accelerated=True),
    (10, 0): _Generation(233472, 232448, 132644864, 1.965, 128, is_accelerated=True),
    (10, 3): _Generation(233472, 232448, 135528448, 1.965, 128, is_accelerated=False),
}


def target_of(device: Device) -> str | None:
    """Return XLA's description of a device, as text of its protocol buffer; None for one of an unknown generation."""
    capability = capability_of(device)
    found = _GENERATIONS.get(capability) if capability is not None else None
    if capability is None or found is None or device.num_sms is None:
        return None
    major, minor = capability
    extension = "feature_extension: ACCELERATED_FEATURES " if found.is_accelerated else ""
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
        f"shared_memory_per_core: {found.per_core} threads_per_core_limit: 2048 core_count: {device.num_sms} "
        f"fpus_per_core: {found.fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 "
        f"block_dim_limit_z: 65535 memory_bandwidth: {round(device.memory_bandwidth_bytes_per_s)} "
        f"l2_cache_size: {found.l2_cache} clock_rate_ghz: {found.clock} device_memory_size: {device.memory_bytes} "
        f"shared_memory_per_block_optin: {found.at_most} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} {extension}}} registers_per_core_limit: 65536 "
        "registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 } "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "NVIDIA {device.name}"'
    )
