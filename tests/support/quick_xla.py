"""Options with which XLA compiles quickly for processors; tests run what they compile a few times only.

XLA ends a process whose environment has a flag that it does not know: a flag that a later version drops goes from here.
"""

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


def on_devices(count):
    """Return the flags of a process with this number of virtual devices."""
    return f"--xla_force_host_platform_device_count={count} {QUICK_FLAGS}"
