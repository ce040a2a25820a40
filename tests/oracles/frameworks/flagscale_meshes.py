"""Checks that FlagScale makes of process meshes, in its own order.

Source: FlagOpen/FlagScale, the arguments of its Megatron-LM (`pre_validate_args` of the class FSTrainArguments) of
2026: every check of `hetero_process_meshes` there that concerns models without experts.
"""

from __future__ import annotations

import itertools
from typing import Any


def broken_checks(system: dict[str, Any], model: dict[str, Any], *, num_layers: int, untied: bool) -> list[str]:
    """Return the checks that the sections of a file break, by a short name."""
    hetero = system["hetero"]
    flat = hetero["hetero_process_meshes"]
    if len(flat) % 5:
        return ["five numbers for each mesh"]
    meshes = [flat[start : start + 5] for start in range(0, len(flat), 5)]
    tp, cp, ep, dp, pp = zip(*meshes, strict=True)
    split, types = hetero["hetero_pipeline_layer_split"], hetero["hetero_device_types"]
    checks = {
        "sequence parallelism between unlike tp": len(set(tp)) == 1 or system.get("sequence_parallel") is True,
        "dp of every mesh divides the samples of a micro-batch": all(
            dp[0] * model["micro_batch_size"] % own == 0 for own in dp
        ),
        "one cp": len(set(cp)) == 1,
        "no ep": set(ep) == {1},
        "pp is the sum": system["pipeline_model_parallel_size"] == sum(pp),
        "a tied table has one tp": untied or tp[0] == tp[-1],
        "no virtual pipeline": not any("virtual" in key for key in system),
        "no layout beside the split": not any("layout" in key for key in system),
        "layers add up": sum(split) == num_layers,
        "layers of every stage": len(split) == sum(pp),
        "a type for each mesh": len(types) == len(meshes),
        "the current type is one of them": hetero["hetero_current_device_type"] in types,
        "the first mesh has the degrees of the file": (tp[0], cp[0])
        == (system["tensor_model_parallel_size"], system["context_parallel_size"]),
        "hetero is on": hetero["enable_hetero"] is True,
        "no mesh is split": all(a != b for a, b in itertools.pairwise(zip(types, tp, strict=True))),
    }
    return [name for name, holds in checks.items() if not holds]
