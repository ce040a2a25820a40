"""Smaller jobs of a user's command (`trial.proxy`): the sizes that reach it, and the commands that take none."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.megatron_parser import MegatronParser, model_flags
from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tuner.export import find_exporter
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import flags_among
from tuner.imports.megatron import import_flags
from tuner.search.proxy.proxy_trials import proxy_of
from tuner.study_file.config import load_study

STUDY = """
name: own-command
model: {model}
cluster: {{name: dgx-h100, hosts: 32}}
job: {{sequence_length: 4096, global_batch_size: 1024}}
trial:
  backend: command
  command: {command}
  flags: {flags}
  proxy: {{hosts: 2}}
"""
TODAY = {
    "llama3-8b": ParallelConfig(pp=4, tp=4, dp=16, vpp=4, mbs=1),
    "mixtral-8x7b": ParallelConfig(pp=4, tp=2, dp=32, ep=8, mbs=1),
    "deepseek-v3": ParallelConfig(pp=16, tp=1, dp=16, ep=16, mbs=1),
}
PLACES = ["train", "--layers={num_layers}", "--batch={global_batch_size}", "--hosts={num_hosts}", "--pp={pp}"]
INSIDE = "trial.training={folder: checkpoints}"
KNOBS = "space.knobs=[{name: a, values: [1, 2], flag: --a}]"


def load(model="llama3-8b", command=PLACES, flags="null", *overrides):
    """The study of a command."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "study.yaml"
        path.write_text(STUDY.format(model=model, command=json.dumps(list(command)), flags=flags), encoding="utf-8")
        return load_study(path, overrides=overrides, storage="sqlite:///:memory:")


@cache
def own_words(model):
    """A study whose command says today's configuration in its own words, its candidates, and their proxies so far."""
    setting = load(model).problem.setting
    words = find_exporter("megatron")(setting, TODAY[model]).arguments
    further = ["--load", "ckpt", "--save", "ckpt", "--rampup-batch-size", "64", "64", "1000000"]
    command = ["torchrun", "pretrain_gpt.py", *model_flags(setting), *further, *words, "--log-interval", "1"]
    request = load(model, command, "megatron")
    return request, command, request.problem.space().grid


def started(request, proxy):
    """The words that a smaller job starts."""
    backend = request.trials.backend.reduced(proxy.reduction)
    return list(backend.starts(proxy.config, trial_number=0).command)


@pytest.mark.slow
@pytest.mark.parametrize("model", TODAY)
@given(data=st.data())
@settings(max_examples=15)
def test_a_commands_own_words_say_the_smaller_job(model, data):
    """Whatever candidate a proxy stands for, its command read back says the proxy's layers, batch and degrees,
    Megatron-LM's own parser takes it on so many devices, and it has no checkpoint of the full model.
    """
    request, command, grid = own_words(model)
    proxy = proxy_of(
        grid.config(data.draw(st.integers(0, len(grid) - 1))),
        request.problem.setting,
        request.trials.proxy,
        request.problem.options,
    )
    if proxy is None:
        return
    words = started(request, proxy)

    read = import_flags(flags_among([Argument(text=word, line=0) for word in words], dashed=True))
    smaller = proxy.setting(request.problem.setting)
    assert not read.unsaid
    assert read.model["num_layers"] == proxy.reduction.layers
    assert read.model.get("num_dense_layers", 0) == smaller.job.model.plain.num_dense_layers
    assert read.job["global_batch_size"] == proxy.reduction.global_batch_size
    wanted = {name: getattr(proxy.config, name) for name in ("pp", "tp", "cp", "vpp", "ep", "mbs")}
    assert {name: read.degrees.get(name, 1) for name in wanted} == wanted
    assert not {"--load", "--save", "--rampup-batch-size"} & {*words}
    assert [word for word in words if word in ("--swiglu", "--mock-data", "--log-interval")] == [
        word for word in command if word in ("--swiglu", "--mock-data", "--log-interval")
    ]
    try:
        parser = MegatronParser()
    except ImportError:
        return
    arguments, built = parser.read(words[2:], [("CUDA_DEVICE_MAX_CONNECTIONS", "1")], smaller)
    assert (arguments.num_layers, built.num_layers) == (proxy.reduction.layers, proxy.reduction.layers)
    assert arguments.data_parallel_size == proxy.config.dp


def smaller_words(request, config):
    """The proxy of a configuration, and the words that it starts."""
    proxy = proxy_of(config, request.problem.setting, request.trials.proxy, request.problem.options)
    return proxy, started(request, proxy)


def test_a_division_of_the_layers_is_said_anew():
    """Virtual stages that a command says by their layers are those of all its layers: a smaller job of the same pp and
    vpp says their number.
    """
    own = "--num-layers 32 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --micro-batch-size 1 "
    own += "--num-layers-per-virtual-pipeline-stage 8 --global-batch-size 1024 --seq-length 4096 --bf16"
    request = load("llama3-8b", ["pretrain_gpt.py", *own.split()], "megatron", "trial.proxy.layers=16")

    proxy, words = smaller_words(request, ParallelConfig(pp=2, tp=4, dp=32, vpp=2, mbs=1, zero_stage=0))

    assert (proxy.config.pp, proxy.config.vpp) == (2, 2)
    assert words[words.index("--num-layers") + 1] == "16"
    assert "--num-layers-per-virtual-pipeline-stage" not in words
    assert words[words.index("--num-virtual-stages-per-pipeline-rank") + 1] == "2"


def test_flags_tell_the_layers():
    """In place of `{flags}` stand those of the smaller job, with its number of layers."""
    request = load("llama3-8b", ["train.sh", "--num-layers", "32", "{flags}"], "megatron")

    proxy, words = smaller_words(request, ParallelConfig(pp=8, tp=4, dp=8, mbs=1))

    assert proxy.reduction.layers < 32
    assert words[:3] == ["train.sh", "--num-layers", "32"]
    assert words[-2:] == ["--num-layers", str(proxy.reduction.layers)]


def test_a_recipe_is_told_its_layers():
    """Megatron-Bridge's recipe gets the number of layers and the batch as settings; a full-size trial gets neither."""
    today = "current={pp: 8, tp: 4, dp: 8, mbs: 1}"
    request = load("llama3-8b", ["torchrun", "run_recipe.py", "--recipe", "llama3_8b"], "bridge", today)
    config = ParallelConfig(pp=8, tp=4, dp=8, mbs=1)

    proxy, words = smaller_words(request, config)

    assert f"model.num_layers={proxy.reduction.layers}" in words
    assert f"train.global_batch_size={proxy.reduction.global_batch_size}" in words
    assert "model.pipeline_model_parallel_size=2" in words
    full = request.trials.backend.starts(request.problem.current, trial_number=0).command
    assert full == ("torchrun", "run_recipe.py", "--recipe", "llama3_8b")


def test_a_launcher_is_told_the_smaller_world():
    """A command that reaches its hosts by itself starts as many processes as the smaller job has devices."""
    launch = ["mpirun", "-np", "{world_size}", "train", "{num_layers}", "{num_micro_batches}"]
    request = load("llama3-8b", launch, "null", "trial.launch=once")

    proxy, words = smaller_words(request, ParallelConfig(pp=8, tp=4, dp=8, mbs=1))

    assert words[:3] == ["mpirun", "-np", "16"]
    assert words[4:] == [str(proxy.reduction.layers), str(proxy.reduction.global_batch_size // proxy.config.dp)]


def test_placeholders_tell_the_sizes():
    """Placeholders have the values of the smaller job and of its hosts."""
    request = load()

    proxy, words = smaller_words(request, ParallelConfig(pp=8, tp=4, dp=8, mbs=1))

    sizes = proxy.reduction
    assert words == ["train", f"--layers={sizes.layers}", f"--batch={sizes.global_batch_size}", "--hosts=2", "--pp=2"]


@pytest.mark.parametrize(
    ("command", "flags", "override", "message"),
    [
        (["train", "{global_batch_size}"], "null", "", "takes the number of layers of a smaller job; the placeholder"),
        (["train", "{num_layers}"], "null", "", "takes the batch of a smaller job"),
        (["train", "{num_layers}", "{num_micro_batches}"], "null", "trial.launch=once", "takes the number of hosts"),
        (["run", "{flags}"], "torchtitan", "", "takes the number of layers"),
        (["run", "{flags}", "--num-layers=32"], "megatron", "", "trial.command.2 = '--num-layers=32': would replace"),
        (["run", "--nnodes=32", "{flags}"], "megatron", "", "trial.command.1 = '--nnodes=32': is a fixed number"),
        (["run", "--nnodes", "32", "{flags}"], "megatron", "", "trial.command.1 = '--nnodes': is a fixed number"),
        (["mpirun", "-np", "256", *PLACES], "null", "", "trial.command.1 = '-np': is a fixed number of devices"),
        (
            ["run", "{flags}", "trainer.num_nodes=32"],
            "megatron",
            "",
            "is a fixed number of hosts; {num_hosts}, because",
        ),
        (PLACES, "null", "trial.environment={WORLD_SIZE: '256'}", "trial.environment.WORLD_SIZE: is a fixed"),
        ([*PLACES, "{checkpoint}", "{new_checkpoint}"], "null", INSIDE, "cannot run inside of a training"),
        (PLACES, "null", "trial.proxy.hosts=32", "must be fewer than the 32 hosts of the cluster"),
        ([*PLACES, "{knobs}"], "null", KNOBS, "cannot be searched by smaller jobs"),
    ],
)
def test_a_command_without_the_sizes_is_refused(command, flags, override, message):
    """A command that would train the full job in place of a smaller one is refused, with what tells it the size."""
    with pytest.raises(ConfigError) as caught:
        load("llama3-8b", command, flags, *filter(None, [override]))

    assert message in str(caught.value)
