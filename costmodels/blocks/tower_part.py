"""Part of a tower: a block over the tokens of images, at a width and a number of tokens of its own.

A tower stands on the first stage, beside the embedding whose result it fills in, and every rank of tp, cp and up runs
all of it on the images of its micro-batch: frameworks take transformers' own module (megatron-core
models/huggingface/module.py; ms-swift swift/megatron/model/mm_gpts/utils.py). So nothing of it is cut or sent, it stays
in 16 bits beside products of 8, and what the job recomputes are the layers of the language model.

Letters: u unique shape rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator, Phase
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Whole:
    """Degrees of a block that every rank has whole, each [n]."""

    ones: IntArray

    @classmethod
    def beside(cls, degrees: Degrees) -> _Whole:
        return cls(ones=np.ones_like(degrees.tp))

    @property
    def tp(self) -> IntArray:
        return self.ones

    @property
    def cp(self) -> IntArray:
        return self.ones

    @property
    def up(self) -> IntArray:
        return self.ones

    @property
    def ep(self) -> IntArray:
        return self.ones

    @property
    def expert_tensor(self) -> IntArray:
        return self.ones


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerPart(AbstractBlock):
    """Block of a tower.

    Attributes:
        tower: Word for the tower, for example `vision`.
        part: Block as it would stand in a row of its own.
        hidden_size: Width of a token of the part.
        images: Mean number of images in one sequence of the job.
        tokens: Tokens of one image in the part.
        trained: Whether steps change its weights; if not, it has a forward pass alone, and keeps nothing.
    """

    kind: ClassVar[str] = "tower_part"
    family: ClassVar[Family] = Family.TOWER

    tower: str
    part: AbstractBlock
    hidden_size: int
    images: float
    tokens: int
    trained: bool

    @property
    def label(self) -> str:
        """Word for the tower, and label of the part."""
        return f"{self.tower}_{self.part.label}"

    @property
    def parameters(self) -> int:
        """Parameters of the part."""
        return self.part.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token of the part uses."""
        return self.part.active_parameters

    @property
    def flops_of_sequence(self) -> float:
        """Model FLOPs for the images of one sequence: two per parameter, three times as many if trained (PaLM)."""
        each = 2.0 * self.active_parameters + float(self.part.mixing_flops(self.tokens))
        return (3.0 if self.trained else 1.0) * self.images * self.tokens * each

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n], all of them."""
        whole = np.asarray(self.part.held(_Whole.beside(degrees)).dense)
        return HeldParameters(dense=whole) if self.trained else HeldParameters(dense=0.0 * whole, frozen=whole)

    def _context(self, context: BlockContext) -> BlockContext:
        """Return what the part is told: sequences of one image each."""
        images = np.asarray(context.mbs * self.images)
        return replace(
            context,
            degrees=_Whole.beside(context.degrees),
            mbs=images,
            tokens=images * self.tokens,
            residual=images * self.tokens,
            row_tokens=self.tokens,
            length=self.tokens,
            expert_ranks=np.ones_like(context.expert_ranks),
            filled_share=1.0,
            sequence_length=self.tokens,
            precision=context.wide,
            narrow_bytes=None,
            dropped_modules=(),
        )

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the operators of the part; images are no tokens of the rank, so that all depend on mbs itself."""
        own = replace(build, context=self._context(build.context))
        found = [replace(operator, is_core=True) for operator in self.part.operators(own)]
        return found if self.trained else [operator for operator in found if operator.phase == Phase.FORWARD]

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return all operators."""
        return self.operators(build)

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally what the part keeps; without gradients nothing."""
        found = self.part.memory(Tally(self._context(tally.context), self.hidden_size))
        none: FloatArray = np.zeros_like(found.kept)
        return replace(found, dropped=none) if self.trained else BlockMemory(kept=none, dropped=none, gradient=none)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return nothing."""
        return Exchanges()

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:
        """Return the matrices of the part, whole; those of a frozen one are not updated."""
        if not self.trained:
            return []
        return self.part.matrices(_Whole.beside(degrees), joins_gate=joins_gate, splits_qkv=splits_qkv)
