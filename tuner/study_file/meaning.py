"""Meaning of a study's trials: the resolved values that a resumed study must share with its recorded trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from costmodels.job.parallel_config import HAND
from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from hardware.io.secret_texts import digest_words
from trials.backend import AbstractBackend
from trials.knobs.knob import Knob
from trials.trial_keys import AbstractTrialKeys
from tuner.plans.layer_planning import LayerPlanning
from tuner.space.enumeration import SpaceOptions
from tuner.study_file.knob_keys import describe_knobs


def describe_trials(
    setting: Setting,
    options: SpaceOptions,
    planning: LayerPlanning,
    trial: AbstractTrialKeys,
    backend: AbstractBackend,
    knobs: Sequence[Knob],
) -> dict[str, Any]:
    """Return the resolved values under the study file's keys that give a trial its meaning, as JSON."""
    job, runtime = asdict(setting.job), asdict(setting.runtime)
    model = job.pop("model")
    del runtime["layer_changes"]  # they follow from the other values
    del runtime["offload_modes"]  # each trial says which of them it has
    del job["plan"]  # each trial says which it has
    if job["offload"] == "none":
        del job["offload"]  # as in studies from before there was the key
    if setting.job.sequences is None:
        del job["sequences"]
        del runtime["splits_documents"]  # it changes nothing where sequences fill their rows
    return {
        "model": model,
        "cluster": _describe_cluster(setting.cluster),
        "job": job,
        "runtime": runtime,
        "space": {"opened": list(options.opened)} | ({"knobs": describe_knobs(knobs)} if knobs else {}),
        "trial": trial.meaning() | backend.describe(),
        **_describe_planner(planning),
    }


def describe_own_trials(
    cluster: Cluster, own: Mapping[str, Any], trial: AbstractTrialKeys, backend: AbstractBackend
) -> dict[str, Any]:
    """Return the same for a study of a user's own step, which `own` describes."""
    return {**own, "cluster": _describe_cluster(cluster), "trial": trial.meaning() | backend.describe()}


def _describe_planner(planning: LayerPlanning) -> dict[str, Any]:
    """Return the planner as a key of the study.

    The name tells that both plans are candidates: before, the planner's stood in place of the one by hand.
    """
    if planning.name == "megatron":
        return {}
    return {"planner": {"name": f"{HAND} or {planning.name}", "pins": [asdict(pin) for pin in planning.pins]}}


def _describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster's fields, without those that only a trace changes, and without switches if it has none."""
    assert not cluster.slow_pairs, "a study describes the cluster while nothing has changed"
    assert not cluster.networks, "a study describes the cluster while nothing has changed"
    left_out = {"slow_pairs", "networks"} | (set() if cluster.switches else {"switches", "uplink_bytes_per_s"})
    return {key: value for key, value in asdict(cluster).items() if key not in left_out}


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Return the first key, in dotted form, at which two meanings differ, with both values; None if they agree."""
    for key in sorted({*before, *now}):
        path = f"{prefix}{key}"
        old, new = before.get(key), now.get(key)
        if path == "trial.command" and isinstance(old, list):
            old = digest_words(map(str, old))  # studies from before have the words as they are
        if isinstance(old, dict) and isinstance(new, dict):
            inner = first_difference(old, new, f"{path}.")
            if inner is not None:
                return inner
        elif old != new:
            return path, old, new
    return None
