"""Pipeline problem of layers from a sharding plan (`benchmarks.papers.layer_figures`).

Every stage has an equal number of layers, or the number that branch and bound finds. All layers are recomputed, or
none, or as many of each stage as branch and bound proves best, which is BMPipe's part of ManuMatic's Table 3. Work that
runs once per step follows the last micro-batch, on the stage where it takes longest. Where a runtime overlaps it, its
collectives hide behind one micro-batch: the backward pass that makes the gradients and the forward pass that waits for
the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.layer_figures import LayerFigures, Share
from costmodels.step.pipeline.schedules import stage_in_flight
from hardware.arrays import FloatArray
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.pipeline.stage_search import StagesProblem
from tuner.planners.pipeline.stages import Pipeline, StagePlan, plan_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineScore:
    """Time and memory of a step of all layers.

    Attributes:
        step_s: Time of the step [s].
        peak_bytes: Peak memory of the fullest stage [bytes].
        fits: Whether every stage fits.
        layers: Number of layers of each stage.
        recomputed: Number of recomputed layers of each stage.
        is_proven: Whether no other cut into stages and no other recomputation is faster; False for equal shares.
    """

    step_s: float
    peak_bytes: float
    fits: bool
    layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    is_proven: bool = False


def pipeline_of_figures(
    figures: LayerFigures,
    *,
    num_layers: int,
    pp: int,
    num_micro_batches: int,
    capacity_bytes: float,
    may_recompute: bool,
) -> Pipeline:
    """Build the pipeline problem of equal layers on one kind of device.

    A recomputed layer runs its forward pass again, with its collectives, and keeps its input only. A stage that may
    recompute needs the activations of one layer once.

    Args:
        figures: Times and memory of the planned layers.
        num_layers: Number of layers of the model.
        pp: Number of stages.
        num_micro_batches: Number of micro-batches of a step.
        capacity_bytes: Memory of a device [bytes].
        may_recompute: Whether layers may be recomputed.
    """
    layer = figures.layer

    def states(share: Share) -> float:
        """Return the memory that lives through the step [bytes]."""
        return share.state_bytes + (share.partial_gradient_bytes if num_micro_batches > 1 else 0.0)

    def kept(share: Share, kept_bytes: float) -> float:
        """Return the activations that are kept [bytes].

        Gradients of a single micro-batch take the place of activations that the backward pass has used.
        """
        return max(kept_bytes, share.gradient_bytes) if num_micro_batches == 1 else kept_bytes

    # A recomputed layer keeps its input only, but never more than it keeps without recomputation.
    kept_bytes = kept(layer, layer.kept_bytes)
    entry_bytes = min(kept(layer, figures.entry_bytes), kept_bytes)
    none = np.zeros(1)
    return Pipeline(
        layer_type=np.zeros(num_layers, dtype=np.int64),
        layer_s=np.array([[layer.forward_s + layer.backward_s]]),
        recompute_s=np.array([[layer.forward_s]]),
        first_s=np.array([figures.first.forward_s + figures.first.backward_s]),
        last_s=np.array([figures.last.forward_s + figures.last.backward_s]),
        stage_s=none,
        hop_s=np.zeros((1, 1)),  # the same wherever stages are cut
        state_bytes=np.array([states(layer)]),
        kept_bytes=np.array([kept_bytes]),
        recomputed_bytes=np.array([entry_bytes if may_recompute else kept_bytes]),
        first_bytes=states(figures.first) + kept(figures.first, figures.first.kept_bytes),
        last_bytes=states(figures.last) + kept(figures.last, figures.last.kept_bytes),
        working_bytes=figures.working_bytes + (layer.kept_bytes if may_recompute else 0.0),
        capacity_bytes=np.array([capacity_bytes]),
        supply=np.array([pp]),
        in_flight=stage_in_flight(np.arange(pp), pp, 1, np.array(num_micro_batches)),
        num_micro_batches=num_micro_batches,
    )


def with_equal_shares(
    pipeline: Pipeline, figures: LayerFigures, *, recomputes: bool, overlaps: bool = False
) -> PipelineScore:
    """Score equal numbers of layers, all recomputed or none; the stages must divide the layers."""
    count, rest = divmod(pipeline.num_layers, pipeline.num_stages)
    assert rest == 0, f"{pipeline.num_stages} stages divide the layers, but there are {pipeline.num_layers}"
    num_layers = [count] * pipeline.num_stages
    recomputed = [[count if recomputes else 0]] * pipeline.num_stages
    plan = plan_of(pipeline, [0] * pipeline.num_stages, num_layers, recomputed)
    return _score(pipeline, figures, plan, overlaps=overlaps, is_proven=False)


def with_best_stages(
    pipeline: Pipeline, figures: LayerFigures, *, limits: Limits, overlaps: bool = False
) -> PipelineScore | None:
    """Score the stages and the recomputation that branch and bound finds; None if it finds none that fit."""
    outcome = branch_and_bound(StagesProblem(pipeline), limits=limits)
    if outcome.best is None:
        return None
    return _score(pipeline, figures, outcome.best.solution, overlaps=overlaps, is_proven=outcome.known is Known.OPTIMAL)


def _score(
    pipeline: Pipeline, figures: LayerFigures, plan: StagePlan, *, overlaps: bool, is_proven: bool
) -> PipelineScore:
    """Score a plan of the stages, with the work that runs once per step."""
    num_layers = np.array([stage.num_layers for stage in plan.stages])

    def of_stages(name: str) -> FloatArray:
        """Add up a figure of layers, embedding and head on each stage [S]."""
        found = num_layers * float(getattr(figures.layer, name))
        found[0] += getattr(figures.first, name)
        found[-1] += getattr(figures.last, name)
        return found

    # With overlap, collectives hide behind one micro-batch's compute of the same stage.
    synced_s = of_stages("synced_s")
    if overlaps:
        synced_s = np.maximum(synced_s - of_stages("forward_s") - of_stages("backward_s"), 0.0)
    peak_bytes = max(stage.memory_bytes for stage in plan.stages)
    return PipelineScore(
        step_s=plan.step_s + float((of_stages("once_s") + synced_s).max()),
        peak_bytes=peak_bytes,
        fits=peak_bytes <= float(pipeline.capacity_bytes[0]),
        layers=tuple(stage.num_layers for stage in plan.stages),
        recomputed=tuple(stage.num_recomputed for stage in plan.stages),
        is_proven=is_proven,
    )
