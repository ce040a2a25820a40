import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.support.studies.report_pages import CRASH, OUT_OF_MEMORY, STUDY, run, study_of
from tuner.report import collect, render_report
from tuner.study_file.storage_address import StorageAddress


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """A study with seven trials, the first of which is the current one; one crashed, one ran out of memory."""
    config = study_of(tmp_path_factory.mktemp("study"))
    run(config, 7, {3: CRASH, 4: OUT_OF_MEMORY})
    return config


@pytest.fixture(scope="session")
def data(config):
    """What its report looks at."""
    return collect(config)


@pytest.fixture(scope="session")
def page(data):
    """Its page."""
    return render_report(data)


@pytest.fixture
def copied(config, tmp_path):
    """The same study in a storage of its own, which a test may change."""
    path = tmp_path / "study.db"
    stored = config.storage.file
    with closing(sqlite3.connect(stored)) as source, closing(sqlite3.connect(path)) as target:
        source.backup(target)
    return replace(config, storage=StorageAddress.of_file(path))


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """What the report of a study with pipelines of four stages looks at."""
    text = STUDY.replace("recompute: [none, full]", "pp: [4], vpp: [1], recompute: [full]")
    config = study_of(tmp_path_factory.mktemp("deep"), text=text)
    run(config, 1)
    return collect(config)
