"""Answers of a rehearsal: what the user's program said and needed as one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.rehearsal.workspaces import workspace_bytes

Verdict = Literal["accepted", "refused", "unknown"]
"""Whether the program ran to the end of its steps; unknown where something of the rehearsal is missing."""
PARTS = ("weights", "gradients", "optimizer", "activations", "other")
"""Purposes of memory, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind in a step.

    Attributes:
        name: Name of PyTorch's operator.
        size_bytes: Bytes of its largest tensor on the rank, gathered ones included.
        ranks: Ranks of its group.
        peer: Other rank of a message; None for a collective.
        count: Number of calls.
    """

    name: str
    size_bytes: int
    ranks: tuple[int, ...]
    peer: int | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrder:
    """What a rank ran in a step, in its order.

    Attributes:
        micro_batches: Number of micro-batches of the step; None if the program does not say.
        steps: Number of a kind of operator or collective, or -1 minus the number of the collective that is waited for.
    """

    micro_batches: int | None
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAnswer:
    """Answer of one rank.

    Attributes:
        rank: Number of the rank.
        stage: Number of its pipeline stage.
        framework: Framework of the program: `torch` or `jax`.
        verdict: Whether the program ran.
        error: Error of the program, or what is missing; None if it ran.
        where: Lines of the program on the way to the error, the innermost last.
        printed: Last lines that the program printed.
        parameters: Number of parameters of the rank; None if its model was not built.
        peak_bytes: Largest number of bytes of all tensors alive in the last step; None without one.
        parts: Bytes at that peak by PARTS.
        workspace_bytes: Bytes of the workspaces of cuBLAS, which are no tensors of the program.
        micro_batches: Number of micro-batches that were made of a step, and that it has; None without a step.
        is_whole_step: Whether bytes, operators and collectives are those of all micro-batches: made, or followed from
            two steps of different numbers.
        operators: Number of calls of operators in a step.
        collectives: Collectives of a step.
        invented: Number of times that each place in the program got an answer that no data gave.
        compiled_for: What XLA compiled a JAX program for: `gpu`, as the study's device, or `cpu`; None with PyTorch.
        cpu_s: CPU time of the last step [s]; of a JAX program, of all.
        cpu_parts_s: CPU time of the import, which all ranks share, of building the model, of each step, and of the
            whole case without the import [s].
        resident_bytes: Memory of the process that rehearsed [bytes].
        kinds: Kinds of operators (name, shapes, bytes moved) and collectives (name, bytes, ranks, peer) of `orders`.
        orders: Order of the last two steps; empty if it was not asked for.
    """

    rank: int
    stage: int
    framework: str = "torch"
    compiled_for: str | None = None
    verdict: Verdict
    error: str | None = None
    where: tuple[str, ...] = ()
    printed: str = ""
    parameters: int | None = None
    peak_bytes: int | None = None
    parts: Mapping[str, int]
    workspace_bytes: int = 0
    micro_batches: tuple[int, int] | None = None
    is_whole_step: bool = False
    operators: int = 0
    collectives: tuple[Collective, ...] = ()
    invented: Mapping[str, int]
    cpu_s: float | None = None
    cpu_parts_s: Mapping[str, float] = field(default_factory=dict)
    resident_bytes: int = 0
    kinds: tuple[tuple[Any, ...], ...] = ()
    orders: tuple[StepOrder, ...] = ()

    @property
    def allocated_bytes(self) -> int | None:
        """Peak as `torch.cuda.max_memory_allocated` counts it: tensors and workspaces."""
        return None if self.peak_bytes is None else self.peak_bytes + self.workspace_bytes

    @staticmethod
    def from_json(
        found: Mapping[str, Any], stage: int, capability: tuple[int, int], variables: Mapping[str, str | None]
    ) -> RankAnswer:
        """Return the answer that the room wrote for a rank of a stage.

        Args:
            found: The answer.
            stage: Number of the stage.
            capability: Compute capability that the program was told.
            variables: Environment variables of the program.
        """
        parts, further = found.get("peak_parts", {}), found.get("further_bytes", 0)
        peaks, cpu_s = found.get("peaks") or [None], found.get("cpu_s") or [None]
        return RankAnswer(
            rank=found["rank"],
            stage=stage,
            framework=found.get("framework", "torch"),
            compiled_for=found.get("compiled_for"),
            verdict=found["verdict"],
            error=found["error"],
            where=tuple(found.get("where", ())),
            printed=found.get("printed", ""),
            parameters=found.get("parameters"),
            peak_bytes=None if peaks[-1] is None else peaks[-1] + further,
            parts=parts | {"activations": parts.get("activations", 0) + further} if further else parts,
            workspace_bytes=workspace_bytes(capability, variables, (name for name, *_ in found.get("operators", ()))),
            micro_batches=tuple(found["micro_batches"]) if found.get("micro_batches") else None,
            is_whole_step=found.get("is_whole_step", False),
            operators=sum(count for *_, count in found.get("operators", ())),
            collectives=tuple(
                Collective(name=name, size_bytes=size, ranks=tuple(ranks), peer=None if peer < 0 else peer, count=count)
                for name, size, ranks, peer, count in found.get("collectives", ())
            ),
            invented=found.get("invented", {}),
            cpu_s=cpu_s[-1],
            cpu_parts_s={
                "import": found.get("import_cpu_s", 0.0),
                "build": found.get("build_cpu_s", 0.0),
                **{f"step {number}": taken for number, taken in enumerate(found.get("cpu_s") or (), 1)},
                "case": found.get("case_cpu_s", 0.0),
            },
            resident_bytes=found.get("resident_bytes", 0),
            kinds=tuple(map(tuple, found.get("kinds", ()))),
            orders=tuple(
                StepOrder(micro_batches=one["micro_batches"], steps=tuple(one["steps"]))
                for one in found.get("orders", ())
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "framework": self.framework,
            "compiled_for": self.compiled_for,
            "verdict": self.verdict,
            "error": self.error,
            "where": list(self.where),
            "printed": self.printed,
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "workspace_bytes": self.workspace_bytes,
            "parts_bytes": {part: self.parts.get(part, 0) for part in PARTS},
            "micro_batches": None if self.micro_batches is None else list(self.micro_batches),
            "is_whole_step": self.is_whole_step,
            "operators": self.operators,
            "collectives": [
                {
                    "name": one.name,
                    "size_bytes": one.size_bytes,
                    "ranks": list(one.ranks),
                    "peer": one.peer,
                    "count": one.count,
                }
                for one in self.collectives
            ],
            "invented": dict(self.invented),
            "cpu_s": self.cpu_s,
            "cpu_parts_s": dict(self.cpu_parts_s),
            "resident_bytes": self.resident_bytes,
        }
