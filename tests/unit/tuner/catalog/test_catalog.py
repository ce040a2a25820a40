import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from costmodels.job.runtime import comparable_names, runtime_names
from hardware.device import DEVICES
from hardware.io.catalogs import user_catalog, user_files
from tests.support.studies.broken_studies import rows, study
from tests.support.studies.command_line import assert_users_mistake, in_process
from tuner.catalog.listing import LISTINGS

KINDS = ("devices", "clusters", "models", "runtimes", "knobs")
OWN_CLUSTER = "device: H100\ndescription: our pods\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of the user's catalog."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("MESHTUNE_CATALOG", str(folder))

    def write(name, text):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def meshtune(tmp_path):
    """Runs the command in a process of its own, which reads all catalogs anew."""

    def call(*words):
        return in_process(*words, cwd=tmp_path)

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_has_all_columns_and_its_name(kind):
    """The rows of a kind have one form, which holds every column of the table."""
    entries = list(LISTINGS[kind].entries())
    rows = [entry.as_json() for entry in entries]

    assert len({tuple(row) for row in rows}) == 1
    assert set(LISTINGS[kind].columns) <= set(rows[0])
    assert not any(entry.origin_in_words for entry in entries)
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_that_an_entry_cites_is_told(kind):
    """The sources of an entry are those that it names, each with its text."""
    for entry in LISTINGS[kind].entries():
        assert all(entry.sources.values()), entry.file.name
        if kind in ("devices", "clusters"):
            assert {part.split(",")[0] for part in str(entry.keys).split("'source': '")[1:]} == {
                f"{name}'" for name in entry.sources
            }


def test_rows_hold_published_figures():
    """An H100 has 989.4 TFLOP/s in bf16 and 3.35 TB/s, Llama 3 8B has 8.03 billion parameters in 32 layers."""
    devices = {entry.file.name: entry.row for entry in LISTINGS["devices"].entries()}
    models = {entry.file.name: entry.row for entry in LISTINGS["models"].entries()}
    runtimes = {entry.file.name: entry.row for entry in LISTINGS["runtimes"].entries()}

    assert devices["H100-SXM-80"]["bf16_tflops"] == pytest.approx(989, abs=1)
    assert devices["H100-SXM-80"]["memory_gb_per_s"] == pytest.approx(3350)
    assert devices["A100-SXM-80"]["fp8_tflops"] is None
    assert models["llama3-8b"]["parameters"] == 8_030_261_248  # of the published checkpoint
    assert models["llama3-8b"]["layers"] == 32
    assert models["mixtral-8x7b"]["active_parameters"] < models["mixtral-8x7b"]["parameters"] / 3
    assert runtimes["unknown"]["runs"] == 0
    assert runtimes["megatron-core"]["runs"] > 300


def test_a_device_is_found_by_any_spelling(meshtune):
    """A name of nvidia-smi leads to the entry, whose YAML reads back as the catalog states it."""
    done = meshtune("catalog", "devices", "NVIDIA H100 80GB HBM3")

    assert done.status == 0
    read = yaml.safe_load(done.out)
    assert read.pop("sources")
    assert read == yaml.safe_load(DEVICES.read_text(encoding="utf-8"))["devices"]["H100-SXM-80"]


def test_a_knob_is_printed_for_each_framework_that_has_it(meshtune):
    """A knob that several frameworks have is several entries."""
    done = meshtune("catalog", "knobs", "overlap_grad_reduce", "--json")

    assert {entry["entry"]["framework"] for entry in done.json["entries"]} >= {"megatron", "nemo"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("device",), ("KIND", "did you mean 'devices'")),
        (("devices", "H10"), ("'H10'", "did you mean 'H100'")),
        (("clusters", "dgx-h10"), ("is no cluster of the catalog", "did you mean 'dgx-h100'")),
        (("models", "llama3-8"), ("is no model of the catalog", "did you mean 'llama3-8b'")),
        (("runtimes", "megatron"), ("is no runtime profile of the catalog", "valid: ")),
        (("knobs", "overlap_grad"), ("is no known knob of the catalog", "did you mean 'overlap_grad_reduce'")),
    ],
    ids="_".join,
)
def test_an_unknown_name_is_told_with_the_nearest(meshtune, words, told):
    """One message names what is wrong and the nearest choice."""
    assert_users_mistake(meshtune("catalog", *words), *told)


def test_own_entries_are_named_by_studies(own, meshtune, tmp_path):
    """A cluster of the user's on a device of theirs, a model and a profile of theirs are found by their names."""
    own("devices/A100-64-ours.yaml", meshtune("catalog", "devices", "A100-SXM-80").out.replace("79.15", "64"))
    own("clusters/pod.yaml", "device: A100-64-ours\ndescription: our pods\n")
    own("models/our-8b.yaml", meshtune("catalog", "models", "llama3-8b").out)
    own("runtimes/our-megatron.yaml", meshtune("catalog", "runtimes", "megatron-core").out)
    path = tmp_path / "study.yaml"
    path.write_text(
        study(name="own", model="our-8b", cluster="{name: pod, hosts: 2}", runtime="our-megatron"), encoding="utf-8"
    )

    listed = meshtune("catalog", "clusters", "--json").json["entries"]
    done = meshtune("rank", path, "--json")

    assert listed[-1] | {"description": ""} == {
        "name": "pod",
        "origin": "yours",
        "shadows": False,
        "device": "A100-64-ours",
        "devices_per_host": 8,
        "host_gb_per_s": 300.0,
        "network_gb_per_s": 25.0,
        "description": "",
    }
    assert done.status == 0, done.err
    assert "in place of" not in done.err
    assert meshtune("catalog", "devices", "A100", "--json").json["entries"][0]["name"] == "A100-SXM-80"
    assert all(row["peak_memory_bytes"] < 64 * 2**30 for row in done.json["configs"])


def test_an_entry_in_place_of_a_shipped_one_is_told(own, meshtune, tmp_path):
    """A device of the user's with the name of a shipped one takes all its spellings; lists and commands say so."""
    text = meshtune("catalog", "devices", "H100-SXM-80").out
    own("devices/h100-sxm-80.yaml", text.replace("value: 79.11", "value: 40"))
    path = tmp_path / "study.yaml"
    path.write_text(study(), encoding="utf-8")

    by_alias = meshtune("catalog", "devices", "H100", "--json").json["entries"]
    listed = [entry["name"] for entry in meshtune("catalog", "devices", "--json").json["entries"]]
    done = meshtune("rank", path, "--json")

    assert [(entry["name"], entry["origin"], entry["shadows"]) for entry in by_alias] == [
        ("h100-sxm-80", "yours", True)
    ]
    assert by_alias[0]["entry"]["memory_gib"]["value"] == 40
    assert "H100-SXM-80" not in listed
    assert "note: device h100-sxm-80 is that of your own catalog" in done.err
    assert all(row["peak_memory_bytes"] < 40 * 2**30 for row in done.json["configs"])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("devices/mine.yaml", "memory_gib: {value: 80, source: x, confidence: high}\n", ("mine.yaml", "and missing")),
        ("clusters/mine.yaml", "device: H1000\ndescription: ours\n", ("device = 'H1000'", "is not a known device")),
        (
            "clusters/mine.yaml",
            OWN_CLUSTER + "devices_per_host: {value: 4, source: x, confidence: high}\n",
            ("mine.yaml: devices_per_host.source = 'x'", "is no key of `sources`"),
        ),
        ("models/mine.yaml", "num_layers: 2\n", ("mine.yaml", "missing")),
        ("runtimes/mine.yaml", "rule_set: megatron\n", ("mine.yaml", "missing")),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_mistake_in_an_own_entry_names_its_file(own, meshtune, name, text, told):
    """One line says which file of the user's catalog is wrong, and how; all other entries are listed."""
    own(name, text)
    kind = name.partition("/")[0]

    done = meshtune("catalog", kind, "--json")

    assert done.status == 0
    assert len(done.json["unread"]) == 1
    assert all(word in done.json["unread"][0] for word in ("mine.yaml: ", *told))
    assert not any(entry["name"] == "mine" for entry in done.json["entries"])
    assert f"note: {done.json['unread'][0]}\n" in meshtune("catalog", kind).err
    assert_users_mistake(meshtune("catalog", kind, "mine"), "mine.yaml: ", *told)


BROKEN = {
    "devices": "memory_gib: eighty\n",
    "clusters": "device: H1000\ndescription: ours\n",
    "models": "num_layers: [\n",
    "runtimes": "rule_set: megatron\n",
}


def test_broken_entries_stop_no_study_that_names_nothing_of_them(own, meshtune, tmp_path):
    """Each kind has a broken file, and a study of other names runs; files that it reads are told in a line each."""
    for kind, text in BROKEN.items():
        own(f"{kind}/mine.yaml", text)
    (tmp_path / "study.yaml").write_text(study(), encoding="utf-8")

    done = meshtune("rank", "study.yaml", "--json")

    assert done.status == 0, done.err
    notes = [line for line in done.err.splitlines() if "mine.yaml" in line]
    assert [line.partition("/own/")[2].partition(":")[0] for line in notes] == [
        "clusters/mine.yaml",
        "devices/mine.yaml",
    ]
    assert all(line.startswith("note: ") for line in notes)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("devices", {"cluster": "{device: mine, hosts: 1}"}),
        ("clusters", {"cluster": "{name: mine, hosts: 1}"}),
        ("models", {"model": "mine"}),
        ("runtimes", {"runtime": "mine"}),
    ],
    ids=BROKEN,
)
def test_a_broken_entry_stops_the_study_that_names_it(own, meshtune, tmp_path, kind, names):
    """The study that names the entry is told what is wrong with its file."""
    own(f"{kind}/mine.yaml", BROKEN[kind])
    (tmp_path / "study.yaml").write_text(study(**names), encoding="utf-8")

    assert_users_mistake(meshtune("rank", "study.yaml"), f"own/{kind}/mine.yaml: ")


@pytest.mark.parametrize("spelling", ["H100-SXM-80", "h100_sxm_80", "H100", "NVIDIA H100 80GB HBM3"])
def test_a_broken_entry_in_place_of_a_shipped_one_is_not_passed_over(own, meshtune, spelling):
    """No study takes Meshtune's figures where the user states their own, which cannot be read."""
    own("devices/h100-sxm-80.yaml", BROKEN["devices"])

    assert_users_mistake(meshtune("catalog", "devices", spelling), "devices/h100-sxm-80.yaml: memory_gib = 'eighty'")
    assert meshtune("catalog", "devices", "H200").status == 0


@pytest.mark.parametrize(("kind", "key"), [("devices", "device"), ("clusters", "name")])
def test_a_name_that_a_broken_file_may_state_names_the_file(own, meshtune, tmp_path, kind, key):
    """A name that nothing else has may be an alias in the file that could not be read."""
    own(f"{kind}/mine.yaml", BROKEN[kind])
    (tmp_path / "study.yaml").write_text(study(cluster=f"{{{key}: our-x9, hosts: 1}}"), encoding="utf-8")

    told = f"own/{kind}/mine.yaml could not be read ("
    assert_users_mistake(meshtune("rank", "study.yaml"), f"{key} = 'our-x9'", told)
    assert_users_mistake(meshtune("catalog", kind, "our-x9"), "NAME = 'our-x9'", told)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("device/mine.yaml", "device is not read: did you mean 'devices'?"),
        ("Models/mine.yaml", "Models is not read: did you mean 'models'?"),
        ("mine.yaml", "mine.yaml is not read: entries stand in devices, clusters, models, runtimes"),
        ("devices/mine.json", "mine.json is not read: a file of devices ends in .yaml or .yml, such as mine.yaml"),
        ("models/mine.txt", "mine.txt is not read: a file of models ends in .yaml or .yml or .json, such as mine.yaml"),
        ("clusters/mine", "clusters/mine is not read: a file of clusters ends in .yaml or .yml, such as mine.yaml"),
    ],
)
def test_what_is_not_read_is_told_with_the_right_name(own, meshtune, tmp_path, name, told):
    """A file that no entry is read from is named, by `catalog` and beside a study."""
    own(name, "description: mine\n")
    (tmp_path / "study.yaml").write_text(study(), encoding="utf-8")

    assert any(told in note for note in meshtune("catalog", "devices", "H100", "--json").json["unread"])
    for words in (("catalog", "models"), ("rank", "study.yaml")):
        assert told in meshtune(*words).err


@pytest.mark.parametrize("ending", ["yml", "YAML", "YML"])
def test_endings_are_read_in_every_spelling(own, meshtune, ending):
    """`.yml` and `.YAML` are `.yaml`, and `.JSON` is `.json`."""
    own(f"devices/mine.{ending}", meshtune("catalog", "devices", "H100").out)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    own("models/ours.JSON", json.dumps({**config, "intermediate_size": 128, "vocab_size": 256}))

    assert meshtune("catalog", "devices", "mine", "--json").json["entries"][0]["origin"] == "yours"
    listed = meshtune("catalog", "models", "ours", "--json")
    assert listed.json["entries"][0]["entry"]["hidden_size"] == 64
    assert listed.json["unread"] == []


def test_copies_of_editors_and_notes_are_not_told(own, meshtune):
    """What stands beside entries on purpose is no mistake."""
    for name in ("devices/mine.yaml~", "devices/mine.yaml.bak", "README.md", ".gitignore"):
        own(name, "text")

    assert meshtune("catalog", "devices", "--json").json["unread"] == []


@pytest.mark.parametrize(
    ("stated", "instead", "told"),
    [
        ("value: 79.11", "value: 1e-30", "memory_gib.value = 1e-30: must be greater than"),
        ("value: 3350", "value: 1e90", "memory_bandwidth_gb_per_s.value = 1e+90: must be less than"),
        ("value: 132", "value: 0.2", "num_sms.value = 0.2: must be a whole number"),
        ("value: 8", "value: 8.7", "devices_per_host.value = 8.7: must be a whole number"),
        ("kind: nvlink4", "kind: nvlnk4", "scale_up.kind = 'nvlnk4': is almost a kind of link that is known"),
        ("num_sms:", "hosts_per_domain: {value: 3, source: datasheet, confidence: low}\nnum_sms:", "must divide"),
        ("num_sms:", "power_w: 700\nnum_sms:", "appears twice"),
        ("power_w:", "power_w: 700\nother:", "unknown key"),
        ("aliases:", "aliases: 3\nnote:", "aliases = 3: must be a list"),
    ],
    ids=lambda value: value.partition("\n")[0] if isinstance(value, str) else "",
)
def test_numbers_of_an_own_device_are_those_of_a_device(own, meshtune, stated, instead, told):
    """What no device can have is refused by the catalog, before a study reckons with it."""
    text = meshtune("catalog", "devices", "H100-SXM-80").out
    assert stated in text
    own("devices/mine.yaml", text.replace(f"{stated}\n", f"{instead}\n"))

    assert_users_mistake(meshtune("catalog", "devices", "mine"), "mine.yaml", told)


def test_a_bare_number_is_answered_with_its_form(own, meshtune):
    """A number without its source is told how numbers of the catalog stand."""
    own("clusters/mine.yaml", OWN_CLUSTER + "devices_per_host: 4\n")

    told = "must be a mapping; for example {value: 4, source: NAME, confidence: assumed}"
    assert_users_mistake(meshtune("catalog", "clusters", "mine"), "mine.yaml: devices_per_host = 4", told)


@pytest.mark.parametrize("name", ["devices/mine.yaml", "models/mine.yaml", "runtimes/mine.yaml"])
def test_what_is_looked_for_is_found_while_its_copy_is_empty(own, meshtune, name):
    """A shell makes an empty file in `meshtune catalog KIND NAME > file` first, which is no entry yet."""
    kind = name.partition("/")[0]
    own(name, "")

    done = meshtune("catalog", kind, {"devices": "H100", "models": "llama3-8b", "runtimes": "nanotron"}[kind])

    assert done.status == 0, done.err
    own(name, done.out)
    assert "(yours)" in meshtune("catalog", kind, "mine").out


def test_an_empty_file_is_told_but_where_the_command_fills_it(own, meshtune):
    """What a failed `>` has left behind is named; the file that the output goes to is not."""
    path = own("devices/mine.yaml", "")

    assert f"{path} is not read: it is empty" in meshtune("catalog", "devices").err
    with path.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "tuner", "catalog", "devices", "H100"]
        done = subprocess.run(command, check=True, stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert "memory_gib" in path.read_text(encoding="utf-8")


def test_a_link_to_nothing_is_called_so(own, meshtune):
    """The nearest name of a link whose file is gone is not its own."""
    path = own("models/mine.yaml", "")
    path.unlink()
    path.symlink_to("gone.yaml")

    assert_users_mistake(meshtune("catalog", "models", "mine"), "mine.yaml: is a link to no file")


def test_a_mistake_in_a_file_is_no_unknown_name(own, meshtune):
    """A name that is looked for beside a broken file is not called unknown."""
    path = own("devices/mine.yaml", "memory_gib: eighty\n")
    path.write_bytes(b"note: \xff\n")

    assert_users_mistake(meshtune("catalog", "devices", "mine"), "mine.yaml: is not UTF-8 text")


def test_hidden_files_are_no_entries(own, meshtune):
    """Locks of editors and what macOS keeps beside files are not read."""
    own("devices/._mine.yaml", "Mac OS X\0")
    (own("devices/.keep", "").parent / ".#mine.yaml").symlink_to("someone@somewhere.1")

    assert meshtune("catalog", "devices", "H100").status == 0


def test_a_folder_that_is_named_exists(meshtune, tmp_path, monkeypatch):
    """A wrong path is not an empty catalog, with which a study would take Meshtune's entries in place of one's own."""
    monkeypatch.setenv("MESHTUNE_CATALOG", str(tmp_path / "nowhere"))
    (tmp_path / "study.yaml").write_text(study(), encoding="utf-8")

    for words in (("catalog", "devices", "H100"), ("rank", "study.yaml")):
        assert_users_mistake(meshtune(*words), f"MESHTUNE_CATALOG={tmp_path}/nowhere: is no folder")


def test_two_spellings_of_one_name_are_refused(own, meshtune):
    """Two devices whose names differ in case or dashes cannot be told apart."""
    text = meshtune("catalog", "devices", "H100").out
    own("devices/h100_capped.yaml", text)
    own("devices/H100-capped.yaml", text)

    told = "h100_capped.yaml: has the name of H100-capped.yaml; keep one"
    assert_users_mistake(meshtune("catalog", "devices", "h100-capped"), told)
    assert told in meshtune("catalog", "devices", "H100").err


def test_a_copy_takes_no_spelling_from_what_it_was_copied_of(own, meshtune):
    """Names with the size of the memory in another place mean Meshtune's device, though the copy's size is nearer."""
    own("devices/capped.yaml", meshtune("catalog", "devices", "H100").out.replace("value: 79.11", "value: 80.0"))

    done = meshtune("catalog", "devices", "H100-80G-SXM", "--json")

    assert [entry["name"] for entry in done.json["entries"]] == ["H100-SXM-80"]


def test_what_is_shared_names_no_device_of_ones_own(own, meshtune, tmp_path):
    """`share` leaves out runs on devices that only the user's catalog has, and says how many."""
    own("devices/secret-x9.yaml", meshtune("catalog", "devices", "H100-SXM-80").out)
    (tmp_path / "runs.csv").write_text(rows({"device": "secret-x9"}, {}), encoding="utf-8")

    done = meshtune("share", "runs.csv", "--out", "shared.csv", "--json")

    assert done.status == 0, done.err
    assert done.json["skipped"] == {"rows of devices that stand in no catalog but your own": 1}
    assert done.json["rows"] == 1
    assert "secret" not in (tmp_path / "shared.csv").read_text(encoding="utf-8")


def test_two_files_of_one_name_are_refused(own, meshtune):
    """A model cannot be stated twice."""
    own("models/mine.yaml", "{}")
    own("models/mine.json", "{}")

    assert_users_mistake(meshtune("catalog", "models", "mine"), "has the name of mine.json; keep one")
    assert meshtune("catalog", "models", "llama3-8b").status == 0


def test_own_profiles_are_no_hypotheses_of_other_studies(own):
    """The profiles that a cluster may resemble are the shipped ones, whatever the user's catalog holds."""
    own("runtimes/ours.yaml", "{}")
    user_files.cache_clear()
    try:
        known, comparable = runtime_names(), comparable_names()
    finally:
        user_files.cache_clear()

    assert "ours" in known
    assert "ours" not in comparable


def test_the_folder_is_that_of_the_platform(tmp_path):
    """The configuration folder of the platform holds the catalog, unless a variable says otherwise."""
    assert user_catalog({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "meshtune"
    assert user_catalog({"MESHTUNE_CATALOG": str(tmp_path)}) == tmp_path
    assert user_catalog({"MESHTUNE_CATALOG": "off"}) is None
    assert user_catalog({}) in (Path.home() / ".config/meshtune", Path.home() / "Library/Application Support/meshtune")
