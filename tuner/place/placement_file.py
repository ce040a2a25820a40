"""Read a placement file: check every key, resolve every name, and report a mistake as one message."""

from __future__ import annotations

import graphlib
import itertools
from pathlib import Path

from costmodels.job.model_catalog import load_model
from costmodels.job.model_spec import ModelSpec
from costmodels.job.runtime import RuntimeProfile, find_runtime, read_profile
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import read_described_cluster
from hardware.io.config_file import read_mapping, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from tuner.place.file_keys import EdgeKeys, ModuleKeys, PlacementKeys
from tuner.place.transfers import data_bytes
from tuner.place.workload import EMBEDDINGS, GENERATE, TRAIN, WEIGHTS, Edge, Generation, Module, Workload

MOST_HOSTS = 512
"""Most hosts of a cluster; the search looks at every one of them in each step."""

_OF_GENERATION = ("prompts", "prompt_tokens", "response_tokens")
_OF_BATCHES = ("sequence_length", "global_batch_size")


def read_placement(path: Path) -> Workload:
    """Read the workload that a placement file describes.

    Raises:
        ConfigError: A key or value can't work; it names the file.
    """
    file = str(path)
    keys = validate_mapping(PlacementKeys, read_mapping(path), file=file)
    try:
        cluster = read_described_cluster(keys.cluster, path.parent)
    except ConfigError as error:
        raise (error if error.file else error.under("cluster")).in_file(file) from None
    hosts = cluster.cluster.num_hosts
    if hosts > MOST_HOSTS:
        rule = f"has {hosts:,} hosts; at most {MOST_HOSTS} can be placed"
        raise ConfigError(rule, key="cluster", nearest="place a part of the job on a part of the cluster", file=file)
    try:
        modules = _modules(keys, path)
        edges = tuple(_edge(keys, modules, at) for at in range(len(keys.flow)))
        workload = Workload(
            name=keys.name,
            cluster=cluster.cluster,
            modules=modules,
            edges=edges,
            headroom=keys.memory_headroom,
            overlap_steps=keys.overlap_steps,
            pools=keys.pools,
            together=_named(keys, "together"),
            apart=tuple(pair for group in _named(keys, "apart") for pair in itertools.combinations(group, 2)),
        )
        _check_order(workload)
    except ConfigError as error:
        raise error.in_file(file) from None
    return workload


def _modules(keys: PlacementKeys, path: Path) -> tuple[Module, ...]:
    names = list(keys.modules)
    modules = []
    for name, own in keys.modules.items():
        try:
            modules.append(_module(name, own, keys, names, path))
        except ConfigError as error:
            raise (error if error.file else error.under(f"modules.{name}")) from None
    return tuple(modules)


def _module(name: str, own: ModuleKeys, keys: PlacementKeys, names: list[str], path: Path) -> Module:
    shares, base = _owner(name, own, keys, names)
    if base.model is None:
        raise ConfigError("is required and missing", key="model")
    _check_keys(own)
    generation = _generation(own) if own.job == GENERATE else None
    training = TrainingJob(
        model=_model(base.model, path.parent),
        sequence_length=generation.prompt_tokens if generation else own.sequence_length or 0,
        global_batch_size=generation.prompts if generation else own.global_batch_size or 0,
        precision=own.precision,
        optimizer=own.optimizer,
    )
    for device in read_described_cluster(keys.cluster, path.parent).cluster.devices:
        device.peak_flop_per_s(own.precision)  # refuses a format that the device lacks
    layout = {key: value for key, value in own.layout.model_dump().items() if value is not None}
    return Module(
        name=name,
        job=own.job,
        training=training,
        optimizer_steps=own.optimizer_steps,
        generation=generation,
        runtime=_runtime(own.runtime or base.runtime or keys.runtime, path.parent),
        layout=tuple(layout.items()),
        devices=own.devices,
        shares=shares,
    )


def _owner(name: str, own: ModuleKeys, keys: PlacementKeys, names: list[str]) -> tuple[int | None, ModuleKeys]:
    """Return the position and the keys of the module whose weights this one uses: None and its own keys for most."""
    if own.shares is None:
        return None, own
    if own.shares not in names or own.shares == name:
        raise ConfigError("is no other module", key="shares", value=own.shares, nearest=did_you_mean(own.shares, names))
    base = keys.modules[own.shares]
    if base.shares is not None:
        raise ConfigError("shares those of a third module", key="shares", value=own.shares, nearest=base.shares)
    if GENERATE in (own.job, base.job):
        rule = "a module that generates has a layout of its own; send it weights instead"
        raise ConfigError(rule, key="shares", value=own.shares)
    if own.job == TRAIN:
        raise ConfigError("is for modules that infer", key="shares", value=own.shares)
    for key in ("model", "devices"):
        if getattr(own, key) is not None:
            raise ConfigError(f"is that of {own.shares}", key=key, value=getattr(own, key), nearest="leave it out")
    return names.index(own.shares), base


def _check_keys(own: ModuleKeys) -> None:
    """Check that a module has the keys of its job, and none of another's."""
    generates = own.job == GENERATE
    for key in _OF_GENERATION if generates else _OF_BATCHES:
        if getattr(own, key) is None:
            raise ConfigError(f"is required of a module that does {own.job}", key=key)
    for key in _OF_BATCHES if generates else _OF_GENERATION:
        if getattr(own, key) is not None:
            raise ConfigError(f"has no meaning for a module that does {own.job}", key=key, value=getattr(own, key))
    if own.optimizer_steps != 1 and own.job != TRAIN:
        raise ConfigError("is for modules that train", key="optimizer_steps", value=own.optimizer_steps)


def _model(reference: str, base_dir: Path) -> ModelSpec:
    return load_model(reference, base_dir)


def _runtime(reference: str, base_dir: Path) -> RuntimeProfile:
    if reference.endswith((".yaml", ".yml")):
        return read_profile(base_dir / reference)
    return find_runtime(reference)


def _generation(own: ModuleKeys) -> Generation:
    mean = own.response_tokens or 0
    longest = own.longest_response_tokens or mean
    if longest < mean:
        raise ConfigError(
            "is shorter than the mean", key="longest_response_tokens", value=longest, nearest=f"at least {mean}"
        )
    return Generation(
        prompts=own.prompts or 0,
        responses_per_prompt=own.responses_per_prompt,
        prompt_tokens=own.prompt_tokens or 0,
        response_tokens=mean,
        longest_response_tokens=longest,
    )


def _edge(keys: PlacementKeys, modules: tuple[Module, ...], at: int) -> Edge:
    own: EdgeKeys = keys.flow[at]
    names = [module.name for module in modules]
    for key in ("source", "target"):
        if getattr(own, key) not in names:
            nearest = did_you_mean(getattr(own, key), names)
            raise ConfigError("is no module", key=f"flow.{at}.{key}", value=getattr(own, key), nearest=nearest)
    source, target = names.index(own.source), names.index(own.target)
    if source == target:
        raise ConfigError("is the sender itself", key=f"flow.{at}.target", value=own.target)
    if own.sends == WEIGHTS:
        sender, receiver = modules[source], modules[target]
        if sender.job != TRAIN or receiver.job == TRAIN:
            rule = "weights travel from a module that trains to one that does not"
            raise ConfigError(rule, key=f"flow.{at}.sends", value=own.sends)
        if sender.model.num_parameters != receiver.model.num_parameters:
            rule = f"sends weights to {receiver.name}, which is another model"
            raise ConfigError(rule, key=f"flow.{at}.source", value=own.source)
    if own.sends == EMBEDDINGS and GENERATE in (modules[source].job, modules[target].job):
        raise ConfigError("embeddings travel between modules that train or infer", key=f"flow.{at}.sends")
    if own.sends == EMBEDDINGS and modules[source].sequences_per_step != modules[target].sequences_per_step:
        counts = f"{modules[source].sequences_per_step} and {modules[target].sequences_per_step}"
        rule = f"sender and receiver of embeddings need equal numbers of sequences per step, but have {counts}"
        raise ConfigError(rule, key=f"flow.{at}.sends", value=own.sends)
    return Edge(
        source=source, target=target, sends=own.sends, data_bytes=data_bytes(modules[source], own.sends, own.tokens)
    )


def _named(keys: PlacementKeys, key: str) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the modules in the lists of a key."""
    names = list(keys.modules)
    for group in getattr(keys, key):
        for name in group:
            if name not in names:
                raise ConfigError("is no module", key=key, value=name, nearest=did_you_mean(name, names))
    return tuple(tuple(dict.fromkeys(names.index(name) for name in group)) for group in getattr(keys, key))


def _check_order(workload: Workload) -> None:
    """Check that no module waits for itself."""
    names = [module.name for module in workload.modules]
    gang_of = {at: gang for gang, members in enumerate(workload.gangs()) for at in members}
    waits: dict[int, set[int]] = {gang: set() for gang in gang_of.values()}
    for edge in workload.edges:
        if edge.sends not in (WEIGHTS, EMBEDDINGS):
            waits[gang_of[edge.target]].add(gang_of[edge.source])
    try:
        tuple(graphlib.TopologicalSorter(waits).static_order())
    except graphlib.CycleError as error:
        round_ = " -> ".join(names[workload.gangs()[gang][0]] for gang in error.args[1])
        raise ConfigError(f"modules wait for each other: {round_}", key="flow") from None
