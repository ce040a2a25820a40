"""Time the preparation of studies: enumerate, prune and predict every candidate.

    python -m benchmarks.speed.space [--repeats 5] [--json]

Target: for Pangu-135B on 6,144 devices under 2 s on 2 cores (median of 5, process start excluded), and peak resident
memory under 1 GiB.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.timing import arguments, median_s, peak_rss_bytes, publish
from tuner.forecast.candidates import candidates_of
from tuner.study_file.config import load_study

STUDIES = Path(__file__).parents[2] / "configs" / "studies" / "flexparallel"


def main() -> None:
    """Time every study of FlexParallel's Table 2."""
    options = arguments(__doc__ or "", repeats=5)
    rows = []
    for file in sorted(STUDIES.glob("*.yaml")):
        config = load_study(file)
        seconds = median_s(lambda config=config: candidates_of(config.problem), options.repeats)
        found = candidates_of(config.problem)
        rows.append(
            {
                "study": file.stem,
                "grid": found.space.num_before_memory,
                "feasible": len(found.space.grid),
                "seconds": seconds,
                "peak_rss_mib": peak_rss_bytes() // 2**20,
            }
        )
    publish(rows, as_json=options.json)


if __name__ == "__main__":
    main()
