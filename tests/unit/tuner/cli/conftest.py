import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import tuner.run.loop
import tuner.run.single_trial
from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import Done, write_replay
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.cli.main import main


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch, tmp_path):
    """Every test works in an empty folder of its own, and nobody's settings reach it."""
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def no_ray(monkeypatch):
    """Trials run in this process, so that a test need not wait for Ray."""
    for module in (tuner.run.loop, tuner.run.single_trial):
        monkeypatch.setattr(module, "RayExecutor", lambda backend, **_options: InProcessExecutor(backend))


@pytest.fixture
def simulated(tmp_path) -> Path:
    """A small study that the cost model answers."""
    path = tmp_path / "study.yaml"
    path.write_text(study(name="small", current="{tp: 8}", search="{draws: 10}"), encoding="utf-8")
    return path


@pytest.fixture
def hopeless(tmp_path) -> Path:
    """A study of a model that no configuration fits."""
    path = tmp_path / "hopeless.yaml"
    path.write_text(study(model="llama3-405b"), encoding="utf-8")
    return path


@pytest.fixture
def replay(tmp_path) -> Path:
    """A study of twelve measured rows, three of them failed."""
    return write_replay(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[Path, str, Done]:
    """The replay after its run: its file, its storage, and how the run ended."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_replay(folder, current="{tp: 8}")
    storage = f"sqlite:///{folder / 'done.db'}"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(tuner.run.loop, "RayExecutor", lambda backend, **_options: InProcessExecutor(backend))
        patch.setattr(sys, "argv", ["meshtune", "run", str(path), "--storage", storage, "--json"])
        patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main()
    return path, storage, Done(status=ended.value.code, out=out.getvalue(), err=err.getvalue())
