"""Training job: model, batch and numerics of one optimizer step, independent of devices and parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.job.decoder import check_count
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import DIMENSIONS, FurtherValues, Value
from costmodels.job.sequences import Sequences, check_rows, pack_rows
from costmodels.optimizers.contract import MOMENT_BYTES, Widths
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError, did_you_mean

PRECISIONS = ("bf16", "fp16", "nvfp4", "fp8", "tf32", "fp32")
NARROW_BYTES = {"fp8": 1.0, "nvfp4": 0.5625}
"""Bytes of an element that a product in a narrow type keeps of its inputs; nvfp4 adds one byte per 16 elements."""
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe_act", "mla_up_proj", "moe", "shared_experts")
"""Modules that `selective` recomputation can name (megatron-core transformer_config.py, recompute_modules)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob(FurtherValues):
    """One optimizer step: model, batch, numerics, and the values of further dimensions that no study searches.

    A value of FurtherValues holds where the study does not search its dimension; sequence_parallel = None leaves it to
    the runtime.

    Attributes:
        model: Sizes of the model that is trained.
        sequence_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step.
        precision: Type of the matrix products; weights and activations are 2 bytes wide (4 for fp32 and tf32).
        optimizer: Name of the optimizer, one of `OPTIMIZERS`.
        recompute_modules: Modules that `selective` recomputation repeats, by Megatron-Core's names (RECOMPUTE_MODULES).
        recompute_unit: Layers that `full` recomputation repeats together: the input of the first of them alone is kept.
        shared_master_weights: Whether the bf16 weights are the upper half of their fp32 copies, which then have no
            memory of their own (MindSpeed --reuse-fp32-param).
        sequences: Histogram of the lengths of sequences, and how they fill micro-batches; None where every sequence has
            `sequence_length` tokens.
    """

    model: ModelSpec
    sequence_length: int
    global_batch_size: int
    precision: str = "bf16"
    optimizer: str = DEFAULT_OPTIMIZER
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_unit: int = 1
    shared_master_weights: bool = False
    sequences: Sequences | None = None

    def __post_init__(self) -> None:
        """Refuse sizes and names that no runtime knows."""
        for key in ("sequence_length", "global_batch_size", "recompute_unit"):
            check_count(getattr(self, key), key=key)
        for key, known in (("precision", PRECISIONS), ("optimizer", tuple(OPTIMIZERS))):
            value = getattr(self, key)
            if value not in known:
                raise ConfigError("is not known", key=key, value=value, nearest=did_you_mean(value, known))
        for module in self.recompute_modules:
            if module not in RECOMPUTE_MODULES:
                rule, nearest = "is no module that can be recomputed", did_you_mean(module, RECOMPUTE_MODULES)
                raise ConfigError(rule, key="recompute_modules", value=module, nearest=nearest)
        if self.shared_master_weights and self.precision not in ("bf16", "fp8"):
            raise ConfigError("must be bf16 or fp8 with shared_master_weights", key="precision", value=self.precision)
        if self.sequences is not None:
            check_rows(self.sequences, self.sequence_length)
        for dimension, value in self.fixed_values(sequence_parallel=True).items():
            DIMENSIONS[dimension].check(value)

    def fixed_values(self, *, sequence_parallel: bool) -> dict[str, Value]:
        """Return the further dimensions as this job fixes them.

        Args:
            sequence_parallel: Value of the runtime, for a job that leaves it out.
        """
        fixed = {name: getattr(self, name) for name in DIMENSIONS}
        return fixed if self.sequence_parallel is not None else fixed | {"sequence_parallel": sequence_parallel}

    @property
    def is_single(self) -> bool:
        """Whether weights and activations are single precision; tf32 rounds them inside the products only."""
        return self.precision in ("fp32", "tf32")

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of one optimizer step, without padding."""
        return round(self.sequence_length * self.global_batch_size * self.filled_share)

    @property
    def filled_share(self) -> float:
        """Mean share of a row of `sequence_length` tokens that is no padding."""
        if self.sequences is None:
            return 1.0
        if not self.sequences.is_packed:
            return self.sequences.mean_length / self.sequence_length
        return float(pack_rows(self.sequences, self.sequence_length).tokens.mean() / self.sequence_length)

    @property
    def sequences_per_step(self) -> float:
        """Mean number of sequences of one optimizer step."""
        if self.sequences is None:
            return self.global_batch_size
        return self.sequence_length * self.global_batch_size * self.filled_share / self.sequences.mean_length

    @property
    def model_flops_per_step(self) -> float:
        """Model FLOPs of one optimizer step, those of padding not counted; see `ModelSpec.model_flops_per_token`."""
        length = self.sequence_length if self.sequences is None else self.sequences.attended_length
        of_images = self.global_batch_size * sum(tower.flops_of_sequence for tower in self.model.towers)
        return self.tokens_per_step * self.model.model_flops_per_token(length) + of_images

    def row_tokens(self, mbs: IntArray) -> FloatArray | int:
        """Return the mean tokens of a row of micro-batches of so many rows, padding included [n]."""
        if self.sequences is None or self.sequences.is_packed:
            return self.sequence_length
        return self.sequences.mean_longest(mbs)

    def attended_length(self, mbs: IntArray) -> FloatArray | float:
        """Return the length of sequences for which the attention of a micro-batch is priced [n].

        It is the mean, over the tokens of micro-batches of so many rows, of the length of the sequence in which they
        stand.
        """
        if self.sequences is None:
            return self.sequence_length
        if self.sequences.is_packed:
            return self.sequences.attended_length
        return self.sequences.mean_longest(mbs, power=2) / self.sequences.mean_longest(mbs)

    @property
    def largest(self) -> TrainingJob:
        """Job with the largest micro-batch of this one throughout; it decides on memory."""
        if self.sequences is None:
            return self
        length = self.sequence_length if self.sequences.is_packed else self.sequences.longest
        return replace(self, sequences=None, sequence_length=length)

    @property
    def element_bytes(self) -> int:
        """Size of one weight or activation element [bytes]."""
        return 4 if self.is_single else 2

    @property
    def optimizer_state_bytes(self) -> float:
        """Size of the optimizer states per parameter of a layer's matrices, with fp32 master weights [bytes].

        Narrower weights have these. Source: ZeRO (Rajbhandari et al. 2020), section 3.1: K = 12 for mixed-precision
        Adam.
        """
        widths = Widths(weight=0 if self.is_single else 4, first=MOMENT_BYTES, second=MOMENT_BYTES)
        return widths.weight + OPTIMIZERS[self.optimizer].state_bytes("matrix", widths)
