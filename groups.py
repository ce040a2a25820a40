from pathlib import Path
import numpy as np
from collections import Counter
from benchmarks.support.problems import read_groups, read_runs
from trials.backend import Status
paths=sorted(p for p in Path("configs/measured/runs").glob("*.csv") if not p.stem.endswith("_failed"))
runs,_=read_runs(paths)
print("failed runs", Counter((r.source,r.is_failed) for r in runs if r.is_failed))
for m in (5,20):
    groups,sk=read_groups(paths,m)
    f=[g for g in groups if np.isinf(g.step_time_s).any()]
    print(m,len(groups),len(f),sum(np.isinf(g.step_time_s).sum() for g in f), Counter(o.status for g in f for o in g.outcomes))
    for g in f: print(g.key[:5], len(g.runs), int(np.isinf(g.step_time_s).sum()), g.grid.dimensions)
