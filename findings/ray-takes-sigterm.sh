#!/usr/bin/env bash
# Ray 2.60.0, Python 3.11, Linux: `ray.shutdown()` leaves SIGTERM at its default action, behind Python's back.
#
# A driver that installs its own handler of SIGTERM, to end in order, loses it: `ray.init` replaces it, and `ray.shutdown`
# sets the default action, which kills. `signal.getsignal` still returns the driver's handler, so that a check in Python
# sees nothing. The kernel's view (SigCgt in /proc/self/status) shows it. Whoever wants to end in order after Ray has to
# call `signal.signal` again after `ray.shutdown()`.
#
# Seen, as `python` (signal.getsignal is the driver's handler) and `kernel` (SIGTERM is caught):
#   before: python=True kernel=True
#   after init: python=False kernel=True
#   set again: python=True kernel=True
#   after shutdown: python=True kernel=False
# and a SIGTERM after that kills the process: status 143, and not the handler's 75.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ray==2.60.0
cat > "$folder/driver.py" <<'PROGRAM'
import os
import signal
import sys

import ray


def handler(number, frame):
    print("handled", flush=True)
    sys.exit(75)


def caught_by_kernel():
    status = open("/proc/self/status").read()
    mask = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def tell(when):
    print(f"{when}: python={signal.getsignal(signal.SIGTERM) is handler} kernel={caught_by_kernel()}", flush=True)


signal.signal(signal.SIGTERM, handler)
tell("before")
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
tell("after init")
signal.signal(signal.SIGTERM, handler)
tell("set again")
ray.shutdown()
tell("after shutdown")
os.kill(os.getpid(), signal.SIGTERM)
print("survived", flush=True)
PROGRAM
set +e
seen=$(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 "$folder/venv/bin/python" "$folder/driver.py" 2>/dev/null)
status=$?
set -e
echo "$seen"
echo "status $status"
grep -qx "before: python=True kernel=True" <<<"$seen"
grep -qx "set again: python=True kernel=True" <<<"$seen"
grep -qx "after shutdown: python=True kernel=False" <<<"$seen"
! grep -q "handled" <<<"$seen"
[ "$status" -eq 143 ] # killed by SIGTERM
echo "as described"
