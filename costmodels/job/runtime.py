"""Profiles of training frameworks: their facts and fitted constants, as data.

A profile holds facts and constants. The facts (supported degrees and schedules, overlaps, widths of gradients) are
cited in the catalog file. The CONSTANTS are a few efficiencies and overheads inside physical bounds; they are fitted to
measured steps (costmodels/calibration), and the file states on which ones and with which errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodels.job.layer_change import LayerChange
from hardware.io.catalogs import added_files
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean

LAYOUT_RULE_SETS = ("megatron", "unknown")
"""Rule sets of frameworks whose first and last chunk may be without layers (Megatron-LM's pipeline layouts)."""
BALANCED_RULE_SETS = (*LAYOUT_RULE_SETS, "mindspeed")
"""Rule sets of frameworks whose chunks of unequal length are laid out so that the stages are equal.

Those of other frameworks are spread over the chunks alone, as in studies from before these frameworks had any.
"""
COMPILED_RULE_SETS = ("torchtitan", "maxtext", "mindformers", "jax-reference")
"""Rule sets of frameworks whose fused elementwise operators are those of a compiler, and not kernels of a library."""
PLAN_RULE_SETS = ("jax-reference", "torch-planned")
"""Rule sets of the frameworks that run any sharding plan. All others shard layers by hand, so that what a plan gains in
a prediction or a simulation is nothing that their users can have."""

_CATALOG_DIR = Path(__file__).parents[1] / "catalog" / "runtimes"

LayerSplit = Literal["even", "balanced", "least-bottleneck"]
"""Ways to split layers into stages; see `RuntimeProfile.layer_split`."""

CapturedBlocks = Literal["none", "attention", "router", "attention+router", "attention+mlp"]
"""Blocks of a layer in captured graphs; see `RuntimeProfile.captured_blocks`."""

OffloadMode = Literal["none", "optimizer"]
"""Kinds of states that may be on the host; see `RuntimeProfile.offload_modes`."""

MuonTpMode = Literal["blockwise", "duplicated", "distributed"]

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""Ways to scale tensors in fp8; see `RuntimeProfile.fp8_recipe`."""

UnevenPart = Literal["layers", "recomputed", "micro_batches", "hosts"]
"""Parts of an `Assignment` that a framework can be told; see `RuntimeProfile.uneven`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Bounds of a constant that a fit may move, and its prior before any measurement.

    Attributes:
        lower: Smallest value that physics allows.
        upper: Largest value that physics allows.
        typical: Best guess for a runtime without measurements.
        log_error: Standard deviation of the logarithm of that guess.
        meaning: Description of the constant, for messages and documents.
    """

    lower: float
    upper: float
    typical: float
    log_error: float
    meaning: str


CONSTANTS = {
    name: Constant(lower=lower, upper=upper, typical=typical, log_error=log_error, meaning=meaning)
    for name, (lower, upper, typical, log_error), meaning in (
        ("matmul_efficiency", (0.3, 1.1, 0.85, 0.1), "matrix products: speed in training over speed alone"),
        (
            "grouped_matmul_efficiency",
            (0.15, 1.1, 0.75, 0.2),
            "grouped products of experts: speed in training over speed alone",
        ),
        ("attention_efficiency", (0.15, 1.2, 0.85, 0.15), "attention: speed in training over speed alone"),
        ("memory_efficiency", (0.1, 1.0, 0.7, 0.25), "memory-bound operators: speed in training over speed alone"),
        ("network_efficiency", (0.15, 1.1, 0.85, 0.2), "collectives: speed in training over speed alone"),
        ("overlap_efficiency", (0.05, 1.0, 0.8, 0.25), "share of the overlappable traffic that is hidden"),
        ("launch_s", (1e-6, 6e-4, 1e-4, 0.7), "host time to launch one operator [s]"),
        ("collective_launch_s", (1e-6, 3e-3, 5e-5, 1.0), "host time to issue one collective [s]"),
        (
            "pending_transfer_s",
            (1e-7, 2e-3, 1e-6, 1.0),
            "time that each member adds to a tp collective while pipeline transfers between hosts are pending [s]",
        ),
        ("hop_launch_s", (1e-6, 2e-2, 1e-4, 1.0), "host time to hand one micro-batch on [s]"),
        (
            "stall_s",
            (1e-4, 5.0, 1e-3, 1.0),
            "time of a micro-batch, each way, while the allocator starts over or the network stalls [s]",
        ),
        ("expert_imbalance", (1e-3, 1.0, 0.1, 0.7), "load of the fullest expert rank beyond the mean"),
        ("step_overhead_s", (1e-4, 1.0, 0.01, 1.0), "time once per step for data, logging, clipping [s]"),
        ("straggler_share", (1e-4, 0.1, 0.005, 1.0), "share of the time that the slowest of twice as many hosts adds"),
    )
}
"""The constants that a fit may move, each inside its bounds."""

UNKNOWN = "unknown"
"""Name of the profile for a framework that the catalog lacks, or that nobody named."""

REHEARSED = frozenset({"jax-reference", "torch-planned"})
"""Names of profiles of trials that run on processors only and stand for no framework; none was fitted to anything."""

LATER_FACTS = frozenset(
    {
        "gathers_tokens",
        "captured_blocks",
        "loss_chunks",
        "copies_softmax",
        "main_weight_bytes",
        "first_moment_bytes",
        "second_moment_bytes",
        "offload_share",
        "expandable_segments",
        "torch_fsdp2",
        "fsdp2_mixed",
        "muon_tp_mode",
        "muon_splits_qkv",
        "newton_schulz",
        "newton_schulz_steps",
        "fp8_recipe",
    }
)
"""Facts that earlier versions of Meshtune did not know."""

FSDP2_STAGE = 2
"""Lowest ZeRO stage of PyTorch's FSDP2, which keeps gathered weights until the backward pass; 3 gathers them again."""

NOT_FITTED = "nothing yet"
"""Begin of `fitted_on` in profiles whose constants are guesses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerResidual:
    """Cell of layers of one shape, with the residual that a fit leaves for them (see costmodels/calibration).

    Attributes:
        device: Name of the device, or of several unlike ones in the form of `Cluster.device_names`.
        hidden_size: Hidden size of the model.
        tp: Tensor parallel degree.
        tokens: Tokens of one micro-batch on one rank.
        sequence_length: Tokens of one sequence.
        weight: Coefficient of the cell's kernel function in the Gaussian process.
    """

    device: str
    hidden_size: int
    tp: int
    tokens: int
    sequence_length: int
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeProfile:
    """Facts and constants of one training framework.

    Attributes:
        name: Name of the profile in the catalog.
        rule_set: Name of the rules that its configurations obey.
        layer_split: Split of layers into stages: "even" (no-op layers at the end fill a padded count), "balanced"
            (contiguous blocks of equal cost, embedding and head counted) or "least-bottleneck" (contiguous blocks of
            which the largest is as small as can be, the head counted).
        layer_padding: Multiple to which the number of layers is padded with no-op layers; 1 pads nothing.
        vocabulary_multiple: Multiple to which the rows of the vocabulary on each tp rank are padded.
        pads_whole_vocabulary: Whether the vocabulary is padded also where tp is 1.
        recompute_modes: Recompute modes that the framework offers.
        selective_products: Whether selective recomputation keeps attention and every second product of a layer, and
            repeats all else; otherwise it repeats the job's modules.
        whole_experts: Whether experts that are dealt out over ranks are never cut by tp, so that a job that leaves
            their tensor degree open has 1.
        offload_modes: Kinds of states that the framework can keep and update on the host.
        zero_stages: ZeRO stages that the framework offers.
        sequence_parallel: Whether norms are split over tp where the job leaves it open.
        uneven: Parts of an `Assignment` that the framework can be told; the order of hosts is the order in which a job
            is started.
        gradient_bytes: Bytes of gradient memory per parameter (accumulation buffers included).
        shards_gradients: Whether gradients are kept only as shards wherever optimizer states are sharded.
        gradient_message_bytes: Bytes per parameter on the wire when gradients are reduced.
        gradient_bucket: Parameters whose gradients one collective carries where states are sharded; 0 stands for those
            of a layer.
        weight_bucket: Parameters that one gathering collective carries; 0 stands for those of a layer.
        reduces_each_micro_batch: Whether ZeRO 2 reduces gradients after every micro-batch, as ZeRO 3 does; otherwise
            once per step.
        shards_tied_gradients: Whether the ends of a pipeline add up the gradients of a tied table after these were
            sharded, if they are sharded at all.
        fp32_ring_gradients: Whether the gradients of keys and values go round the ring in fp32.
        gathers_inputs_again: Whether the inputs of sequence-parallel products are kept split and gathered once more in
            the backward pass, for their weights' gradients; otherwise they are kept as gathered.
        fused_attention: Whether attention is a flash kernel; otherwise its scores pass through memory and are kept.
        flash2_attention: Whether flash attention is FlashAttention-2 also on devices that have faster kernels (cuDNN's,
            FlashAttention-3).
        attention_dropout: Whether unfused attention drops some of its probabilities.
        fused_elementwise: Whether norms, activations and residuals are fused kernels (a compiler's or hand-written)
            that touch memory once.
        fused_activation: Whether a gated activation is one kernel; of a framework whose other elementwise operators are
            fused, it may be off by itself.
        fused_accumulation: Whether weight gradients are added to their fp32 sum inside the matrix product.
        fused_cross_entropy: Whether the loss is one kernel that keeps no fp32 logits.
        logit_bytes: Bytes per logit at a loss that is not fused: the logits and their fp32 copies together.
        copies_softmax: Whether its backward pass copies the fp32 softmax beside them.
        step_bytes: Bytes per parameter of an optimizer shard that the optimizer's step adds: fp32 gradients, flattened
            copies.
        loss_chunks: Parts of the tokens whose logits are computed one after the other.
        main_weight_bytes: Bytes per parameter of the optimizer's own copy of weights that are narrower than fp32.
        first_moment_bytes: Bytes per parameter of the optimizer's first moment.
        second_moment_bytes: Bytes per parameter of its second moment.
        offload_share: Share of the optimizer's states that are on the host where they are offloaded.
        expandable_segments: Whether the allocator grows its segments, so that activations do not fragment them.
        torch_fsdp2: Whether PyTorch's FSDP2 shards the states in place of the framework's own ways.
        muon_tp_mode: What Muon does with a matrix that tp cuts (step/weights/products.py).
        muon_splits_qkv: Whether Muon takes queries, keys and values apart.
        newton_schulz: How Muon's iterations are computed (optimizers/muon.py).
        newton_schulz_steps: Number of its iterations.
        fp8_recipe: Scaling of tensors in fp8: "delayed" (by the maxima of earlier steps), "tensorwise" (by the tensor's
            own maximum), "blockwise" or "mxfp8" (by the maxima of its blocks).
        fp32_weights: Whether the stored (sharded) weights are fp32 and serve as the optimizer's own copy too.
        keeps_empty_gradients: Whether an empty gradient of each shape of weight is kept where fused accumulation has
            added the true one up; "layers" is all but the head's.
        fsdp2_mixed: Whether PyTorch's FSDP2 gathers fp32 weights in the width of the products, and reduces gradients in
            fp32, layer by layer.
        gathered_share: Share of the inputs gathered for sequence-parallel products that the allocator cannot reuse yet
            at the peak, because another stream frees them while the host runs ahead.
        overlaps_gradients: Whether gradient reduction runs beside the last micro-batch's backward pass.
        overlaps_weight_gather: Whether sharded weights are gathered beside the forward pass.
        overlaps_tensor: Whether tp collectives run beside the products they feed.
        overlaps_tensor_gradients: Whether the backward pass's tp collectives run beside the weight gradients' products.
        overlaps_experts: Whether the experts' exchanges run beside another micro-batch's compute.
        overlaps_ring: Whether ring-attention exchanges run beside attention.
        overlaps_p2p: Whether pipeline transfers run beside compute when vpp > 1.
        stalled_hosts: Number of hosts from which on pipeline transfers were observed to stall; 0 is never.
        deduplicates_tokens: Whether a token is sent once to a host, or a rank, that holds several of its experts.
        gathers_tokens: Whether the ranks of an expert group gather each other's tokens, and sum up the results;
            otherwise each token is sent to its experts.
        scatters_p2p: Whether a tp rank sends only its share of the activations to the next stage, which gathers them,
            also without sequence parallelism, and likewise their gradients back; "activations" excludes gradients.
        sends_mask: Whether an attention mask in 16 bits travels with the activations of each micro-batch.
        splits_documents: Whether context parallelism splits every sequence of a packed row over its ranks; otherwise it
            splits the row.
        captured_graph: Whether the device replays a whole captured or compiled step: no launch waits for the host.
        captured_blocks: Blocks of a layer of which the device replays a captured graph each.
        matmul_efficiency: Speed of matrix products inside a training step over their speed alone (see kernels.py).
        grouped_matmul_efficiency: Speed of the experts' grouped products inside a step over their speed alone.
        attention_efficiency: Speed of attention inside a step over its speed alone.
        memory_efficiency: Speed of memory-bound operators inside a step over their speed alone.
        network_efficiency: Speed of collectives inside a step over their speed alone.
        overlap_efficiency: Share of the traffic beside compute that costs nothing.
        launch_s: Host time to launch one operator of costmodels/operators/layer_operators.py with all its kernels [s].
        collective_launch_s: Host time to issue one collective inside a layer [s].
        pending_transfer_s: Time that each member adds to a tp collective while pipeline transfers between hosts are
            pending [s].
        hop_launch_s: Host time to hand one micro-batch to the next stage, one way [s].
        stall_s: Time that each pass of a micro-batch, forward and backward, waits where its memory does not quite fit
            (the allocator frees and asks again) or its transfers stall [s].
        expert_imbalance: Share of tokens that the fullest expert rank has beyond the mean.
        step_overhead_s: Time of a step beside its passes, its traffic and the optimizer: data, logging, clipping [s].
        straggler_share: Share of its passes that a step waits longer for each doubling of the hosts.
        workspace_bytes: Workspaces of the libraries for matrix products [bytes]. The 80 MiB of most profiles are
            measured: Megatron-LM's functional tests hold 0.06 to 0.11 GiB beside their training states
            (tests/functional_tests, golden values of mem-allocated-bytes).
        memory_overhead_bytes: Device memory outside the tally: context, communicators [bytes].
        activation_slack: Share that the allocator holds beyond the tally of activations, logits and buffers.
        device_speed: Speed of each device's kernels in this runtime relative to its other figures, by name.
        residuals: Residuals that the constants leave for layers of one shape.
        layer_changes: Changes of a study's sharding plans to layers; empty where the plans are Megatron's.
        log_errors: Standard deviation of the logarithm of each fitted constant.
        step_error: Standard deviation of the log of measured over predicted step times on groups outside the fit.
        memory_error: Standard deviation of the log of measured over predicted memory peaks on such groups.
        knows_cluster: Whether the constants were fitted to runs of the user's own cluster.
        knows_memory: Whether `memory_error` is that of peaks measured there.
        stated: Facts that are known of the run itself (facts.py); they hold under every profile.
    """

    name: str
    rule_set: str
    layer_split: LayerSplit
    layer_padding: int
    vocabulary_multiple: int
    pads_whole_vocabulary: bool
    recompute_modes: tuple[str, ...]
    selective_products: bool
    whole_experts: bool
    offload_modes: tuple[str, ...]
    zero_stages: tuple[int, ...]
    sequence_parallel: bool
    uneven: tuple[str, ...]
    gradient_bytes: int
    shards_gradients: bool
    gradient_message_bytes: int
    gradient_bucket: int
    weight_bucket: int
    reduces_each_micro_batch: bool
    shards_tied_gradients: bool
    fp32_ring_gradients: bool
    gathers_inputs_again: bool
    fused_attention: bool
    flash2_attention: bool
    attention_dropout: bool
    fused_elementwise: bool
    fused_accumulation: bool
    fused_cross_entropy: bool
    logit_bytes: float
    step_bytes: float
    fp32_weights: bool
    gathered_share: float
    overlaps_gradients: bool
    overlaps_weight_gather: bool
    overlaps_tensor: bool
    overlaps_tensor_gradients: bool
    overlaps_experts: bool
    overlaps_ring: bool
    overlaps_p2p: bool
    deduplicates_tokens: bool
    scatters_p2p: bool | Literal["activations"]
    splits_documents: bool
    captured_graph: bool
    sends_mask: bool
    stalled_hosts: int
    matmul_efficiency: float
    grouped_matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    network_efficiency: float
    overlap_efficiency: float
    launch_s: float
    collective_launch_s: float
    pending_transfer_s: float
    hop_launch_s: float
    stall_s: float
    expert_imbalance: float
    step_overhead_s: float
    straggler_share: float
    workspace_bytes: int
    memory_overhead_bytes: int
    activation_slack: float
    device_speed: tuple[tuple[str, float], ...]
    residuals: tuple[LayerResidual, ...]
    layer_changes: tuple[LayerChange, ...] = ()
    log_errors: tuple[tuple[str, float], ...]
    step_error: float
    memory_error: float
    knows_cluster: bool = False
    knows_memory: bool = False
    gathers_tokens: bool = False
    captured_blocks: CapturedBlocks = "none"
    loss_chunks: int = 1
    copies_softmax: bool = False
    keeps_empty_gradients: bool | Literal["layers"] = False
    fused_activation: bool = True
    main_weight_bytes: int = 4
    first_moment_bytes: int = 4
    second_moment_bytes: int = 4
    offload_share: float = 1.0
    expandable_segments: bool = False
    torch_fsdp2: bool = False
    fsdp2_mixed: bool = False
    muon_tp_mode: MuonTpMode = "blockwise"
    muon_splits_qkv: bool = True
    newton_schulz: Literal["standard", "gram"] = "standard"
    newton_schulz_steps: int = 5
    fp8_recipe: Fp8Recipe = "delayed"
    stated: tuple[tuple[str, Any], ...] = ()

    @property
    def runs_plans(self) -> bool:
        """Whether the framework shards layers by any plan, and not only by hand."""
        return self.rule_set in PLAN_RULE_SETS

    @staticmethod
    def later_fields() -> dict[str, Any]:
        """Return the facts that earlier versions of Meshtune did not know, with the values that they assumed."""
        return {field.name: field.default for field in fields(RuntimeProfile) if field.name in LATER_FACTS}

    @property
    def offered_stages(self) -> tuple[int, ...]:
        """ZeRO stages that a run may have: FSDP2 shards gradients and weights beside the optimizer's states."""
        return tuple(stage for stage in self.zero_stages if stage >= FSDP2_STAGE or not self.torch_fsdp2)

    @property
    def may_leave_ends_empty(self) -> bool:
        """Whether the first chunk of a pipeline may hold the embedding alone, and the last one the loss."""
        return self.rule_set in LAYOUT_RULE_SETS

    @property
    def balances_stages(self) -> bool:
        """Whether unequal chunks are laid out so that stages hold equally many layers."""
        return self.rule_set in BALANCED_RULE_SETS

    @property
    def reads_for_scale(self) -> bool:
        """Whether a kernel of its own reads a tensor for its scale before the kernel that casts it to fp8.

        Transformer Engine's current scaling computes the maximum of a tensor, then its scale, then casts it
        (pytorch/csrc/quantizer.cpp, Float8CurrentScalingQuantizer::quantize_impl); that is two reads against one of
        delayed scaling (nvidia.github.io/TransformerEngine, FP8 Delayed Scaling), whose cast notes the maximum, as
        kernels that scale blocks do. A compiler adds the read to the kernel that makes the tensor (assumed).
        """
        is_compiled = self.rule_set in COMPILED_RULE_SETS and self.fused_elementwise
        return self.fp8_recipe == "tensorwise" and not is_compiled

    @property
    def joins_ring(self) -> bool:
        """Whether keys and values and their gradients go back round the ring in one message (Transformer Engine)."""
        return self.rule_set == "megatron" and not self.fp32_ring_gradients

    def speed_of(self, device_name: str) -> float:
        """Return the relative speed of a device's kernels; 1 for a device never measured under this runtime."""
        return dict(self.device_speed).get(device_name, 1.0)

    def with_constants(self, values: Mapping[str, float]) -> RuntimeProfile:
        """Return this profile with some of its CONSTANTS replaced."""
        assert set(values) <= set(CONSTANTS), f"{sorted(set(values) - set(CONSTANTS))} are no constants"
        changes: dict[str, Any] = dict(values)
        return replace(self, **changes)


class _Layers(StrictModel):
    split: LayerSplit
    padding: Annotated[int, Field(ge=1)] = 1


class _Vocabulary(StrictModel):
    multiple: Annotated[int, Field(ge=1)] = 1
    pads_whole: bool = True


class _Supports(StrictModel):
    recompute: Annotated[list[Literal["none", "selective", "full"]], Field(min_length=1)]
    offload: list[OffloadMode] = Field(default_factory=lambda: list[OffloadMode](("none",)))
    zero_stages: Annotated[list[Annotated[int, Field(ge=0, le=3)]], Field(min_length=1)]
    sequence_parallel: bool
    uneven: list[UnevenPart] = Field(default_factory=lambda: list[UnevenPart](("hosts",)))


class _Gradients(StrictModel):
    memory_bytes_per_parameter: Annotated[int, Field(ge=1)]
    sharded: bool = False
    message_bytes_per_parameter: Annotated[int, Field(ge=1)]
    bucket_parameters: Annotated[int, Field(ge=0)]
    gathered_parameters: Annotated[int, Field(ge=0)]
    each_micro_batch: bool = False
    tied_sharded: bool = False
    ring_fp32: bool = False


class _Fused(StrictModel):
    attention: bool
    elementwise: bool
    activation: bool = True
    accumulation: bool
    cross_entropy: bool


class _Overlaps(StrictModel):
    gradients: bool
    weight_gather: bool
    tensor: bool
    tensor_gradients: bool
    experts: bool
    ring: bool
    p2p: bool


class _Fitted(StrictModel):
    """Value of one constant, and the standard deviation of its logarithm."""

    value: Annotated[float, Field(gt=0)]
    log_error: Annotated[float, Field(ge=0)]


class _Memory(StrictModel):
    overhead_gib: Annotated[float, Field(ge=0, le=1e6)]
    activation_slack: Annotated[float, Field(ge=0, le=1)]
    logit_bytes: Annotated[float, Field(ge=2, le=20)] = 6
    step_bytes: Annotated[float, Field(ge=0, le=20)] = 0
    workspace_mib: Annotated[float, Field(ge=0, le=1e9)] = 80
    fp32_weights: bool = False
    fsdp2_mixed: bool = False
    keeps_empty_gradients: bool | Literal["layers"] = False
    gathered_share: Annotated[float, Field(ge=0, le=1)] = 0


class _Errors(StrictModel):
    """Errors of predictions.

    `peaks_of` names the sources whose peaks gave that of memory. With `own_cluster` the errors are those on the user's
    own cluster, that of memory if `peaks_of` names sources; otherwise another cluster may err by more
    (costmodels/step/error_models.py).
    """

    step: Annotated[float, Field(gt=0)]
    memory: Annotated[float, Field(gt=0)]
    peaks_of: list[str] = Field(default_factory=list)
    own_cluster: bool = False


class _Residual(StrictModel):
    """Keys of one LayerResidual."""

    device: str
    hidden_size: Annotated[int, Field(ge=1)]
    tp: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    sequence_length: Annotated[int, Field(ge=1)]
    weight: float


class _Copied(StrictModel):
    """Profile whose constants another one has, and the sources that they were fitted to."""

    runtime: str
    sources: list[str]


class ProfileFile(StrictModel):
    """Grammar of a profile's YAML file.

    `memory_fitted_on` names the sources on which values under `memory` were chosen, and `memory_priors` holds these
    values as they would be without them, so that a benchmark can forget a source. `constants_of` names the profile
    whose constants this one has, with the sources that they were fitted to, where it was fitted to none of its own.
    """

    sources: dict[str, str]
    rule_set: str
    layers: _Layers
    vocabulary: _Vocabulary = _Vocabulary()
    supports: _Supports
    gradients: _Gradients
    fused: _Fused
    overlaps: _Overlaps
    gathers_inputs_again: bool = True
    deduplicates_tokens: bool = False
    scatters_p2p: bool | Literal["activations"] = False
    sends_mask: bool = False
    attention_dropout: bool = False
    flash2_attention: bool = False
    selective_products: bool = False
    whole_experts: bool = False
    captured_graph: bool = False
    splits_documents: bool = False
    stalled_hosts: Annotated[int, Field(ge=0)] = 0
    memory: _Memory
    memory_fitted_on: list[str] = Field(default_factory=list)
    memory_priors: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    constants_of: _Copied | None = None
    fitted_on: str
    priors: dict[str, _Fitted] = Field(default_factory=dict)
    constants: dict[str, _Fitted]
    device_speed: dict[str, _Fitted]
    residuals: list[_Residual] = Field(default_factory=list)
    errors: _Errors


def shipped_runtimes() -> tuple[str, ...]:
    """Return the names of the profiles that Meshtune ships, sorted."""
    return tuple(sorted(path.stem for path in _CATALOG_DIR.glob("*.yaml")))


def runtime_names() -> tuple[str, ...]:
    """Return the catalog names of all runtime profiles, the user's and those of packages among them, sorted."""
    shipped = shipped_runtimes()
    return tuple(sorted({*shipped, *added_files("runtimes", shipped)}))


def catalog_path(name: str) -> Path:
    """Return the path of a catalog profile.

    Raises:
        ConfigError: no profile has the name, or two files have it.
    """
    if name not in runtime_names():
        raise ConfigError("is no runtime profile", value=name, nearest=did_you_mean(name, runtime_names()))
    added = added_files("runtimes", shipped_runtimes()).get(name)
    return added.checked_path() if added is not None else _CATALOG_DIR / f"{name}.yaml"


@cache
def find_runtime(name: str) -> RuntimeProfile:
    """Return the catalog's profile of that name.

    Raises:
        ConfigError: no profile has the name.
    """
    return read_profile(catalog_path(name))


def comparable_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles that a user's cluster may resemble, sorted.

    The user's own profiles change only the studies that name them.
    """
    return tuple(name for name in shipped_runtimes() if name not in REHEARSED)


def other_runtimes(own: RuntimeProfile) -> tuple[RuntimeProfile, ...]:
    """Return the catalog's profiles that a user's cluster may resemble, without the one that has the name of `own`."""
    return tuple(find_runtime(name) for name in comparable_names() if name != own.name)


@cache
def find_prior(name: str) -> RuntimeProfile:
    """Return the catalog's profile of that name before any fit, for fits that may use any measured run.

    Its constants are the file's `priors`, or typical ones where the file has none.

    Raises:
        ConfigError: no profile has the name, or its file breaks the grammar.
    """
    path = catalog_path(name)
    entry = validate_mapping(ProfileFile, read_mapping(path), file=str(path))
    profile = find_runtime(name)
    if entry.fitted_on.startswith(NOT_FITTED):
        return profile
    typical = {name: _Fitted(value=known.typical, log_error=known.log_error) for name, known in CONSTANTS.items()}
    priors = typical | entry.priors
    return replace(
        profile.with_constants({constant: prior.value for constant, prior in priors.items()}),
        log_errors=tuple((constant, prior.log_error) for constant, prior in priors.items()),
        device_speed=(),
        residuals=(),
    )


def read_profile(path: Path) -> RuntimeProfile:
    """Read a profile from a YAML file, and name it after the file.

    Raises:
        ConfigError: the file breaks the grammar, or a constant is unknown, missing, or out of its bounds.
    """
    entry = validate_mapping(ProfileFile, read_mapping(path), file=str(path))
    _check_constants(entry, str(path))
    # keys of the file's top level and of its memory that a profile holds under the same names
    names = {field.name for field in fields(RuntimeProfile)} - {"device_speed", "residuals"}
    values: dict[str, Any] = {name: value for name, value in (*entry, *entry.memory) if name in names}
    values |= {name: entry.constants[name].value for name in CONSTANTS}
    values |= {f"fused_{name}": value for name, value in entry.fused}
    values |= {f"overlaps_{name}": value for name, value in entry.overlaps}
    return RuntimeProfile(
        **values,
        name=path.stem,
        layer_split=entry.layers.split,
        layer_padding=entry.layers.padding,
        vocabulary_multiple=entry.vocabulary.multiple,
        pads_whole_vocabulary=entry.vocabulary.pads_whole,
        recompute_modes=tuple(entry.supports.recompute),
        offload_modes=tuple(entry.supports.offload),
        zero_stages=tuple(entry.supports.zero_stages),
        sequence_parallel=entry.supports.sequence_parallel,
        uneven=tuple(entry.supports.uneven),
        gradient_bytes=entry.gradients.memory_bytes_per_parameter,
        shards_gradients=entry.gradients.sharded,
        gradient_message_bytes=entry.gradients.message_bytes_per_parameter,
        gradient_bucket=entry.gradients.bucket_parameters,
        weight_bucket=entry.gradients.gathered_parameters,
        reduces_each_micro_batch=entry.gradients.each_micro_batch,
        shards_tied_gradients=entry.gradients.tied_sharded,
        fp32_ring_gradients=entry.gradients.ring_fp32,
        workspace_bytes=round(entry.memory.workspace_mib * 2**20),
        memory_overhead_bytes=round(entry.memory.overhead_gib * 2**30),
        device_speed=tuple((name, fitted.value) for name, fitted in entry.device_speed.items()),
        residuals=tuple(LayerResidual(**residual.model_dump()) for residual in entry.residuals),
        log_errors=tuple((name, entry.constants[name].log_error) for name in CONSTANTS),
        step_error=entry.errors.step,
        memory_error=entry.errors.memory,
        knows_cluster=entry.errors.own_cluster,
        knows_memory=entry.errors.own_cluster and bool(entry.errors.peaks_of),
    )


def _check_constants(entry: ProfileFile, file: str) -> None:
    for section, named in (("priors", entry.priors), ("constants", entry.constants)):
        for name in sorted(named.keys() - CONSTANTS.keys()):
            nearest = did_you_mean(name, CONSTANTS)
            raise ConfigError("is no constant", key=f"{section}.{name}", nearest=nearest, file=file)
    for name, bounds in CONSTANTS.items():
        if name not in entry.constants:
            raise ConfigError("is a missing constant", key=f"constants.{name}", file=file)
        value = entry.constants[name].value
        if not bounds.lower <= value <= bounds.upper:
            raise ConfigError(
                f"must be from {bounds.lower:g} to {bounds.upper:g} ({bounds.meaning})",
                key=f"constants.{name}.value",
                value=value,
                file=file,
            )
