#!/usr/bin/env bash
# SciPy 1.17.1, NumPy 2.4.6, Python 3.11, Linux: scipy.optimize.milp has no status for its own limit of nodes, and a second
# solve with the same options has no such limit.
#
# The documentation names the statuses: 0 optimal, 1 "iteration or time limit reached", 2 infeasible, 3 unbounded, 4 "other;
# see message for details". A `time_limit` that is reached gives 1. A `node_limit` that is reached gives 4 and "The HiGHS
# status code was not recognized", with a feasible point in `x`, its bound and its gap. Whoever takes 4 for a failure throws
# an incumbent away, and whoever looks for 1 never sees a limit of nodes. (HiGHS has no status of its own for nodes: it
# reports its solution limit.)
#
# milp also takes the key `node_limit` out of the dictionary that it is given, and leaves the other keys. A loop that solves
# several programs with one dictionary limits the first of them only, without a word.
#
# Seen:
#   node_limit: status 4, a point: True, not recognized: True, keys left: ['mip_rel_gap']
#   the same options again: status 0, nodes above the limit: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "scipy==1.17.1" "numpy==2.4.6"
cat > "$folder/limits.py" <<'PROGRAM'
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

draw = np.random.default_rng(0)
rows = draw.integers(1, 50, (5, 30))
worth = draw.integers(1, 60, 30)
options = {"node_limit": 1, "mip_rel_gap": 0.0}


def solve():
    room = LinearConstraint(rows, -np.inf, rows.sum(axis=1) // 3)
    return milp(-worth, constraints=room, integrality=np.ones(30), bounds=Bounds(0, 1), options=options)


first = solve()
print(
    f"node_limit: status {first.status}, a point: {first.x is not None}, "
    f"not recognized: {'not recognized' in first.message}, keys left: {sorted(options)}"
)
second = solve()
print(f"the same options again: status {second.status}, nodes above the limit: {second.mip_node_count > 1}")
PROGRAM
seen=$("$folder/venv/bin/python" "$folder/limits.py" 2>/dev/null)
echo "$seen"
diff - <(echo "$seen") <<'EXPECTED'
node_limit: status 4, a point: True, not recognized: True, keys left: ['mip_rel_gap']
the same options again: status 0, nodes above the limit: True
EXPECTED
