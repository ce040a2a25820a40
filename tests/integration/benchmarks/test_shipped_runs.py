"""What the benchmarks of accuracy read if no file is named."""

import pytest

from benchmarks.calibration import fit_profiles
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


def test_profiles_are_fitted_to_the_shipped_runs(monkeypatch):
    """Without files all of them are fitted to; named files stand in place of them."""
    seen = []
    monkeypatch.setattr(fit_profiles, "fit_profiles", lambda measured, only: seen.append((measured, only)))
    statuses = [fit_profiles.main(arguments) for arguments in ([], ["own.csv"], ["--runtime", "nanotron"])]

    assert statuses == [0, 0, 0]
    assert [[path.name for path in measured] for measured, _ in seen] == [
        [path.name for path in shipped_runs()],
        ["own.csv"],
        [path.name for path in shipped_runs()],
    ]


def test_the_publishers_of_the_shipped_runs_can_be_left_out(capsys):
    """Without files, a mistaken publisher gets the nearest one of the shipped runs."""
    assert strangers.main(["--sources", "internevoo"]) == 2
    assert "did you mean 'internevo'?" in capsys.readouterr().err
