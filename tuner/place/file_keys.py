"""Grammar of placement files: their keys, types, defaults and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OptimizerName
from hardware.io.config_file import DocumentedModel

Count = Annotated[int, Field(ge=1, le=10**9)]


class LayoutKeys(DocumentedModel):
    """`layout:` of a module: degrees that are fixed; dp follows from the devices."""

    pp: Count | None = None
    """Pipeline stages.

    Default: searched
    """

    tp: Count | None = None
    """Tensor parallel degree.

    Default: searched
    """

    cp: Count | None = None
    """Context parallel degree.

    Default: searched up to 4
    """

    vpp: Count | None = None
    """Model chunks per pipeline stage.

    Default: searched up to 2
    """

    ep: Count | None = None
    """Expert parallel degree.

    Default: searched
    """

    mbs: Count | None = None
    """Micro-batch size in sequences.

    Default: searched up to 4
    """


class ModuleKeys(DocumentedModel):
    """One of `modules:`."""

    job: Literal["train", "infer", "generate"]
    """What the module does in every step: `train` (forward, backward, optimizer), `infer` (forward pass alone) or
    `generate` (prefill and decoding).
    """

    model: str | None = None
    """Name in the catalog, or path to a YAML file, to a Hugging Face `config.json`, or to its directory.

    Default: that of the module it `shares`
    """

    sequence_length: Count | None = None
    """Tokens per sequence. Required unless the module generates."""

    global_batch_size: Count | None = None
    """Sequences: of one optimizer step if it trains, of a whole step if it infers. Required unless it generates."""

    optimizer_steps: Count = 1
    """Optimizer steps in each step: mini-batches times epochs of PPO."""

    prompts: Count | None = None
    """Prompts per step, if it generates."""

    responses_per_prompt: Count = 1
    """Responses to each prompt, if it generates; a prompt's prefill is shared by its responses."""

    prompt_tokens: Count | None = None
    """Tokens of a prompt, if it generates."""

    response_tokens: Count | None = None
    """Mean tokens of a response, if it generates."""

    longest_response_tokens: Count | None = None
    """Tokens of the longest response, which the step waits for.

    Default: `response_tokens`, all responses equally long
    """

    precision: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    """Number format of the matrix products."""

    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    """Optimizer, if it trains."""

    runtime: str | None = None
    """Profile of the framework that trains or infers, as in a study file.

    Default: the file's `runtime`
    """

    layout: LayoutKeys = LayoutKeys()
    """Degrees that are fixed.

    Default: all are searched
    """

    devices: Count | None = None
    """Number of devices that the module gets.

    Default: searched
    """

    shares: str | None = None
    """Name of another module, whose devices, layout and weights this one uses: the log-probabilities of an actor.

    Default: devices and weights of its own
    """


class EdgeKeys(DocumentedModel):
    """One of `flow:`."""

    source: str
    """Module that sends."""

    target: str
    """Module that receives, and waits for it."""

    sends: Literal["tokens", "logprobs", "scores", "logits", "embeddings", "weights"]
    """What travels; see [what travels](placement.md#what-travels). `weights` arrive for the next step."""

    tokens: Count | None = None
    """Tokens per sequence that travel, for a projector that keeps fewer than the sender's.

    Default: the sender's sequence length
    """


class PlacementKeys(DocumentedModel):
    """A placement file."""

    name: str = "placement"
    """Name in reports."""

    cluster: dict[str, Any]
    """Cluster that the modules share, in one of the forms of a study file."""

    modules: dict[str, ModuleKeys] = Field(min_length=1, max_length=16)
    """Modules by their names."""

    flow: list[EdgeKeys] = Field(default_factory=list, max_length=100)
    """Data between modules, which also order them."""

    runtime: str = "megatron-core"
    """Profile of the framework of all modules that name none."""

    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.08
    """Share of each device's memory that must stay free."""

    pools: bool = False
    """Whether any two modules share all of their devices or none, as the pools of Ray demand that RL frameworks use."""

    together: list[list[str]] = Field(default_factory=list, max_length=16)
    """Lists of modules that share all of their devices."""

    apart: list[list[str]] = Field(default_factory=list, max_length=16)
    """Lists of modules of which no two share a device."""

    overlap_steps: Literal[0, 1] = 0
    """1 generates for the next step beside all else of this one, with weights that are one step old; 0 waits."""
