"""Program of one host of a probe that a batch system starts on all hosts at once.

Orders come as lines of JSON on the standard input, which every host reads; answers are lines of JSON on the standard
output. The program ends with its input, so that nothing is left of a probe whose watch is gone.

- `{"listen": {receiver: sender's address}}`: each receiver answers `{"host": ..., "place": [address, port]}`.
- `{"transfer": [[sender, receiver, address, port, token], ...]}`: each sender answers `{"host": ..., "sent": trouble}`,
  each receiver `{"host": ..., "rate": bytes/s or null, "trouble": ...}`.

A host begins by answering `{"host": ...}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from trials.link_probe.transfer import Receiver, local_address, send


def serve(host: str, orders: TextIO, answers: TextIO) -> None:
    """Follow orders until there are no more."""

    def answer(**told: Any) -> None:
        answers.write(json.dumps({"host": host, **told}) + "\n")
        answers.flush()

    receiver: Receiver | None = None
    answer()
    for line in orders:
        order = json.loads(line)
        if host in order.get("listen", {}):
            if receiver is not None:  # its sender has failed before
                receiver.close()
                receiver = None
            try:
                address = local_address(order["listen"][host])
                receiver = Receiver(address)
                answer(place=[address, receiver.port])
            except OSError as error:
                answer(place=None, trouble=f"cannot listen: {error.strerror or error}")
        for sender, to, address, port, token in order.get("transfer", ()):
            if host == sender:
                answer(sent=send(address, port, bytes.fromhex(token)))
            elif host == to and receiver is not None:
                arrived = receiver.receive(bytes.fromhex(token))
                receiver = None
                answer(rate=arrived.rate_bytes_per_s, trouble=arrived.trouble)


if __name__ == "__main__":
    import os

    serve(os.environ["SLURMD_NODENAME"], sys.stdin, sys.stdout)
