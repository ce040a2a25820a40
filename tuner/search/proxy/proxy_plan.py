"""When a study runs proxies, and when candidates themselves.

Proxies come first. They end once what they can tell of is settled: with probability above `confidence` the fastest
candidate is one whose proxy has run, or that has none. They also end when only `full_trials` of the budget are left.
These run candidates at full size, one after the other those with the shortest step in the median of the draws. What is
settled by a proxy is not explored: p_star counts full-size trials alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from hardware.arrays import IntArray
from tuner.search.observations import Evidence
from tuner.search.proxy.proxy_trials import Proxy, ProxyOptions, proxy_of
from tuner.space.enumeration import SpaceOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyPlan:
    """The proxies of a study's candidates, each found when it is first asked for.

    Attributes:
        options: What the study says about them.
        setting: Its setting.
        space: What it says about its space.
        grid: Its candidates [n].
        max_trials: Its budget, trials of both sizes together.
        confidence: The probability that ends the proxies.
        known: The proxies that were asked for so far; what stands in it beforehand is not looked for.
    """

    options: ProxyOptions
    setting: Setting
    space: SpaceOptions
    grid: ConfigGrid
    max_trials: int
    confidence: float
    known: dict[int, Proxy | None] = field(default_factory=dict)

    def of(self, position: int) -> Proxy | None:
        """What may run in place of one candidate."""
        if position not in self.known:
            self.known[position] = proxy_of(self.grid.config(position), self.setting, self.options, self.space)
        return self.known[position]

    def goes_on(self, evidence: Evidence, fastest: IntArray) -> bool:
        """Whether the next trial is a proxy's.

        Args:
            evidence: What the trials told.
            fastest: The fastest candidate of each draw [M].
        """
        has_budget = evidence.num_proxies < self.max_trials - self.options.full_trials
        if evidence.num_at_full_size or not has_budget or not len(fastest):
            return False
        return bool(self.is_settled(evidence, fastest).mean() <= self.confidence)

    def is_settled(self, evidence: Evidence, positions: IntArray) -> NDArray[np.bool_]:
        """Whether a proxy of each of those candidates could tell nothing new [m]."""
        known = evidence.proxied | evidence.explored | evidence.impossible
        tried = {seen.proxy for seen in evidence.proxies}
        distinct, row = np.unique(positions, return_inverse=True)
        settled = [at in known or (proxy := self.of(at)) is None or proxy in tried for at in distinct.tolist()]
        return np.array(settled, dtype=np.bool_)[row]

    def is_spent(self, evidence: Evidence, fastest: IntArray) -> bool:
        """Whether the proxies are done and all full-size trials were asked for."""
        return evidence.num_at_full_size >= self.options.full_trials and not self.goes_on(evidence, fastest)

    @property
    def num_too_wide(self) -> int:
        """Candidates of which the ranks of one stage of one replica are more than the devices of a proxy."""
        devices = self.options.hosts * self.setting.cluster.devices_per_host
        return int((self.grid.tp * self.grid.cp * self.grid.up > devices).sum())
