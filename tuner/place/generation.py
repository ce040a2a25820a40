"""Time and memory of generation: prefill, and decoding limited by compute or by memory traffic, whichever is slower.

One decoding step of b sequences on a replica of tp ranks and pp stages takes, on the roofline of Williams et al. (2009)
with the traffic of Pope et al. (2022, "Efficiently Scaling Transformer Inference", section 2.1: every step reads all
weights once, and the keys and values of all sequences),

    pp * (max(compute, traffic) of a stage with b / pp sequences + all-reduces + hop) + host

- traffic = (weights + (b / pp) * context * keys and values of a token) / (tp * pp) over the device's memory bandwidth,
  times the share of it that the catalog's memory-bound kernels reach. Of the experts, those are read that some token
  visits: 1 - (1 - top_k / experts)^tokens of them.
- compute = 2 * active parameters + 4 * context * heads * head size * layers per sequence, over the peak times the
  runtime's efficiency of matrix products.
- two all-reduces of the hidden states per layer over tp (hardware/collectives.py).
- host = HOST_S per step: scheduling and sampling (assumed, from 1 to 3 ms in vLLM with captured graphs).

Of W sequences a replica decodes C at once, and starts another where one ends. Lengths follow the survival function
(1 - i / L)^(L / R - 1), which has mean R and ends at the longest response L (assumed); with L = R all are equally long.
So (W - C) R / C steps run in full, and the last C sequences thin out over L steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.operators.kernel_catalog import kernel_constants
from costmodels.step.placement import local_parameters, pipelines
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.collectives import all_reduce_s, send_recv_s
from tuner.place.layouts import MOST_LAYOUTS, SLOWEST, Layout, forward_memory, forward_pass_s
from tuner.place.workload import Module
from tuner.space.dimensions import divisors
from tuner.space.enumeration import SpaceOptions, setting_for

HOST_S = 1.5e-3
"""Time of the host per decoding step [s] (assumed)."""

PREFILL_TOKENS = 8192
"""Tokens of one prefill batch: vLLM's usual max_num_batched_tokens for a server of its kind (assumed)."""

SAMPLES = 24
"""Points at which the last sequences' steps are priced; more change the time by less than 1%."""

SHARES = (1, 2, 4, 8)
"""Divisors of the largest number of sequences at once; fewer take less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A replica that decodes.

    Attributes:
        module: Module that generates.
        cluster: Devices of all replicas.
        tp: Tensor parallel degree.
        pp: Pipeline stages.
    """

    module: Module
    cluster: Cluster
    tp: int
    pp: int

    def step_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Return the time of one decoding step [s], each [k].

        Args:
            sequences: Sequences of the replica [k].
            context: Mean tokens before the new one [k].
        """
        module, model, ranks = self.module, self.module.model, self.tp * self.pp
        width = module.training.element_bytes
        batch = sequences / self.pp
        weights_bytes = width * (
            model.num_active_parameters
            + (model.num_parameters - model.num_active_parameters) * self._further_experts(batch)
        )
        traffic_bytes = (weights_bytes + batch * context * self.cache_bytes * self.tp) / ranks
        attention_flop = sum(block.mixing_flops(context) for layer in model.layers for block in layer)
        flop = batch * (2 * model.num_active_parameters + attention_flop) / ranks
        slowest_s = np.zeros_like(batch)
        for device in self.cluster.devices:
            share = kernel_constants(device.name).memory.elementwise_share
            traffic_s = traffic_bytes / (device.memory_bandwidth_bytes_per_s * share)
            peak = device.peak_flop_per_s(module.training.precision)
            compute_s = flop / (peak * module.runtime.matmul_efficiency)
            slowest_s = np.maximum(slowest_s, np.maximum(traffic_s, compute_s))
        message = width * batch * model.hidden_size
        if self.tp > 1:
            links = self.cluster.group_links(np.ones_like(batch, dtype=np.int64), np.full(batch.shape, self.tp))
            slowest_s = slowest_s + 2 * model.num_layers / self.pp * all_reduce_s(message, links)
        if self.pp > 1:
            links = self.cluster.group_links(np.full(batch.shape, self.tp), np.full(batch.shape, self.pp))
            slowest_s = slowest_s + send_recv_s(message, links)
        return np.asarray(self.pp * slowest_s + HOST_S)

    def _further_experts(self, batch: FloatArray) -> FloatArray:
        """Return the share of the experts beyond those of one token that a batch reads [k]."""
        model = self.module.model
        if not model.num_experts or model.top_k == model.num_experts:
            return np.zeros_like(batch)
        one = model.top_k / model.num_experts
        return np.asarray(np.clip(((1 - (1 - one) ** np.maximum(batch, 1.0)) - one) / (1 - one), 0.0, 1.0))

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token on each rank of tp, all layers [bytes]; MLA's latent is on every rank."""
        model, width = self.module.model, self.module.training.element_bytes
        return width * sum(block.cached(self.tp) for layer in model.layers for block in layer)

    def decode_s(self, sequences: float, at_once: float) -> float:
        """Return the time of decoding all sequences of a replica [s].

        Args:
            sequences: Number of sequences.
            at_once: Number of them that are decoded at the same time.
        """
        made = self.module.generation
        assert made is not None, "a decoder generates"
        mean, longest = made.response_tokens, made.longest_response_tokens
        slope = longest / mean - 1
        # mean age of a running sequence: E[length^2] / (2 E[length])
        age = longest / (slope + 2)
        full_s = self.step_s(np.array([at_once]), np.array([made.prompt_tokens + age]))[0]
        total_s = (sequences - at_once) * mean / at_once * full_s
        steps = (np.arange(SAMPLES) + 0.5) / SAMPLES
        running = np.maximum(at_once * (1 - steps) ** slope, 1.0)
        last_s = self.step_s(running, made.prompt_tokens + steps * longest)
        return float(total_s + last_s.mean() * longest)


def generation_layouts(module: Module, cluster: Cluster, headroom: float) -> tuple[Layout, ...]:
    """Return the useful layouts of a module that generates, the fastest first; none if it does not fit."""
    found = [
        layout
        for tp in divisors(cluster.num_devices)
        for pp in (1, 2, 4, 8)
        if _is_possible(module, cluster, tp, pp)
        for layout in _layouts(Decoder(module=module, cluster=cluster, tp=tp, pp=pp), headroom)
    ]
    found.sort(key=lambda layout: layout.times_s)
    kept: list[Layout] = []
    for layout in found:
        if len(kept) == MOST_LAYOUTS or (kept and layout.times_s[0] > SLOWEST * kept[0].times_s[0]):
            break
        if not kept or layout.busy_bytes < 0.8 * min(one.busy_bytes for one in kept):
            kept.append(layout)
    return tuple(kept)


def _is_possible(module: Module, cluster: Cluster, tp: int, pp: int) -> bool:
    """Return whether an engine can run these degrees: tp within a domain and among the heads, and stages of layers."""
    wanted = dict(module.layout)
    return (
        cluster.num_devices % (tp * pp) == 0
        and tp <= cluster.devices_per_domain
        and cluster.devices_per_domain % tp == 0
        and all(heads % tp == 0 for heads in module.model.sizes("heads"))
        and pp <= module.model.num_layers
        and wanted.get("tp", tp) == tp
        and wanted.get("pp", pp) == pp
    )


def _layouts(decoder: Decoder, headroom: float) -> list[Layout]:
    """Return a decoder's layouts with several numbers of sequences at once; none if not one sequence fits."""
    module, cluster = decoder.module, decoder.cluster
    made = module.generation
    assert made is not None, "a decoder generates"
    replicas = cluster.num_devices // (decoder.tp * decoder.pp)
    mbs = max(1, PREFILL_TOKENS // made.prompt_tokens)
    config = ParallelConfig(pp=decoder.pp, tp=decoder.tp, dp=replicas, mbs=mbs)
    grid = ConfigGrid.from_configs([config])
    job = replace(module.training, zero_stage=0)
    setting = setting_for(job, cluster, module.runtime, SpaceOptions())
    prompts = -(-made.prompts // replicas)
    batches = max(1, -(-prompts // mbs))
    if prompts < mbs:
        grid = ConfigGrid.from_configs([replace(config, mbs=prompts)])
    prefill_s = float(forward_pass_s(setting, grid, np.array([batches]))[0])
    _, busy, memory = forward_memory(setting, grid)
    (pipeline,) = pipelines(setting, grid).each
    local = local_parameters(job, grid, pipeline.stages.pieces)
    weights_bytes = float((local.dense + local.expert).max()) * job.element_bytes
    room_bytes = (1 - headroom) * float(memory.capacity_bytes[0]) - float(busy[0])
    of_token = decoder.cache_bytes / decoder.pp
    if room_bytes < of_token * (made.prompt_tokens + made.longest_response_tokens):
        return []
    sequences = -(-made.prompts * made.responses_per_prompt // replicas)
    of_sequence = of_token * (made.prompt_tokens + made.response_tokens)
    most = min(sequences, int(room_bytes / of_sequence))
    found = []
    for at_once in dict.fromkeys(max(1, most // share) for share in SHARES):
        decode_s = decoder.decode_s(sequences, at_once)
        found.append(
            Layout(
                config=replace(config, mbs=1, sequence_parallel=False),
                times_s=(prefill_s + decode_s,),
                state_bytes=weights_bytes,
                weight_bytes=weights_bytes,
                moved_bytes=weights_bytes,
                busy_bytes=float(busy[0]) + at_once * of_sequence,
                parts=decoder.tp * decoder.pp,
                concurrency=at_once,
                phases=(("prefill", prefill_s), ("decode", decode_s)),
            )
        )
    return found
