"""Times of a pipeline's stages, and the parts of a step that follow from them.

Letters: c kinds of stages, k configurations of one layout, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime
from costmodels.step.block_costs import BlockCosts
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.launches import beyond_device_s, hops_launch_s, issue_s
from costmodels.step.pipeline.schedules import idle_time_s, of_round
from costmodels.step.pipeline.transfers import Hops
from costmodels.step.pipeline.unequal_micro_batches import Excess
from costmodels.step.placement import Groups, Pipeline, local_parameters, place_stages
from costmodels.step.weights.kept_parts import KeptParts
from costmodels.step.weights.offload import HostRates, host_rates, optimizer_step_s
from costmodels.step.weights.passes import accumulation_s, optimizer_pass_s
from costmodels.step.weights.products import update_products_s
from costmodels.step.weights.traffic import OuterPasses, WeightTraffic, weight_traffic
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTimes:
    """Times of every kind of stage of configurations with one layout.

    Attributes:
        parts_s: Parts of one micro-batch by BREAKDOWN [s], each [c, k].
        core_s: Part of its compute that the attention core takes [s], [c, k].
        forward_s: Time of its forward pass without traffic of weights [s], [c, k].
        backward_s: Time of its backward pass without traffic of weights [s], [c, k].
        traffic: Collectives over weights [c, k].
        optimizer_s: Time of the optimizer's step [s], [c, k].
        embedding: Share of the stage's weights that the embedding holds [c, k].
        layer: Share of the stage's weights that one layer holds [c, k].
        weights_leave_domain: Whether the collectives over weights go from domain to domain [c, k].
        link_use: Share of a pass for which its own collectives use the same links as those over weights [c, k].
        kind_of_stage: Kind of every stage [pp].
        before: Number of stages of each kind (column) before the first stage of another (row) [c, c].
    """

    parts_s: dict[str, FloatArray]
    core_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    traffic: WeightTraffic
    optimizer_s: FloatArray
    embedding: FloatArray
    layer: FloatArray
    weights_leave_domain: NDArray[np.bool_]
    link_use: FloatArray
    kind_of_stage: IntArray
    before: IntArray

    def take(self, index: IntArray) -> StageTimes:
        """Select the configurations at the positions `index`."""
        arrays = (
            "core_s",
            "forward_s",
            "backward_s",
            "optimizer_s",
            "embedding",
            "layer",
            "weights_leave_domain",
            "link_use",
        )
        return replace(
            self,
            parts_s={part: seconds.take(index, axis=1) for part, seconds in self.parts_s.items()},
            traffic=self.traffic.take(index),
            **{name: getattr(self, name).take(index, axis=1) for name in arrays},
        )

    def whole_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the forward and the backward pass, which share the traffic of weights by their lengths [s], [c, k]."""
        both = self.forward_s + self.backward_s
        longer = np.divide(sum_of(self.parts_s.values()), both, out=np.ones_like(both), where=both > 0)
        return self.forward_s * longer, self.backward_s * longer


class StagePricing:
    """Pricing of configurations of one layout [k]; costs of weights are computed once per row of weights [w]."""

    def __init__(self, setting: Setting, pipeline: Pipeline, groups: Groups, collective_time: CollectiveTime) -> None:
        runtime = setting.runtime
        self.runtime, self.pp, self.stages, self.row = runtime, pipeline.pp, pipeline.stages, pipeline.weights_of
        weights = pipeline.weights
        each = pipeline.held
        local = local_parameters(setting.job, weights, self.stages.pieces, each)
        # Shares of a stage's weights that its embedding and each of its layers hold.
        weights_of = np.maximum(local.total, 1.0)
        is_layer, pieces = setting.job.model.is_layer_piece, self.stages.pieces
        is_embedding = np.arange(len(is_layer)) == len(is_layer) - 2
        is_embedding[setting.job.model.tower_pieces] = True  # they stand beside it
        layers = np.maximum(self.stages.layers, 1.0)
        self.embedding_share, self.layer_share = (
            local_parameters(setting.job, weights, pieces * chosen, each).total / weights_of / number
            for chosen, number in ((is_embedding, 1.0), (is_layer, layers))
        )
        bandwidth = self.stages.smallest([device.memory_bandwidth_bytes_per_s for device in setting.cluster.devices])
        self.accumulate_s = accumulation_s(runtime, weights, local, bandwidth)
        rates = zip(*(host_rates(setting.cluster, device) for device in setting.cluster.devices), strict=True)
        slowest = HostRates(*map(self.stages.smallest, rates))
        kept = KeptParts.of(setting.job, weights, pieces, local)
        products_s = np.array(
            [
                update_products_s(setting.job, runtime, device, weights, pieces, groups, collective_time)
                for device in setting.cluster.devices
            ]
        )
        if products_s.any():
            products_s = np.where(self.stages.has_device.T[:, :, None], products_s, 0.0)
        passes_s = optimizer_pass_s(setting.job, runtime, weights, local, kept, bandwidth)
        self.optimizer_s = optimizer_step_s(
            setting.job, runtime, weights, local, slowest, passes_s, products_s.max(axis=0)
        )
        of_stages = groups
        if setting.cluster.has_unlike_links:
            of_stages = place_stages(setting.cluster, weights, groups, self.stages.numbers)
        self.traffic = weight_traffic(setting.job, runtime, weights, of_stages, local, collective_time)
        self.issue_s = issue_s(runtime, weights, groups)
        self.weights_leave_domain = np.broadcast_to(of_stages.weights.domains > 1, self.optimizer_s.shape)
        self.layers_leave_domain = {part: getattr(groups, part).domains > 1 for part in ("tp", "cp", "up", "ep")}

    def times(self, costs: BlockCosts, vpp: IntArray) -> StageTimes:
        """Compute the times of every kind of stage.

        Args:
            costs: Costs of blocks of each configuration.
            vpp: Chunks per stage [k].
        """
        runtime, stages, row = self.runtime, self.stages, self.row
        of_devices = np.concatenate([stages.total(costs.compute), stages.total(costs.exposed)], axis=1)
        forward, backward, *exposed = stages.slowest(of_devices)
        backward = backward + self.accumulate_s.take(row, axis=1)
        parts = {"compute": forward + backward}
        parts |= dict(zip(EXPOSED_PARTS, exposed, strict=True))
        # The host's launches are compared with the device's whole time, exposed collectives included.
        device_s = sum_of(parts.values())
        if not runtime.captured_graph:
            parts["host"] = beyond_device_s(device_s, self._host_s(costs, vpp))
        # Data parallel traffic can run beside a whole pass, including its waits. The passes share the waits in
        # proportion to their compute.
        pass_s = sum_of(parts.values())
        both = parts["compute"]
        backward_s = pass_s * np.divide(backward, both, out=np.zeros_like(both), where=both > 0)
        forward_s = pass_s - backward_s
        traffic = self.traffic.take(row)
        parts["dp"] = traffic.per_micro_batch_s(runtime, forward_s, backward_s)
        leaves_domain = self.weights_leave_domain.take(row, axis=1)
        # Hidden collectives use the links too; of several kinds of devices, the longest counts.
        hidden = dict(zip(EXPOSED_PARTS, stages.most(stages.total(costs.hidden)), strict=True))
        same_link_s = sum_of(
            np.where(own[row] == leaves_domain, parts[part] + hidden[part], 0.0)
            for part, own in self.layers_leave_domain.items()
        )
        return StageTimes(
            parts_s=parts,
            core_s=stages.most(stages.total(costs.core))[0],
            forward_s=forward_s,
            backward_s=backward_s,
            traffic=traffic.changed(stages.total(costs.once_s)) if costs.once_s.any() else traffic,
            optimizer_s=self.optimizer_s.take(row, axis=1),
            embedding=self.embedding_share.take(row, axis=1),
            layer=self.layer_share.take(row, axis=1),
            weights_leave_domain=leaves_domain,
            link_use=np.divide(same_link_s, pass_s, out=np.zeros_like(pass_s), where=pass_s > 0),
            kind_of_stage=stages.kind_of_stage,
            before=stages.before,
        )

    def _host_s(self, costs: BlockCosts, vpp: IntArray) -> FloatArray:
        """Compute the host time to launch one micro-batch's operators and collectives on every kind of stage [c, k]."""
        launches, collectives = self.stages.total(costs.host)
        hops_s = hops_launch_s(self.runtime, self.pp, vpp)
        return np.asarray(launches + collectives * self.issue_s[self.row] + hops_s)


def step_parts_s(
    runtime: RuntimeProfile,
    times: StageTimes,
    vpp: IntArray,
    num_micro_batches: IntArray,
    hops: Hops,
    excess: Excess | None,
    *,
    is_timed: NDArray[np.bool_],
) -> dict[str, FloatArray]:
    """Compute the parts of the step that follow from the times of its stages, each [k].

    Args:
        runtime: Profile of the runtime.
        times: Times of the stages.
        vpp: Chunks per stage [k].
        num_micro_batches: Number of micro-batches of each configuration [k].
        hops: Messages between the stages of each configuration.
        excess: Time beyond that of equal micro-batches, if they are unequal [k].
        is_timed: Whether each pipeline is timed pass by pass, which gives its bubble and its waits for messages and for
            weights beside passes: its bubble is then minus the work that the other parts count [k].
    """
    kind, pp = times.kind_of_stage, len(times.kind_of_stage)
    stage_s, passes_s = sum_of(times.parts_s.values()), (times.forward_s[kind], times.backward_s[kind])
    # Every stage's own time from the begin of the step to its end; without chunks, the first of its waits for messages
    # is part of its idle time.
    idle_s = idle_time_s(*passes_s, hops.between_s(pp), num_micro_batches, vpp)
    wait_s = hops.wait_s(runtime, pp, vpp, *passes_s) * (num_micro_batches - (vpp == 1))
    total_s = num_micro_batches * stage_s[kind] + wait_s + idle_s
    # The stage that takes the longest sets the length of the step: its parts, times the number of micro-batches, are
    # the parts of the step.
    slowest, everyone = total_s.argmax(axis=0), np.arange(len(vpp))
    stage = kind[slowest]
    parts = {part: num_micro_batches * seconds[stage, everyone] for part, seconds in times.parts_s.items()}
    outer = OuterPasses(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        vpp=vpp,
        of_round=of_round(num_micro_batches, pp),
        embedding=times.embedding,
        layer=times.layer,
    )
    reduced_s, tied_s = times.traffic.per_step_s(runtime, outer, times.before)
    parts["dp"] = parts["dp"] + np.where(is_timed, times.traffic.after_step_s(runtime), reduced_s)
    parts["optimizer"] = times.optimizer_s.max(axis=0)
    if excess is not None:
        # the host launches as much for a short micro-batch as for a long one
        core_s = times.core_s[stage, everyone]
        rest_s = sum_of(times.parts_s[part][stage, everyone] for part in ("compute", *EXPOSED_PARTS)) - core_s
        parts["imbalance"] = excess.core * core_s + excess.rest * rest_s
    if is_timed.all():
        return parts | {"pp": np.zeros(len(vpp)), "bubble": -num_micro_batches * stage_s[stage, everyone]}
    bubble_s = idle_time_s(*passes_s, None, num_micro_batches, vpp)[slowest, everyone]
    messages_s = (wait_s + idle_s)[slowest, everyone] - bubble_s
    messages_s += hops.rings_s(runtime, pp, vpp, num_micro_batches, *passes_s)
    parts["bubble"] = np.where(is_timed, -num_micro_batches * stage_s[stage, everyone], bubble_s)
    parts["pp"] = np.where(is_timed, 0.0, tied_s + messages_s)
    return parts


def sum_of(terms: Iterable[FloatArray]) -> FloatArray:
    """Add up arrays of one shape, at least one."""
    return reduce(np.add, terms)
