import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ConfigGrid, ParallelConfig
from costmodels.operators.layer_operators import step_operators
from costmodels.step.communication import layer_collectives
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.placement import place
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from trials.trial_keys import ProxyOptions
from tuner.search.proxy.proxy_trials import LIKELY_FIT, MAX_ROUNDS, Proxy, proxy_of
from tuner.space.enumeration import broken_rules
from tuner.study_file.config import load_study

STUDIES = Path(__file__).resolve().parents[5] / "configs" / "studies"
FILES = ("llama3-8b-dgx-h100.yaml", "flexparallel/mixtral-8x7b-64.yaml", "flexparallel/gpt-38b-4k-128.yaml")
KEPT = ("tp", "cp", "up", "vpp", "ep", "mbs", "recompute", "zero_stage", "sequence_parallel", "expert_tp")


@cache
def study(file):
    """A study of the catalog and its candidates."""
    config = load_study(STUDIES / file)
    return config, config.problem.space().grid


def options(hosts=2, layers="auto", full_trials=3, *, stage=False):
    """Proxies on so many hosts."""
    return ProxyOptions(hosts=hosts, layers=layers, full_trials=full_trials, stage=stage)


def shapes_of(job, cluster, runtime, config):
    """The shapes of all operators of one device, and of the collectives inside a layer, by name."""
    grid = ConfigGrid.from_configs([config])
    operators = {(one.name, one.phase): one.shape.ravel().tolist() for one in step_operators(job, runtime, grid)}
    collectives = layer_collectives(job, runtime, grid, place(cluster, grid))
    return operators, {name: one.shape.ravel().tolist() for name, one in collectives.items()}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@given(data=st.data())
@settings(max_examples=15)
def test_a_proxy_runs_what_a_device_of_its_candidate_runs(file, data):
    """For any candidate and any hosts the operators of a device have the candidate's shapes, and so have the
    collectives inside a layer; the proxy fills its hosts, obeys the rules and fits.
    """
    config, grid = study(file)
    setting = config.problem.setting
    candidate = grid.config(data.draw(st.integers(0, len(grid) - 1)))
    hosts = data.draw(st.integers(1, setting.cluster.num_hosts - 1))

    stage = data.draw(st.booleans())
    proxy = proxy_of(candidate, setting, options(hosts, stage=stage), config.problem.options)

    if proxy is None:
        return
    smaller = proxy.setting(setting)
    assert shapes_of(smaller.job, smaller.cluster, smaller.runtime, proxy.config) == shapes_of(
        setting.job, setting.cluster, setting.runtime, candidate
    )
    # one stage alone has no chunks
    is_alone = proxy.config.pp == 1 < candidate.pp
    kept = replace(candidate, pp=1, vpp=1) if is_alone else candidate
    assert proxy.config.values(KEPT) == kept.values(KEPT)
    assert proxy.config.num_devices == smaller.cluster.num_devices <= hosts * setting.cluster.devices_per_host
    has_room = proxy.config.num_devices > candidate.tp * candidate.cp * candidate.up
    assert (1 if candidate.pp == 1 or (stage and not has_room) else 2) <= proxy.config.pp <= candidate.pp
    assert proxy.config.dp <= candidate.dp
    assert smaller.job.model.num_layers <= setting.job.model.num_layers
    assert set(broken_rules(smaller, config.problem.options, proxy.config)) <= set(
        broken_rules(setting, config.problem.options, candidate)
    )
    memory = estimate_memory(smaller, ConfigGrid.from_configs([proxy.config]))
    assert (
        memory.probability_of_fit(config.problem.options.memory_headroom, memory_error_of(setting.runtime))[0]
        >= LIKELY_FIT
    )


def test_most_fast_candidates_have_a_proxy():
    """Of the hundred candidates that are predicted to be fastest on 64 devices, four in five have one on 16."""
    config, grid = study("llama3-8b-dgx-h100.yaml")
    setting = config.problem.setting
    fastest = np.argsort(estimate_step(setting, grid).step_time_s)[:100]

    found = [proxy_of(grid.config(int(at)), setting, options(), config.problem.options) for at in fastest]

    assert sum(proxy is not None for proxy in found) > 80


def llama(**degrees):
    """The proxy on two hosts of a configuration of Llama 3 8B (32 layers) on 64 devices with 512 sequences a step."""
    config, _ = study("llama3-8b-dgx-h100.yaml")
    setting = replace(config.problem.setting, job=replace(config.problem.setting.job, global_batch_size=512))
    hosts, layers, stage = degrees.pop("hosts", 2), degrees.pop("layers", "auto"), degrees.pop("stage", False)
    return proxy_of(ParallelConfig(**degrees), setting, options(hosts, layers, stage=stage), config.problem.options)


def test_both_kinds_of_parallelism_show_where_there_is_room():
    """A pipeline keeps two stages and replicas stay two, before either grows; then stages do."""
    assert llama(pp=8, tp=1, dp=8).config == ParallelConfig(pp=8, tp=1, dp=2)
    assert llama(pp=4, tp=4, dp=4).config == ParallelConfig(pp=2, tp=4, dp=2)
    assert llama(pp=4, tp=8, dp=2).config == ParallelConfig(pp=2, tp=8, dp=1)
    assert llama(pp=1, tp=8, dp=8).config == ParallelConfig(pp=1, tp=8, dp=2)


def test_a_device_keeps_its_layers_and_the_bubble():
    """With `auto` a stage has as many layers as the candidate's; a number fixes the total. A stage gets as many
    micro-batches as the candidate's, and MAX_ROUNDS of them at most.
    """
    assert llama(pp=8, tp=4, dp=2).reduction.layers == 2 * 32 // 8
    assert llama(pp=4, tp=4, dp=4, vpp=4).reduction.layers == 2 * 32 // 4
    assert llama(pp=8, tp=4, dp=2, layers=4).reduction.layers == 4
    many = llama(pp=8, tp=4, dp=2)
    assert many.reduction.global_batch_size == many.config.pp * many.config.dp * MAX_ROUNDS
    few = llama(pp=8, tp=4, dp=2, mbs=16)  # 16 micro-batches for 8 stages
    assert few.reduction.global_batch_size == few.config.pp * few.config.dp * 16 * 2


def test_what_does_not_fit_gets_fewer_layers():
    """Where the few replicas of a proxy must hold larger shares of the states than fit, a device gets fewer layers."""
    config, _ = study("llama3-8b-dgx-h100.yaml")
    setting = config.problem.setting
    tight = replace(setting, cluster=find_cluster("l20", hosts=8))
    candidate = ParallelConfig(tp=1, dp=64, mbs=1)

    roomy, cut = (proxy_of(candidate, each, options(), config.problem.options) for each in (setting, tight))

    assert cut is not None
    assert cut.config == roomy.config
    assert cut.reduction.layers < roomy.reduction.layers


def test_what_needs_more_than_the_hosts_has_no_proxy():
    """Where one stage of one replica is wider than all hosts, or two stages are, nothing smaller keeps the shapes."""
    assert llama(tp=8, cp=4, dp=2) is None
    assert llama(tp=8, cp=2, dp=2, pp=2) is None
    assert llama(tp=8, cp=2, dp=4) is not None


def test_one_stage_may_run_alone_where_two_have_no_room():
    """A stage as wide as all hosts keeps the layers of all its chunks; with room for two there is a pipeline."""
    alone = llama(pp=4, tp=8, dp=2, vpp=2, hosts=1, stage=True)
    assert (alone.config, alone.reduction.layers) == (ParallelConfig(tp=8), 32 // 4)
    assert alone.reduction.global_batch_size == MAX_ROUNDS
    assert llama(tp=8, cp=2, dp=2, pp=2, stage=True).config == ParallelConfig(tp=8, cp=2)
    assert llama(pp=4, tp=8, dp=2, vpp=2, hosts=2, stage=True).config.pp == 2
    assert llama(tp=8, cp=4, dp=2, stage=True) is None
    uneven = llama(pp=4, tp=8, dp=2, assignment="layers=6/8/10/8", hosts=1, stage=True)
    assert (uneven.config, uneven.reduction.layers) == (ParallelConfig(tp=8), 32 // 4)


def test_a_proxy_survives_json():
    """What a trial keeps of its proxy comes back equal, and says on how many devices it ran."""
    proxy = llama(pp=4, tp=2, dp=8, mbs=2, zero_stage=0)
    stored = json.loads(json.dumps(proxy.as_json()))

    assert Proxy.from_json(stored) == proxy
    assert stored["devices"] == 16
    assert set(stored["config"]) == {*DEGREES, *FURTHER_DIMENSIONS}
