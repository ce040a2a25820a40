"""Grammar of placement files of operators: their keys, types, defaults and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hardware.cluster_file import LinkForm
from hardware.io.config_file import DocumentedModel

MOST_OPERATORS = 64
"""Most operators of all graphs together; the search tries each of them on every device in each step."""

MOST_CAPTURED = 256
"""Most operators of all graphs together where one is captured from a program."""

DEFAULT_CAPTURED = 32
"""Operators to which a captured step is coarsened unless the file says otherwise."""

Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Parts = Annotated[int, Field(ge=2, le=16)]


class SplitKeys(DocumentedModel):
    """One of an operator's `splits:`."""

    parts: Parts
    """Number of equal parts, each on a device of its own; all start together."""

    gather_gib: Amount = 0.0
    """Data that every other device exchanges with the first one for its part: inputs sent out and results gathered
    [GiB].
    """


class OperatorKeys(DocumentedModel):
    """One of a graph's `operators:`."""

    tflop: Amount | None = None
    """Floating-point operations [10^12]. Its time on a device follows from them and from `moved_gib`.

    Default: 0
    """

    moved_gib: Amount | None = None
    """Data read from and written to the device's memory [GiB].

    Default: 0
    """

    seconds: dict[str, Seconds] | None = Field(default=None, min_length=1)
    """Measured time on each kind of device, by its name in the catalog [s]; it can run on no others.

    Default: computed from `tflop` and `moved_gib`
    """

    memory_gib: Amount = 0.0
    """Memory that it takes on its device from beginning to end: weights and states [GiB]."""

    working_gib: Amount = 0.0
    """Memory that it takes only while it runs [GiB]."""

    inputs_gib: dict[str, Amount] = Field(default_factory=dict)
    """Operators of this graph whose results it takes, and the size of each [GiB]."""

    same_device_as: str | None = None
    """Another operator of this graph that runs on the same device, as a backward pass does on that of its weights.

    Default: any device
    """

    splits: list[SplitKeys] = Field(default_factory=list, max_length=4)
    """Ways to run it on several devices at once.

    Default: none, it runs on one
    """


class FusionKeys(DocumentedModel):
    """One of a graph's `fusions:`: two operators that may run as one."""

    first: str
    """Operator that comes first."""

    second: str
    """Operator that takes its results. What passes between the two then takes no time and no memory."""

    moved_gib: Amount | None = None
    """Data that both together read and write [GiB].

    Default: those of both, without writing and reading what passes between them
    """

    seconds: dict[str, Seconds] | None = Field(default=None, min_length=1)
    """Measured time of both together on each kind of device [s]. Required if one of the two has `seconds`.

    Default: computed from the `tflop` of both and from `moved_gib`
    """

    memory_gib: Amount | None = None
    """Memory of both together [GiB].

    Default: the sum of both
    """


class ModelKeys(DocumentedModel):
    """`model:` of a graph: a model cut into pieces of equally many layers."""

    name: str
    """Name in the catalog, or path to a YAML file, to a Hugging Face `config.json`, or to its directory."""

    sequence_length: Annotated[int, Field(ge=1, le=10**7)]
    """Tokens per sequence."""

    job: Literal["train", "infer"] = "infer"
    """`infer` (forward passes) or `train` (forward and backward passes; a piece's passes run on one device)."""

    sequences: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Sequences of a micro-batch."""

    micro_batches: Annotated[int, Field(ge=1, le=MOST_OPERATORS)] = 1
    """Micro-batches that pass one after the other."""

    pieces: Annotated[int, Field(ge=1, le=MOST_OPERATORS)]
    """Number of pieces; each is an operator for every pass of every micro-batch."""


class GraphKeys(DocumentedModel):
    """One of `graphs:`: a model as operators."""

    operators: dict[str, OperatorKeys] = Field(default_factory=dict, max_length=MOST_OPERATORS)
    """Operators by their names. Required unless `model`, `jax` or `torch` is given."""

    model: ModelKeys | None = None
    """Model of the catalog, in place of `operators`.

    Default: none
    """

    jax: str | None = Field(default=None, min_length=1)
    """Factory of a JAX step as `module:factory`, whose operators are captured, in place of `operators`.

    Default: none
    """

    torch: str | None = Field(default=None, min_length=1)
    """Factory of a torch module's training step as `module:factory`, as for `jax`.

    Default: none
    """

    most_operators: Annotated[int, Field(ge=2, le=MOST_CAPTURED)] = DEFAULT_CAPTURED
    """Most operators to which a captured step is coarsened."""

    fusions: list[FusionKeys] = Field(default_factory=list, max_length=MOST_OPERATORS)
    """Pairs of operators that may run as one."""

    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """Weight of the time when this model ends."""


class DeviceLinkKeys(LinkForm):
    """One of `links:`: a link between two devices, in both directions."""

    devices: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
    """Numbers of the two devices; they are counted host by host, in the order of the cluster."""

    port: str | None = Field(default=None, min_length=1)
    """Name of an adapter of both devices. All links of a device with this name together send one transfer at a time,
    and receive one.

    Default: none, the link is a wire of its own
    """


class OperatorPlacementKeys(DocumentedModel):
    """A placement file of operators."""

    name: str = "placement"
    """Name in reports."""

    cluster: dict[str, Any]
    """Cluster that the models share, in one of the forms of a study file."""

    graphs: dict[str, GraphKeys] = Field(min_length=1, max_length=6)
    """Models by their names, each a graph of operators."""

    links: list[DeviceLinkKeys] = Field(default_factory=list, max_length=500)
    """Links between single devices. They replace those that the cluster has between the same two devices.

    Default: none, the cluster's links join all devices
    """

    precision: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    """Number format of the arithmetic, which sets the peak of each device."""

    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.08
    """Share of each device's memory that must stay free."""

    release_memory: bool = True
    """Whether data and working memory are released once nobody needs them any more. `false` counts them from beginning
    to end, as the paper's equation 6 does.
    """
