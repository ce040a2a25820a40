"""Plan of a study with proxies: when it runs proxies, and when the candidates themselves.

Proxies come first. They end once they are settled: with probability above `confidence` the fastest candidate is one
whose proxy has run, or that has none. They also end when only `full_trials` of the budget are left. These trials run
candidates at full size, one after the other those with the shortest step in the median of the draws. A candidate that a
proxy settled is not explored: p_star counts full-size trials alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from hardware.arrays import IntArray
from trials.trial_keys import ProxyOptions
from tuner.search.observations import Observations
from tuner.search.proxy.proxy_trials import Proxy, proxy_of
from tuner.space.enumeration import SpaceOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyPlan:
    """Proxies of a study's candidates, each found when it is first asked for.

    Attributes:
        options: Options of the study on its proxies.
        setting: Setting of the study.
        space: Options of the study on its space.
        grid: Grid of its candidates [n].
        max_trials: Budget of trials of both sizes together.
        confidence: Probability that ends the proxies.
        known: Proxies that were asked for so far; those given beforehand are not searched for.
    """

    options: ProxyOptions
    setting: Setting
    space: SpaceOptions
    grid: ConfigGrid
    max_trials: int
    confidence: float
    known: dict[int, Proxy | None] = field(default_factory=dict)

    def of(self, position: int) -> Proxy | None:
        """Return the proxy that may run in place of one candidate; None if there is none."""
        if position not in self.known:
            self.known[position] = proxy_of(self.grid.config(position), self.setting, self.options, self.space)
        return self.known[position]

    def goes_on(self, observations: Observations, fastest: IntArray) -> bool:
        """Return whether the next trial runs a proxy.

        Args:
            observations: Observations of the trials.
            fastest: Fastest candidate of each draw [M].
        """
        # full size begins once, and proxies do not come back after it
        spent = observations.num_proxies + observations.num_stated
        has_budget = spent < self.max_trials - self.options.full_trials
        if observations.num_at_full_size or not has_budget or not len(fastest):
            return False
        return bool(self.is_settled(observations, fastest).mean() <= self.confidence)

    def is_settled(self, observations: Observations, positions: IntArray) -> NDArray[np.bool_]:
        """Return whether a proxy of each of those candidates could tell nothing new [m]."""
        known = observations.proxied | observations.explored | observations.impossible
        tried = {seen.proxy for seen in observations.proxies}
        # many draws name the same candidate, and finding its proxy takes long
        distinct, row = np.unique(positions, return_inverse=True)
        settled = [at in known or (proxy := self.of(at)) is None or proxy in tried for at in distinct.tolist()]
        return np.array(settled, dtype=np.bool_)[row]

    def is_spent(self, observations: Observations, fastest: IntArray) -> bool:
        """Return whether the proxies are done and all full-size trials were asked for."""
        return observations.num_at_full_size >= self.options.full_trials and not self.goes_on(observations, fastest)

    @property
    def has_none(self) -> bool:
        """Whether no candidate that was looked at has a proxy."""
        return bool(self.known) and not any(self.known.values())

    @property
    def num_too_wide(self) -> int:
        """Number of candidates whose narrowest proxy has more ranks than the hosts have devices."""
        devices = self.options.hosts * self.setting.cluster.devices_per_host
        stages = 1 if self.options.stage else np.minimum(self.grid.pp, 2)
        return int((self.grid.tp * self.grid.cp * self.grid.up * stages > devices).sum())
