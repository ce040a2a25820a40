"""Export of transformer plans to Megatron-LM: each axis of the mesh is identified with one kind of parallelism.

A kind determines the factor of every operator that its axis partitions; `_expected` is that table. An axis gets the
kind from which the fewest operators differ. Megatron-LM can run the plan if no operator differs. Otherwise the plan is
refused, with the first operator that differs and Megatron-LM's behaviour there. The kinds follow Megatron-Core's
layers:

    data      the batch everywhere
    context   the sequence everywhere; keys and values are gathered for the core, but mixers with a state exchange heads
    ulysses   the sequence, and heads in the core
    tensor    heads, ffn and vocabulary (columns of qkv and up, rows of out and down, rows of embedding and head);
              norms, residuals and the dispatch of tokens to experts are whole, or by the sequence with sequence
              parallelism

Experts are partitioned like the rest of the layer, or by expert along any kind of axis. Along data and context axes,
any dim of the optimizer's states may be partitioned (ZeRO 1: Megatron-LM partitions a flat buffer, with the same
traffic), and of the parameters, too (ZeRO 3).

Sources: Megatron-Core 0.16, tensor_parallel/layers.py, transformer/attention.py, multi_latent_attention.py and
moe/moe_layer.py, distributed/distrib_optimizer.py; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

from costmodels.sharding.graph import INPUT, STATE, Op, TensorKind
from costmodels.sharding.plan import NONE, Plan
from hardware.io.errors import ConfigError

Kind = Literal["data", "context", "ulysses", "tensor"]

HEADS = ("kv_heads", "query_groups", "heads", "state_heads")
TENSOR = (*HEADS, "ffn", "expert_ffn", "shared_ffn", "vocabulary")
SEQUENCE = ("sequence", "queries", "chunks", "slots")
EXPERTS = ("experts",)
WHOLE = ()
ANY = ("*",)

EXPERT_OPS = ("*.moe_mlp.up*", "*.moe_mlp.down*", "*.moe_mlp.activation*")
SEQUENCE_PARALLEL_OPS = (
    "*norm",
    "*norm.gradient",
    "*residual",
    "*gradient_sum",
    "*.out_bias*",
    "*dense_mlp*down_bias*",
    "*_down*",
    "*.latent_up*",
    "*.router*",
    "*.routing*",
    "*.dispatch*",
    "*.combine*",
    "*.moe_mlp.sum",
    "*.shared.gate*",
    "*.shared.scale*",
    "*.shared.down_bias*",
)
"""Operators between the products that tensor parallelism partitions. The norm of a key shared by all heads is excluded.
"""

ZERO_STAGES = (0, 1, 3)
"""ZeRO stages that plans can distinguish.

Stage 2 is missing: gradients are partitioned where they are summed, together with the optimizer's states or not at all.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Role of an axis in Megatron-LM.

    Attributes:
        kind: Kind of parallelism along the axis.
        by_expert: Whether the axis partitions the experts' own operators by expert.
        sequence_parallel: Whether a tensor axis uses sequence parallelism (see the module).
        zero_stage: ZeRO stage along an axis of another kind.
    """

    kind: Kind
    by_expert: bool = False
    sequence_parallel: bool = False
    zero_stage: int = 0

    @property
    def in_words(self) -> str:
        """Description of the role for error messages."""
        words = f"{self.kind} parallelism" + (" with sequence parallelism" if self.sequence_parallel else "")
        words += " and expert parallelism" if self.by_expert else ""
        return words + (f" and ZeRO {self.zero_stage}" if self.zero_stage else "")


ROLES = (
    *(
        Role(kind=kind, by_expert=by_expert, zero_stage=stage)
        for kind in ("data", "context", "ulysses")
        for by_expert in (False, True)
        for stage in ZERO_STAGES
    ),
    *(
        Role(kind="tensor", by_expert=by_expert, sequence_parallel=sequence_parallel)
        for by_expert in (False, True)
        for sequence_parallel in (False, True)
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronParallelism:
    """A plan in terms of Megatron-LM's parallel degrees.

    Attributes:
        roles: Role of each axis of more than one device, by its name.
        dp: Data parallel degree.
        cp: Context parallel degree that gathers keys and values.
        up: Context parallel degree that exchanges heads.
        tp: Tensor parallel degree, which also partitions embedding and head by the vocabulary.
        ep: Expert parallel degree.
        expert_tp: Tensor parallel degree of the experts.
        sequence_parallel: Whether norms and residuals are partitioned by the sequence along the tensor axes.
        zero_stage: ZeRO stage (0, 1 or 3) over data and context axes together.
        is_in_rank_order: Whether tensor axes are the mesh's fastest and data axes its slowest, as in Megatron-LM.
    """

    roles: dict[str, Role] = field(hash=False)
    dp: int
    cp: int
    up: int
    tp: int
    ep: int
    expert_tp: int
    sequence_parallel: bool
    zero_stage: int
    is_in_rank_order: bool


def megatron_parallelism(plan: Plan) -> MegatronParallelism:
    """Return the parallel degrees of a plan of a transformer graph.

    Raises:
        ConfigError: Megatron-LM cannot run the plan.
    """
    names = {op.name for op in plan.graph.ops}
    if not {"embedding.lookup", "head.logits"} <= names:
        raise ConfigError(
            "is not a plan of a study's model; Megatron-LM trains no other programs", key="plan", value=plan.graph.name
        )
    axes = [axis for axis, size in enumerate(plan.mesh.sizes) if size > 1]
    # Closest role of each axis, with the operators that differ from it.
    wrong = {axis: min((_compare(plan, axis, role) for role in ROLES), key=lambda each: len(each.ops)) for axis in axes}
    first = min((each for each in wrong.values() if each.ops), key=lambda each: each.ops[0], default=None)
    if first is not None:
        raise first.error(plan)
    return _combine_roles(plan, {axis: each.role for axis, each in wrong.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mismatch:
    """Operators that differ from a role of an axis."""

    axis: int
    role: Role
    ops: tuple[int, ...]

    def error(self, plan: Plan) -> ConfigError:
        """Return an error that names the first operator that differs."""
        number, op = self.ops[0], plan.graph.ops[self.ops[0]]
        served, expected = _served_factor(plan, number, self.axis), _expected_at(plan, number, self.role)
        seen = "leaves it whole" if not served else f"cuts its {served}"
        others = len(self.ops) - 1
        count = f", from which {others} more operators differ" if others else ""
        # Describe Megatron-LM's layout at this operator in the words of the plan's layout.
        words = {WHOLE: "leaves it whole", ANY: "cuts its states by one dim"}
        there = words.get(expected) or f"cuts its {expected[0]}"
        return ConfigError(
            f"can't be run by Megatron-LM: axis {plan.mesh.names[self.axis]} is closest to "
            f"{self.role.in_words}{count}; at {op.name} the plan {seen} along it, but Megatron-LM {there}",
            key="plan",
            nearest="pin the operators that differ (--pin, --whole-axes), or export for another framework",
        )


def _compare(plan: Plan, axis: int, role: Role) -> _Mismatch:
    """Return the operators that differ from a role along an axis."""
    ops = []
    for number in range(len(plan.graph.ops)):
        served, expected = _served_factor(plan, number, axis), _expected_at(plan, number, role)
        if expected == ANY:
            # ZeRO may partition any dim, and must if one is divisible.
            is_right = bool(served) or not _can_be_cut(plan, number, axis)
        else:
            is_right = served == (expected[0] if expected else "") or _is_as_good(plan, number, role, served)
        if not is_right:
            ops.append(number)
    return _Mismatch(axis=axis, role=role, ops=tuple(ops))


def _served_factor(plan: Plan, op: int, axis: int) -> str:
    factor = int(plan.served[op, axis])
    return "" if factor == NONE else plan.graph.ops[op].rule.factors[factor].name


def _expected_at(plan: Plan, number: int, role: Role) -> tuple[str, ...]:
    """Return the factor that the role partitions at an operator: the first of the table that it has, ANY or WHOLE."""
    op = plan.graph.ops[number]
    wanted = _expected(op, plan.graph.tensors[op.results[0]].kind, role)
    if wanted == ANY:
        return ANY
    free = [op.rule.factors[factor].name for factor in op.rule.cuttable]
    return next(((name,) for name in wanted if name in free), WHOLE)


def _expected(op: Op, kind: TensorKind, role: Role) -> Sequence[str]:
    """Return the factors that the role partitions at an operator, in the order of preference."""
    is_expert = any(fnmatch(op.name, pattern) for pattern in EXPERT_OPS)
    if is_expert and role.by_expert:
        return EXPERTS
    # Updates run on the layout of the states.
    is_state = op.primitive == STATE or op.name.endswith(".update")
    if role.kind == "tensor":
        is_between = any(fnmatch(op.name, pattern) for pattern in SEQUENCE_PARALLEL_OPS)
        is_spread = is_between and not is_state and not fnmatch(op.name, "*.key_norm*")
        return (*TENSOR, *SEQUENCE) if is_spread and role.sequence_parallel else TENSOR
    if is_state:
        is_parameter = op.primitive == STATE and kind == TensorKind.PARAMETER
        return ANY if role.zero_stage == 3 or (role.zero_stage and not is_parameter) else WHOLE
    if role.kind == "data":
        return ("batch",)
    if not fnmatch(op.name, "*.core*"):
        return SEQUENCE
    # a mixer with a state needs the whole sequence in its core, and exchanges heads along either kind of axis
    return HEADS if role.kind == "ulysses" else ("queries", "state_heads")


def _is_as_good(plan: Plan, number: int, role: Role, served: str) -> bool:
    """Return whether a difference from Megatron-LM's layout changes no traffic.

    Sharding data that all devices hold costs nothing. With ZeRO, a sum of parameter gradients may have the layout of
    the states or that of the parameter itself.
    """
    op = plan.graph.ops[number]
    if op.primitive == INPUT:
        return not served
    is_of_parameter = plan.graph.tensors[op.results[0]].kind == TensorKind.GRADIENT
    return op.name.endswith(".gradient_sum") and is_of_parameter and role.zero_stage > 0


def _can_be_cut(plan: Plan, number: int, axis: int) -> bool:
    """Return whether the axis divides some factor, in addition to the axes that already serve it."""
    op, sizes = plan.graph.ops[number], plan.mesh.sizes
    # Number of parts into which the served axes already divide each factor.
    ways = [1] * len(op.rule.factors)
    for other, factor in enumerate(plan.served[number].tolist()):
        if factor != NONE:
            ways[factor] *= sizes[other]
    return any(op.rule.factors[factor].size % (ways[factor] * sizes[axis]) == 0 for factor in op.rule.cuttable)


def _combine_roles(plan: Plan, roles: dict[int, Role]) -> MegatronParallelism:
    """Return the parallel degrees, after a check that all axes agree on settings that Megatron-LM has only once."""
    names, sizes = plan.mesh.names, plan.mesh.sizes

    def degree(*kinds: Kind) -> int:
        return math.prod(sizes[axis] for axis, role in roles.items() if role.kind in kinds)

    # Megatron-LM has one switch for sequence parallelism, and one ZeRO stage for the other axes.
    tensor = {axis: role.sequence_parallel for axis, role in roles.items() if role.kind == "tensor"}
    other = {axis: role.zero_stage for axis, role in roles.items() if role.kind != "tensor"}
    for found, words in ((tensor, "sequence parallelism"), (other, "the ZeRO stage")):
        if len(set(found.values())) > 1:
            raise ConfigError(
                f"can't be run by Megatron-LM, which has {words} along all axes or none: the plan has "
                + " and ".join(f"{int(value)} along {names[axis]}" for axis, value in found.items()),
                key="plan",
                nearest="--whole-axes, or export for another framework",
            )
    # Kinds from the slowest to the fastest axis in Megatron-LM's order of ranks.
    speed: dict[Kind, int] = {"data": 0, "context": 1, "ulysses": 2, "tensor": 3}
    order = [speed[role.kind] for role in roles.values()]
    return MegatronParallelism(
        roles={names[axis]: role for axis, role in roles.items()},
        dp=degree("data"),
        cp=degree("context"),
        up=degree("ulysses"),
        tp=degree("tensor"),
        ep=math.prod(sizes[axis] for axis, role in roles.items() if role.by_expert),
        expert_tp=math.prod(
            sizes[axis] for axis, role in roles.items() if role.kind == "tensor" and not role.by_expert
        ),
        sequence_parallel=any(tensor.values()),
        zero_stage=max(other.values(), default=0),
        is_in_rank_order=order == sorted(order),
    )
