"""Tables 1 to 3 of ManuMatic by simulation: planners that count volumes, and an evaluator that knows links and devices.

    python -m benchmarks.manumatic_tables [--table 1 2 3] [--sweep] [--json]

Every row is a way to find a plan of the forward pass; the rest of the step follows from it (`forward_plans`), the same
way for all. D-Rec counts volumes (`symbolic_prices`); who scores the plans is `costmodels.plan.cost_of` on the links and
rooflines of the paper's cluster, layer by layer (`layer_figures`), in a pipeline where there is one. What the paper
leaves open and no planner of its rows decides is given to each row as suits it best: the micro-batch, the stages, ZeRO's
stage 1 or 3, and whether all layers are recomputed or none; a plan that does not fit the memory counts only where none
fits.

Progress goes to stderr.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.cluster import Cluster, find_cluster
from tuner.planners.pins import Pin
from tuner.planners.recursive import Order
from tuner.planners.symbolic_prices import Reading
from tuner.planners.vocabulary import EXPERTS, SEQUENCE

PLANNED_LAYERS = 3
"""A first, a last, and one between them that stands for all."""
PROOF_S = 5.0
"""Seconds for the proof of one pipeline."""
GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What a table assumes.

    Attributes:
        table: Of the paper.
        model: Of the catalog.
        layers: Of it that are trained.
        sequence_length: Tokens.
        sequences: Of a step.
        hosts: Of eight devices.
        precision: Of products.
        stages: Numbers of pipeline stages that a row may take.
        order: Of D-Rec's visits.
        reading: What D-Rec counts between operators.
        missing: Factors that D-Rec's vocabulary lacks.
        pins: The user's.
        optimizer: What keeps moments.
    """

    table: int
    model: str
    layers: int
    sequence_length: int
    sequences: int
    hosts: int = 1
    precision: str = "bf16"
    stages: tuple[int, ...] = (1,)
    order: Order = "price"
    reading: Reading = "by_coefficient"
    missing: frozenset[str] = SEQUENCE
    pins: tuple[Pin, ...] = ()
    optimizer: str = "adam"

    @property
    def cluster(self) -> Cluster:
        """The paper's: Atlas hosts of eight NPUs, 392 GB/s both ways to seven peers, 25 GB/s between hosts."""
        return find_cluster("ascend-910b", hosts=self.hosts)


def _pins(*ops: str, dim: str) -> tuple[Pin, ...]:
    return tuple(Pin(op=op, dim=dim, ways=8) for op in ops)


MATMULS = ("*.attention.qkv", "*.attention.out", "*.dense_mlp.up", "*.dense_mlp.down")
BMMS = ("*.moe_mlp.up", "*.moe_mlp.down")
SCENARIOS = {
    1: Scenario(
        table=1,
        model="mixtral-8x7b",
        layers=16,
        sequence_length=4096,
        sequences=8,
        missing=EXPERTS,
        pins=_pins(*BMMS, dim="experts"),
    ),
    2: Scenario(
        table=2,
        model="llama3-8b",
        layers=32,
        sequence_length=8192,
        sequences=1,
        pins=_pins(*MATMULS, dim="sequence"),
    ),
    3: Scenario(
        table=3,
        model="qwen2.5-72b",
        layers=80,
        sequence_length=32768,
        sequences=16,
        hosts=8,
        stages=(2, 4, 8),
        pins=_pins(*MATMULS, dim="sequence"),
    ),
}

PAPER: dict[int, dict[str, float]] = {
    1: {"megatron": 0.93, "d-rec": 1.0, "pin": 2.24, "expert": 2.49},
    2: {"megatron": 0.98, "d-rec": 1.0, "pin": 2.04, "expert": 1.98},
    3: {"megatron": 0.95, "d-rec": 1.0, "pin + bmpipe": 1.45, "expert": 1.11},
}
"""Speed-ups over D-Rec (ManuMatic, Tables 1 to 3)."""
