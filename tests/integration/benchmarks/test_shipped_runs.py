"""What the benchmarks of accuracy read if no file is named."""

import pytest

from benchmarks.judges import fidelity
from benchmarks.search import sample_efficiency
from benchmarks.strangers import __main__ as strangers
from benchmarks.support.shipped_runs import shipped_runs


@pytest.mark.parametrize(
    ("program", "argument"), [(strangers, "measured"), (sample_efficiency, "measured"), (fidelity, "quote")]
)
def test_a_benchmark_without_files_reads_the_shipped_runs(program, argument):
    """All files of configs/measured/runs are read, and a named file stands in place of all of them."""
    default, named = program._arguments([]), program._arguments([f"--{argument}", "own.csv"])

    assert getattr(default, argument) == shipped_runs() != []
    assert [path.name for path in getattr(named, argument)] == ["own.csv"]
