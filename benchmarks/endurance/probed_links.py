"""Probe hosts whose adapters slow down, and hosts whose training sends traffic meanwhile.

    python -m benchmarks.endurance.probed_links [--probes 20] [--json]

Four hosts of 400 Mbit/s are network namespaces of this machine, whose adapters `tc` shapes, which needs root. First
one host is given a tenth of its bandwidth, then another receives at a quarter, and each is restored. The program
prints which links the probe of `meshtune watch` names, and with what shares. Then all hosts send to each other during
a share of each period of two seconds, with adapters as they were. The program counts the probes after which the
shares of links changed, though no adapter did: for probes of one transfer, and for those of as many as the watch
makes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.support.shaped_hosts import ShapedHosts, missing
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, Steps
from tuner.watch.probing import TRANSFERS, Probing

HOSTS, MBIT_PER_S = 4, 400
PERIOD_S = 2.0
BUSY = (0.2, 0.4)
"""Shares of each period in which the hosts send."""

COUNTED = (1, TRANSFERS)
"""Numbers of transfers of the probes that are counted beside traffic."""

FAULTS = (("h1 at a tenth", 1, 0.1, 0.1), ("h2 receives at a quarter", 2, 1.0, 0.25))
"""Name of each fault, its host, and the shares of bandwidth with which it sends and receives."""


def main(argv: Sequence[str] | None = None) -> int:
    """Probe the hosts and return the exit status."""
    parser = benchmark_parser("endurance.probed_links", __doc__)
    parser.add_argument("--probes", type=count_at_least(1), default=20, help="probes beside each kind of traffic (20)")
    return answer("probed_links", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    if lacks := missing():
        raise ConfigError(f"needs {lacks}, which this machine or user lacks")
    rng = np.random.default_rng(0)
    with ShapedHosts(HOSTS, MBIT_PER_S) as hosts:
        faults = _find_faults(hosts)
        traffic = []
        for transfers in COUNTED:
            for share in BUSY:
                tell(f"{transfers} transfers beside traffic in {share:.0%} of the time")
                with hosts.traffic(PERIOD_S, share):
                    traffic.append(
                        {"transfers": transfers, "busy": share} | _count(hosts, transfers, given.probes, rng)
                    )
    return {"faults": faults, "traffic": traffic}


def _probing(hosts: ShapedHosts, transfers: int) -> Probing:
    return Probing(hosts, every_s=0.0, links=Links(), on_trouble=tell, transfers=transfers)


def _seats(hosts: ShapedHosts) -> list[Seat]:
    return [Seat(node=name, is_lost=False) for name in hosts.names]


def _find_faults(hosts: ShapedHosts) -> list[dict[str, Any]]:
    """Slow hosts down and restore them; return what the probe names, after as many probes as have to agree."""
    probing, found = _probing(hosts, TRANSFERS), []

    def probe() -> dict[str, float]:
        for _ in range(Steps().repeats):
            shares = probing.look(_seats(hosts), True)
        return {"-".join(f"h{host}" for host in link): round(share, 3) for link, share in shares.items()}

    found.append({"fault": "none", "named": probe(), "restored": probe()})
    for fault, host, sends, receives in FAULTS:
        tell(fault)
        hosts.shape(hosts.names[host], sends=sends, receives=receives)
        named = probe()
        hosts.shape(hosts.names[host], sends=1.0, receives=1.0)
        found.append({"fault": fault, "named": named, "restored": probe()})
    return found


def _count(hosts: ShapedHosts, transfers: int, probes: int, rng: np.random.Generator) -> dict[str, Any]:
    """Count the probes that change shares or leave some link slow."""
    probing = _probing(hosts, transfers)
    before: dict[Any, float] = {}
    changes = slow = 0
    for _ in range(probes):
        time.sleep(rng.uniform(0.0, PERIOD_S))
        shares = probing.look(_seats(hosts), True)
        changes += shares != before
        slow += bool(shares)
        before = shares
    return {"probes": probes, "changes": changes, "with_slow_links": slow}


def _print(figures: dict[str, Any]) -> None:
    for one in figures["faults"]:
        print(f"{one['fault']}: named {one['named'] or 'nothing'}, then {one['restored'] or 'nothing'}")
    publish(figures["traffic"], as_json=False)


if __name__ == "__main__":
    sys.exit(main())
