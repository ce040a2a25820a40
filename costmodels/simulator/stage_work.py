"""Work of each stage of a configuration: its pieces, the programs of their passes, its messages and its weights.

A piece is a layer, the embedding or the head; its program lists the kernels and collectives of one pass.
stage_prices.py computes how long all of it takes; simulated_step.py decides when it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.simulator.pass_program import INSIDE, Program
from costmodels.step.pipeline.passes import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Message over one kind of link, or several messages at the same time.

    Attributes:
        seconds: Duration if nothing else uses the link [s].
        latency_s: Part of the duration in which the link is idle [s].
        link: One of `pass_program.LINKS`.
    """

    seconds: float
    latency_s: float = 0.0
    link: str = INSIDE

    def scaled(self, share: float) -> Message:
        """Return a message that takes a share of the duration and the latency."""
        return Message(seconds=share * self.seconds, latency_s=share * self.latency_s, link=self.link)


NO_MESSAGE = Message(seconds=0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageWork:
    """Work of one stage in one kind of replicas.

    Attributes:
        device: Name of the device that sets the stage's pace.
        chunks: Pieces of each of its virtual stages as positions in `ModelSpec.pieces`, and whether each is recomputed
            in full.
        programs: Program of each piece in each kind of pass, plain and with its layer recomputed in full.
        program_s: Time of each program on the device [s].
        busy_s: Time for which each program keeps each link busy if nothing else uses it [s]; links are keyed by name.
        overlap_efficiency: Overlap efficiency of the runtime.
        stretch: Ratio of a pass's whole time to its time on the device; the rest is waiting for the host's launches.
        accumulation_s: Further time to add up the gradients of each piece of each chunk [s].
        begins_s: Time for which each pass waits until its message begins [s].
        forward_hop: Message to the stage of the next virtual stage.
        backward_hop: Message to the stage of the virtual stage before.
        each_gather: Gathering of the weights of all chunks, before each pass (ZeRO 3).
        each_scatter: Scattering of the gradients of all chunks, after each backward pass (ZeRO 3, perhaps 2).
        once_gather: Gathering of the weights of all chunks, once per step.
        once_reduce: Reduction of the gradients of all chunks, once per step.
        once_tied: Reduction of the gradients of a tied embedding with the stage at the pipeline's other end, once per
            step.
        once_more: Further traffic of a sharding plan, once per step.
        one_layer_s: Time that a step waits for the weights of its first layer (ZeRO 3) [s].
        weight_share: Share of all the stage's weights that each piece of each chunk holds.
        optimizer_s: Time of the optimizer's step [s].
        shares_adapter: Whether the devices of its hosts share an adapter.
        uplink_share: Share of the switch's uplink that the stage takes at its full rate.
        detour: Ratio of a transfer's time on the host's other kind of internal links to its time on the usual kind; 0
            if there is no other kind. While one transfer uses the usual links, another may use the others.
        host: Number of the first host of the simulated replica, if an adapter or a switch is shared.
        switch: Number of that host's leaf switch.
    """

    device: str
    chunks: tuple[tuple[tuple[int, bool], ...], ...]
    programs: Mapping[tuple[int, bool, Kind], Program]
    program_s: Mapping[tuple[int, bool, Kind], float]
    busy_s: Mapping[tuple[int, bool, Kind], Mapping[str, float]]
    overlap_efficiency: float
    stretch: float
    accumulation_s: tuple[tuple[float, ...], ...]
    begins_s: float
    forward_hop: Message
    backward_hop: Message
    each_gather: Message
    each_scatter: Message
    once_gather: Message
    once_reduce: Message
    once_tied: Message
    once_more: Message
    one_layer_s: float
    weight_share: tuple[tuple[float, ...], ...]
    optimizer_s: float
    shares_adapter: bool
    uplink_share: float
    detour: float
    host: int = 0
    switch: int = 0

    def order(self, chunk: int, kind: Kind) -> range:
        """Return the positions of a chunk's pieces in the order in which a pass runs them."""
        number = len(self.chunks[chunk])
        return range(number) if kind == Kind.FORWARD else range(number - 1, -1, -1)

    def device_s(self, chunk: int, at: int, kind: Kind) -> float:
        """Return the time of a piece on its device in a pass [s]."""
        piece, again = self.chunks[chunk][at]
        seconds = self.program_s[piece, again, kind]
        return seconds + (self.accumulation_s[chunk][at] if kind == self.gradients_kind else 0.0)

    def piece_s(self, chunk: int, at: int, kind: Kind) -> float:
        """Return the time of a piece in a pass, including its waits for the host [s]."""
        return self.stretch * self.device_s(chunk, at, kind)

    def traffic_s(self, chunk: int, at: int, kind: Kind, link: str) -> float:
        """Return the time for which a piece's collectives keep a link busy in a pass if nothing else uses it [s]."""
        piece, again = self.chunks[chunk][at]
        return self.busy_s[piece, again, kind].get(link, 0.0)

    def parts_s(self) -> dict[str, float]:
        """Return the time of one micro-batch's passes by part: kernels, exposed collectives, and the host [s]."""
        parts = {"compute": sum(map(sum, self.accumulation_s)), "pp": len(self.chunks) * 2 * self.begins_s}
        numbers = Counter(piece for pieces in self.chunks for piece in pieces)
        for (piece, again, _), program in self.programs.items():
            number = numbers[piece, again]
            for segment in program if number else ():
                parts["compute"] += number * segment.kernels_s
                # Collectives of a segment share its exposed time in proportion to their durations.
                exposed = number * (segment.duration_s(self.overlap_efficiency) - segment.kernels_s)
                for work in segment.traffic:
                    parts[work.part] = parts.get(work.part, 0.0) + exposed * work.seconds / segment.traffic_s
        device_s = sum(parts.values()) - parts["pp"]
        return parts | {"host": (self.stretch - 1.0) * device_s}

    @property
    def gradients_kind(self) -> Kind:
        """Kind of pass that computes the gradients of the weights."""
        return Kind.WEIGHTS if any(kind == Kind.WEIGHTS for _, _, kind in self.programs) else Kind.BACKWARD
