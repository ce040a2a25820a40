"""What a user installs: the wheel, the source distribution, and the command of a wheel away from the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.built_package import ROOT, copied_checkout, wheel_and_sdist

PACKAGES = {"hardware", "costmodels", "trials", "tuner"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the project as a checkout holds it, in which building leaves its products."""
    return copied_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def sources(checkout):
    """Its files, as they were before anything was built."""
    return {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(checkout, sources, tmp_path_factory):
    """The wheel and the source distribution that the project's own build backend makes."""
    assert sources, "listed before the build"
    return wheel_and_sdist(checkout, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Runs a program of the wheel, installed in a folder of its own, from an empty one."""
    folder, elsewhere = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder, built[0]], capture_output=True, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MESHTUNE_")}

    def call(*words):
        return subprocess.run(
            [sys.executable, *words],
            cwd=elsewhere,
            env=environment | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    call.folder = folder
    return call


def test_the_wheel_holds_the_packages_whole_and_nothing_else(built, sources):
    """Every file of the four packages is in the wheel, catalogs included; tests and benchmarks are not."""
    with zipfile.ZipFile(built[0]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert held == {name for name in sources if name.partition("/")[0] in PACKAGES}
    assert {"hardware/catalog/clusters.yaml", "costmodels/catalog/runtimes/megatron-core.yaml"} <= held
    assert {f"{package}/py.typed" for package in PACKAGES} | {"tuner/study_file/study.schema.json"} <= held


def test_the_source_distribution_holds_all_that_make_test_needs(built, sources):
    """Tests, benchmarks, example studies, pages and the Makefile with its constraints are in it."""
    with tarfile.open(built[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}

    assert sources - held == set()


def test_the_wheel_tells_what_is_true(built):
    """Its metadata name the command, the licence and the Python versions, and no page that is not there."""
    with zipfile.ZipFile(built[0]) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}

    assert "meshtune = tuner.cli.main:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Requires-Python: >=3.11" in texts["METADATA"]
    assert "LICENSE" in texts
    assert not any(line.startswith(("Project-URL", "Home-page")) for line in texts["METADATA"].splitlines())


def test_an_installed_wheel_ranks_a_study(installed, built):
    """From another folder, without the checkout, its command knows its version, finds its catalogs and predicts."""
    command, study = installed.folder / "bin" / "meshtune", ROOT / "configs" / "studies" / "llama3-8b-dgx-h100.yaml"

    where = installed("-c", "import tuner; print(tuner.__file__)").stdout
    version, ranking = installed(command, "--version"), installed(command, "rank", study)

    assert where.startswith(str(installed.folder))
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout == f"meshtune {built[0].name.split('-')[1]}\n"
    assert ranking.returncode == 0, ranking.stderr
    note = r"note: model is read from \S+/llama-3-8b\.json, outside the study file's folder .*\n"
    looked = r"Predicted by the cost model alone; .*\n"
    below = "pp pipeline, .*\n> the current configuration\n"
    assert re.fullmatch(f"{note}({looked})?{below}({looked})?", ranking.stderr), ranking.stderr
    assert "tp" in ranking.stdout
