"""A package outside the tree, docs/examples/extension, that adds to everything that can be added to."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import ROOT, assert_users_mistake, in_process

PACKAGE = ROOT / "docs" / "examples" / "extension"
LAUNCH = "acme-train --model acme-2b --batch 64 --length 2048 --tp 2 --pp 2\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which pip has installed the package, with the metadata that it wrote."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    copied = tmp_path_factory.mktemp("source") / "extension"
    shutil.copytree(PACKAGE, copied)
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", folder, copied], capture_output=True, check=True, timeout=300
    )
    assert (folder / "acme_meshtune-1.0.dist-info" / "entry_points.txt").exists()
    return folder


@pytest.fixture
def meshtune(packages, tmp_path):
    """Runs a command where the package is installed, and further folders of packages."""

    def call(*words, beside=()):
        further = Path(":".join(map(str, (packages, *beside))))
        return in_process(*words, cwd=tmp_path, packages=further, timeout_s=300)

    return call


@pytest.fixture
def other(tmp_path):
    """Makes the metadata of another package, which declares one entry point."""

    def declare(group, line):
        folder = tmp_path / "others"
        metadata = folder / "other-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", encoding="utf-8")
        (metadata / "entry_points.txt").write_text(f"[meshtune.{group}]\n{line}\n", encoding="utf-8")
        return folder

    return declare


@pytest.fixture
def acme(tmp_path):
    """A study whose every name is the package's."""
    path = tmp_path / "study.yaml"
    path.write_text(
        study(
            name="acme",
            model="acme-2b",
            cluster="{name: acme-pod, hosts: 1}",
            job="{sequence_length: 2048, global_batch_size: 64}",
            runtime="acme-trainer",
            trial="{backend: acme, penalty_s: 0.25}",
            search="{max_trials: 4, draws: 10, parallel_trials: 2}",
        ),
        encoding="utf-8",
    )
    return path


def test_its_catalog_stands_beside_ours(meshtune):
    """Its entries are listed as the package's, and found by all their spellings."""
    listed = {kind: meshtune("catalog", kind, "--json").json["entries"] for kind in ("devices", "models", "runtimes")}
    (device,) = meshtune("catalog", "devices", "X1", "--json").json["entries"]

    own = [entry["name"] for entries in listed.values() for entry in entries if entry["origin"] == "acme-meshtune"]
    assert own == ["acme-x1", "acme-2b", "acme-trainer"]
    assert (device["name"], device["sources"]) == ("acme-x1", {"datasheet": "Acme X1 data sheet, revision 3"})


def test_its_entries_change_no_name_of_ours(meshtune, other):
    """An entry of a package with the name of a shipped one is not used, whatever spelling of the name it has."""
    folder = other("catalogs", "other = other_catalog")
    device = (PACKAGE / "acme_meshtune/catalog/devices/acme-x1.yaml").read_text(encoding="utf-8")
    for name, text in (
        ("__init__.py", ""),
        ("models/llama3-8b.yaml", "num_layers: 1\n"),
        ("devices/h100.yaml", device.replace("[X1]", "[]")),
        ("clusters/DGX_H100.yaml", "device: L40S\ndescription: another\n"),
    ):
        path = folder / "other_catalog" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    for kind, name, is_called in (
        ("models", "llama3-8b", "llama3-8b"),
        ("devices", "H100", "H100-SXM-80"),
        ("clusters", "DGX_H100", "dgx-h100"),
    ):
        found = meshtune("catalog", kind, name, "--json", beside=[folder]).json["entries"]
        assert [(entry["name"], entry["origin"]) for entry in found] == [(is_called, "shipped")]


def test_its_importer_and_exporter_are_options(meshtune, tmp_path):
    """`init --from` reads a file by its importer, and `export --to` writes flags that read back alike."""
    (tmp_path / "launch.sh").write_text(LAUNCH, encoding="utf-8")
    words = ("--cluster", "acme-pod", "--hosts", 2, "--mbs", 1, "--out", "new.yaml")

    made = meshtune("init", "--from", "acme=launch.sh", *words, "--json")
    assert made.status == 0, made.err
    exported = meshtune("export", "new.yaml", "--to", "acme", "--config", "current", "--json")

    assert made.json["current"] == {"pp": 2, "tp": 2, "dp": 4, "cp": 1, "up": 1, "vpp": 1, "ep": 1, "mbs": 1}
    assert exported.json["text"] == "acme-train --model acme-2b\n--pp 2\n--tp 2\n--dp 4\n"


def test_its_kind_of_block_is_predicted(meshtune, acme, tmp_path):
    """A model of its blocks has the step and the memory of one of ours that says the same."""
    model = (PACKAGE / "acme_meshtune/catalog/models/acme-2b.yaml").read_text(encoding="utf-8")
    ours = model.replace("kind: acme_mlp,", "kind: dense_mlp, gated: false,")
    assert ours != model
    (tmp_path / "ours.yaml").write_text(ours, encoding="utf-8")
    config = ("--config", "pp=2,tp=2,dp=2", "--json")

    by_package = meshtune("predict", acme, *config)
    by_ours = meshtune("predict", acme, *config, "--set", "model=ours.yaml")

    assert by_package.status == by_ours.status == 0, by_package.err + by_ours.err
    assert by_package.json["step_time_s"] == pytest.approx(by_ours.json["step_time_s"], rel=1e-12)
    assert by_package.json["peak_memory_bytes"] == by_ours.json["peak_memory_bytes"]


def test_its_backend_runs_trials(meshtune, acme):
    """A study of its backend runs on Ray, whose workers import the package."""
    done = meshtune("run", acme, "--json")

    assert done.status == 0, done.err
    assert "Warning" not in done.err
    best = done.json["best"]
    assert done.json["step_time_s"] == 1 + 0.25 * (best["pp"] + best["tp"] - 2)
    assert (done.json["trials"], done.json["failed"], done.json["source"]) == (4, 0, "synthetic")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("trial.penalty_s=-1", "trial.penalty_s = -1: must be greater than or equal to 0"),
        ("trial.penalty=1", "trial.penalty = 1: unknown key; did you mean 'penalty_s'?"),
        ("trial.backend=acm", "trial.backend = 'acm': is no backend; did you mean 'acme'?"),
    ],
)
def test_mistakes_in_its_keys_are_told_like_ours(meshtune, acme, change, told):
    """The keys of its backend are checked as all others are."""
    changed = ("--set", "trial={backend: acm}") if "acm" in change.split("=") else ("--set", change)
    assert_users_mistake(meshtune("rank", acme, *changed), told)


def test_unknown_names_are_told_with_its_own(meshtune, acme, tmp_path):
    """Its names are among the valid ones."""
    (tmp_path / "launch.sh").write_text(LAUNCH, encoding="utf-8")

    assert_users_mistake(meshtune("export", acme, "--to", "acne"), "'acne'", "did you mean 'acme'")
    assert_users_mistake(
        meshtune("init", "--from", "acne=launch.sh", "--out", "new.yaml"), "--from = 'acne'", "did you mean 'acme'"
    )
    assert_users_mistake(
        meshtune("init", "--from", "launch.sh", "--out", "new.yaml"), "--from = 'launch.sh'", "NAME=FILE"
    )


@pytest.mark.parametrize(
    ("group", "line", "command", "told"),
    [
        ("exporters", "new = nowhere:export", "export STUDY --to new", "nowhere:export of the package other cannot be"),
        ("exporters", "new = json:tool", "export STUDY --to new", "cannot be imported"),
        ("exporters", "new = json:decoder", "export STUDY --to new", "is no function"),
        ("exporters", "new = operator:is_", "export STUDY --to new --config dp=8", "returned no tuner.export.Export"),
        ("exporters", "acme = json:dumps", "export STUDY --to acme", "is declared by two installed packages"),
        ("backends", "new = json:JSONDecoder", "rank STUDY --set trial={backend:new}", "is no subclass of trials."),
        ("blocks", "new = json:JSONDecoder", "rank STUDY", "is no subclass of costmodels.blocks"),
        ("catalogs", "new = nowhere", "catalog models", "is no package with a folder"),
        ("catalogs", "new = json.decoder", "catalog models", "is no package with a folder"),
    ],
)
def test_a_faulty_package_is_named(meshtune, acme, other, group, line, command, told):
    """One message says which package declares something that cannot be used."""
    beside = [other(group, line)]
    words = [acme if word == "STUDY" else word.replace(":new", ": new") for word in command.split()]

    assert_users_mistake(meshtune(*words, beside=beside), told, "other")
