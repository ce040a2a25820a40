"""Workload of a placement: modules, what flows between them, and the cluster that they share.

A module is one job of one model: it trains, infers (a forward pass), or generates. Modules that share their weights and
devices are a unit, which is placed once: an actor that trains and computes log-probabilities. Training modules that
hand embeddings to each other work on micro-batch after micro-batch at the same time: they are a gang.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.job.model_spec import ModelSpec
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster

TRAIN, INFER, GENERATE = JOBS = ("train", "infer", "generate")
WEIGHTS, EMBEDDINGS = "weights", "embeddings"
SENDS = ("tokens", "logprobs", "scores", "logits", EMBEDDINGS, WEIGHTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Lengths of the sequences that a module generates.

    Attributes:
        prompts: Prompts per step.
        responses_per_prompt: Responses to each prompt.
        prompt_tokens: Tokens of a prompt.
        response_tokens: Mean tokens of a response.
        longest_response_tokens: Tokens of the longest response, which the step waits for.
    """

    prompts: int
    responses_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    longest_response_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One job of one model in every step.

    Attributes:
        name: Name of the module.
        job: One of JOBS.
        training: Model, sequence length and batch; the batch of one optimizer step if it trains, else of the step.
        optimizer_steps: Optimizer steps per step; 1 unless it trains.
        generation: Lengths of generated sequences; None unless it generates.
        runtime: Profile of the framework that trains or infers.
        layout: Fixed degrees of its layout, by name.
        devices: Fixed number of devices; None to search.
        shares: Position of the module whose devices, layout and weights it uses; None for its own.
    """

    name: str
    job: str
    training: TrainingJob
    optimizer_steps: int
    generation: Generation | None
    runtime: RuntimeProfile
    layout: tuple[tuple[str, int], ...]
    devices: int | None
    shares: int | None

    @property
    def model(self) -> ModelSpec:
        """Sizes of the model."""
        return self.training.model

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one whole step."""
        return self.training.global_batch_size * self.optimizer_steps

    @property
    def weight_bytes(self) -> float:
        """Size of all weights [bytes]."""
        return float(self.model.num_parameters * self.training.element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Data that one module sends to another.

    Attributes:
        source: Position of the module that sends.
        target: Position of the module that receives.
        sends: One of SENDS; weights arrive for the next step, all else in the same step.
        data_bytes: Size of the data of one step [bytes].
    """

    source: int
    target: int
    sends: str
    data_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Modules to place on one cluster.

    Attributes:
        name: Name of the workload.
        cluster: Cluster that they share.
        modules: Modules in the order of the file.
        edges: Data between them.
        headroom: Share of each device's memory that must stay free.
        overlap_steps: 1 if generation for the next step runs beside everything else of this one, else 0.
        pools: Whether any two modules must share all of their devices or none.
        together: Groups of modules that must share all of their devices.
        apart: Pairs of modules that must share none.
    """

    name: str
    cluster: Cluster
    modules: tuple[Module, ...]
    edges: tuple[Edge, ...]
    headroom: float
    overlap_steps: int
    pools: bool = False
    together: tuple[tuple[int, ...], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()

    @property
    def unit_of(self) -> tuple[int, ...]:
        """Unit of each module: the position of the module whose devices it uses, its own for most."""
        return tuple(at if one.shares is None else one.shares for at, one in enumerate(self.modules))

    def gangs(self) -> tuple[tuple[int, ...], ...]:
        """Return the modules that run together, by the positions of each gang; most are alone."""
        gang = list(range(len(self.modules)))
        for edge in self.edges:
            if edge.sends == EMBEDDINGS:
                old, new = gang[edge.target], gang[edge.source]
                gang = [new if one == old else one for one in gang]
        return tuple(tuple(at for at, one in enumerate(gang) if one == first) for first in dict.fromkeys(gang))

    def waits_for(self, edge: Edge) -> bool:
        """Return whether the receiver waits for the sender within a step.

        Weights are for the next step. With overlapped steps, so is what was generated.
        """
        is_generated = self.modules[edge.source].job == GENERATE
        return edge.sends != WEIGHTS and not (self.overlap_steps and is_generated)
