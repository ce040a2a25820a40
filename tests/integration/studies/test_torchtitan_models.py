"""torchtitan's own models and recipes are those that its importer reads by their names."""

import importlib
import inspect

import pytest

from benchmarks.support.oracles import children
from tuner.imports.named_models import named_model, named_models
from tuner.imports.torchtitan import recipes

pytestmark = pytest.mark.slow
REMOVED = ("llama4",)
"""Models of earlier versions that 0.3.0 has no more."""
POLICIES = {"SelectiveAC": "selective", "FullAC": "full"}


def import_torchtitan():
    """Let torchtitan be imported on a CPU, as its oracle does."""
    import torch

    torch.compile = lambda model=None, **_: model or (lambda function: function)
    torch._utils._get_available_device_type = lambda: "cpu"


def parameters_of(names):
    """The parameters of torchtitan's own models by their names, made without memory."""
    import_torchtitan()
    import torch

    found = {}
    for name in names:
        module, _, flavor = name.partition(".")
        registry = importlib.import_module(f"torchtitan.models.{module}").model_registry
        known = inspect.signature(registry).parameters
        own = {"attn_backend": "flex"} | ({"moe_comm_backend": "standard"} if "A" in flavor else {})
        with torch.device("meta"):
            model = registry(flavor, **{key: value for key, value in own.items() if key in known}).model.build()
        found[name] = sum(one.numel() for one in dict(model.named_parameters()).values())
    return found


def test_flavors_have_the_parameters_of_the_real_models():
    """Each listed flavor has as many as the model that torchtitan builds of that name."""
    pytest.importorskip("torchtitan", reason="`make frameworks` installs it")
    names = [name for name in named_models("torchtitan") if not name.startswith(REMOVED)]

    real = children.ask(lambda: parameters_of(names))

    assert {name: named_model("torchtitan", name).num_parameters for name in names} == real


def resolved(name):
    """A recipe's values as torchtitan's own parser has them, in the form of the importer's file."""
    import_torchtitan()
    from torchtitan.config.manager import ConfigManager

    module = next(one for one in ("llama3", "deepseek_v3", "gpt_oss", "qwen3") if name.startswith(one))
    read = ConfigManager().parse_args(["--module", module, "--config", name])
    degrees = ("tensor", "pipeline", "context", "expert")
    parallelism = {f"{axis}_parallel_degree": getattr(read.parallelism, f"{axis}_parallel_degree") for axis in degrees}
    schedule, parts = read.parallelism.pipeline_parallel_schedule, read.compile.components
    return {
        "training": {"seq_len": read.training.seq_len, "local_batch_size": read.training.local_batch_size},
        "activation_checkpoint": {"mode": POLICIES[type(read.activation_checkpoint).__qualname__.split(".")[0]]},
        "compile": {"enable": read.compile.enable} | ({"components": parts} if read.compile.enable else {}),
        "loss": {"num_chunks": read.loss.num_chunks},
        "parallelism": parallelism | ({"pipeline_parallel_schedule": schedule} if schedule != "1F1B" else {}),
    }


def test_recipes_have_the_values_of_the_real_ones():
    """Each listed recipe has the values that torchtitan's parser resolves."""
    pytest.importorskip("torchtitan", reason="`make frameworks` installs it")

    real = children.ask(lambda: {name: resolved(name) for name in recipes()})

    assert dict(recipes()) == real
