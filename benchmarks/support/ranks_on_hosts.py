"""Ranks of one program on the shaped hosts of this machine, one on each, as srun would start them.

    python -m benchmarks.support.ranks_on_hosts HOST HOST -- finetune.py --steps 7

The first host's address and a port of it are where the ranks meet. All are ended as soon as one has failed. What the
first one prints is shown; the others, each the first of its host, would print the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.support.shaped_hosts import address_of

MEETING_PORT = "29511"


def main() -> int:
    """Start the ranks, and return the first status that is not 0."""
    at = sys.argv.index("--")
    hosts, words = sys.argv[1:at], sys.argv[at + 1 :]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, *words],  # noqa: S607 # found on the path, like `tc`
            stdout=subprocess.DEVNULL if rank else None,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": address_of(0),
                "MASTER_PORT": MEETING_PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
            },
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed := [rank.returncode for rank in ranks if rank.poll()]:
                return int(failed[0])
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
