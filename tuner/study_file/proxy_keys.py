"""Check of the `trial.proxy:` keys: whether the backend can run smaller jobs on this cluster."""

from __future__ import annotations

from costmodels.job.proxy_job import least_layers
from hardware.io.errors import ConfigError
from trials.backend import AbstractBackend, TrialAbility
from trials.registry import TrialKeys
from trials.trial_keys import ProxyOptions
from tuner.subject.contract import AbstractSubject


def proxy_options(
    keys: TrialKeys, subject: AbstractSubject, backend: AbstractBackend, max_trials: int
) -> ProxyOptions | None:
    """Return the study's options for proxy trials; None where every trial runs at full size.

    Raises:
        ConfigError: No proxy trial can be run under these keys.
    """
    wanted = keys.proxy
    if wanted is None:
        return None
    model, cluster = subject.setting.job.model, subject.cluster
    layers = wanted.layers if isinstance(wanted.layers, int) else None
    if len(cluster.groups) > 1:
        raise ConfigError(
            f"needs equal hosts, and the cluster has {len(cluster.groups)} groups of them",
            key="trial.proxy",
            nearest="leave proxy out",
        )
    if TrialAbility.PROXIES not in backend.abilities:
        raise ConfigError(
            f"cannot be run by the backend {keys.backend}, which can only run its own job",
            key="trial.proxy",
            nearest="leave proxy out, or use backend: simulated",
        )
    if wanted.hosts >= cluster.num_hosts:
        raise ConfigError(
            f"must be fewer than the {cluster.num_hosts} hosts of the cluster",
            key="trial.proxy.hosts",
            value=wanted.hosts,
            nearest=f"at most {cluster.num_hosts - 1}" if cluster.num_hosts > 1 else "leave proxy out",
        )
    if layers is not None and not least_layers(model) <= layers <= model.num_layers:
        raise ConfigError(
            f"must be from {least_layers(model)} to the {model.num_layers} layers of the model",
            key="trial.proxy.layers",
            value=layers,
            nearest="auto keeps those of each stage",
        )
    if wanted.full_trials >= max_trials:
        raise ConfigError(
            f"must be fewer than search.max_trials, which is {max_trials}",
            key="trial.proxy.full_trials",
            value=wanted.full_trials,
            nearest=f"at most {max_trials - 1}",
        )
    return wanted
