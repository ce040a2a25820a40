"""The atlas: what it answers and writes, and that `meshtune rank` says the same of the study files it hands over."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from costmodels.job.model_catalog import model_names
from docs.site.json_keys import JSON_KEYS
from hardware.cluster_file import cluster_names
from hardware.device import find_device
from hardware.device_figures import figures_of
from hardware.io.config_file import parse_yaml
from tests.support.studies.command_line import in_process
from tuner.atlas.accuracy import read_accuracy
from tuner.atlas.answers import LIKELY, NUM_LAYOUTS, answer, recommended_first
from tuner.atlas.measured_points import measured_by_model
from tuner.atlas.page_names import page_name
from tuner.atlas.pages.device_page import device_page
from tuner.atlas.pages.frame import anchor
from tuner.atlas.places import AtlasJob, named_clusters, named_models, places
from tuner.atlas.site import write_site
from tuner.catalog.listing import LISTINGS
from tuner.study_file.config import load_study

JOB = AtlasJob(sequence_length=4096, global_batch_size=64, tokens=1e11)
SMALL = ("--models", "llama3-8b", "--clusters", "dgx-h100,gb200-nvl72", "--devices", "8,64", "--processes", "1")
RUNS = Path(__file__).resolve().parents[4] / "configs" / "measured" / "runs"


def place_of(model, cluster, devices):
    """The place of one model on one size of one cluster."""
    return next(iter(places([model], [cluster], [devices])))


class Links(HTMLParser):
    """Addresses that a page leads to, what it loads, and the names in it that addresses may end with."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.names = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Note one element."""
        given = dict(attrs)
        self.names.add(given.get("id"))
        if tag == "a":
            self.links.append(given["href"])
        self.loads += [given[key] for key in ("src", "href") if key in given and tag in ("script", "link", "img")]


def test_every_place_has_a_study_that_loads(tmp_path):
    """The study file of every cluster is valid, and means the devices of its place."""
    for place in places(["llama3-8b"], named_clusters(None), [64]):
        path = tmp_path / f"{place.name}.yaml"
        path.write_text(place.study_text(JOB), encoding="utf-8")

        assert load_study(path).problem.cluster.num_devices == place.devices


@pytest.mark.parametrize(
    ("model", "cluster"),
    [("our 12b", "our, {pod}"), ("null", "true"), ("1e3", "012"), ("-x", "#"), ("_: y", "\u00fcs")],
)
def test_a_study_names_ones_own_entries_whatever_they_are_called(model, cluster):
    """Names that YAML reads as something else are quoted, and a study has a name that studies may have."""
    place = replace(place_of("llama3-8b", "dgx-h100", 8), model=model, cluster=cluster)

    read = parse_yaml(place.study_text(JOB))

    assert (read["model"], read["cluster"]["name"]) == (model, cluster)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", read["name"])
    assert re.fullmatch(r"[\w.-]+", anchor(place))


def test_every_figure_of_a_device_has_its_source():
    """Peaks, memory and both links say where they are from."""
    rows = re.findall(r"<tr><td.*?</tr>", device_page("H100-SXM-80", [], JOB))

    assert len(rows) == 9
    assert "<td>450 GB/s, nvlink4</td>" in "".join(rows)
    assert "<td>989 TFLOP/s</td>" in "".join(rows)
    assert not any(row.endswith("<td></td></tr>") for row in rows)


def test_a_device_has_the_same_figures_in_the_atlas_and_in_the_catalog():
    """What `meshtune catalog` lists of a device, and the device has, is on its page."""
    for name in ("H100-SXM-80", "B200", "MI300X", "TPU-v3"):
        told = {figure.column: figure.value for figure in figures_of(find_device(name))}
        rows = re.findall(r"<tr><td.*?</tr>", device_page(name, [], JOB))
        listed = next(entry.row for entry in LISTINGS["devices"].entries() if entry.file.name == name)

        assert listed == told
        assert len(rows) == sum(value is not None for value in told.values())


@pytest.mark.parametrize("kind", ["models", "devices", "clusters"])
def test_pages_of_shipped_entries_have_their_names(kind):
    """Links to the pages of usual names last, and no file system takes two of them for one."""
    names = [entry.file.name for entry in LISTINGS[kind].entries()]
    pages = [page_name(kind, name) for name in names]

    assert len({page.casefold() for page in pages}) == len(names)
    assert all(page == re.sub(r"[ ()]", "-", name) for page, name in zip(pages, names, strict=True))


def test_models_of_almost_one_name_have_a_page_each(monkeypatch, tmp_path):
    """Names that differ in case, spaces or dashes lead to distinct pages and studies; the shipped one keeps its own."""
    (tmp_path / "own" / "models").mkdir(parents=True)
    monkeypatch.setenv("MESHTUNE_CATALOG", str(tmp_path / "own"))
    text = in_process("catalog", "models", "llama3-8b", cwd=tmp_path).out
    names = ["Llama3-8B", "llama3 8b", "our 8b", "our-8b", "our--8b", "ours"]
    for name in names:
        (tmp_path / "own" / "models" / f"{name}.yaml").write_text(text, encoding="utf-8")
    ask = ("--clusters", "dgx-h100", "--devices", "8", "--processes", "1", "--json")
    done = in_process(
        "atlas", "--models", ",".join([*names, "llama3-8b"]), "--out", tmp_path / "site", *ask, cwd=tmp_path
    )
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "site/models").glob("*.html")}

    assert done.status == 0, done.err
    assert len(pages) == len({name.casefold() for name in pages}) == 7
    assert {"llama3-8b.html", "ours.html"} <= set(pages)
    assert sorted(re.search(r"<h1>(.*?)</h1>", page)[1] for page in pages.values()) == sorted([*names, "llama3-8b"])
    assert len({re.search(r"name: (\S+)", page)[1] for page in pages.values()}) == 7


def test_clusters_are_all_of_the_catalog_but_those_to_rehearse_on():
    """Without options there is every model, and every cluster with accelerators."""
    assert named_models(None) == model_names()
    assert set(named_clusters(None)) == set(cluster_names()) - {"cpu-host"}


def test_sizes_that_hosts_do_not_make_up_are_left_out():
    """12 devices are no whole number of hosts of eight."""
    assert [place.devices for place in places(["llama3-8b"], ["dgx-h100"], [4, 8, 12, 16])] == [8, 16]


def test_racks_are_used_by_powers_of_two():
    """A place on an NVL72 rack has hosts of four, of which 16 form a domain, as published runs have."""
    place = place_of("llama3-8b", "gb200-nvl72", 128)

    assert (place.hosts, place.devices_per_host, place.hosts_per_domain) == (32, 4, 16)


@pytest.mark.parametrize(
    ("model", "cluster", "devices"), [("llama3-8b", "dgx-h100", 64), ("mixtral-8x7b", "ascend-910b", 64)]
)
def test_rank_says_the_same_of_the_study_that_is_handed_over(meshtune, tmp_path, model, cluster, devices):
    """Layouts, times, memory, intervals and chances of a place are those of `rank` and `predict` on its study."""
    place = place_of(model, cluster, devices)
    found = answer(place, JOB)
    path = tmp_path / "study.yaml"
    path.write_text(found.study, encoding="utf-8")
    options = ("--storage", f"sqlite:///{tmp_path}/none.db", "--json")

    rows = meshtune("rank", path, "--top", 50, *options).json["configs"]
    by_values = {tuple(row[name] for name in found.layouts[0].values): row for row in rows}
    best = found.layouts[0]
    config = ",".join(f"{name}={value}" for name, value in best.values.items() if value != "" and name != "assignment")
    if best.values.get("assignment"):
        config += f",{best.values['assignment']}"
    told = meshtune("predict", path, "--config", config, *options).json

    assert len(found.layouts) == NUM_LAYOUTS
    for layout in found.layouts:
        row = by_values[tuple(layout.values.values())]
        assert layout.step_time_s == pytest.approx(row["step_time_s"])
        assert layout.peak_memory_bytes == row["peak_memory_bytes"]
    assert best.step_time_range_s == pytest.approx(told["step_time_range_s"])
    assert best.peak_memory_range_bytes == pytest.approx(told["peak_memory_range_bytes"])
    assert best.fit_probability == pytest.approx(told["fit_probability"])
    assert best.mfu == pytest.approx(told["mfu"])
    assert best.shares == by_values[tuple(best.values.values())]["shares"]
    assert sum(best.shares.values()) == pytest.approx(1)


def test_the_recommended_layout_is_likely_to_fit():
    """It is the fastest of those that probably fit; without any the likeliest. The others keep their order."""
    assert recommended_first(np.array([0.5, 0.79, LIKELY, 0.99])).tolist() == [2, 0, 1, 3]
    assert recommended_first(np.array([0.5, 0.7, 0.6, 0.1])).tolist() == [1, 0, 2, 3]
    assert recommended_first(np.ones(4)).tolist() == [0, 1, 2, 3]


def test_a_place_without_a_layout_says_why():
    """405 billion parameters do not fit on eight devices, which is said with the number of layouts."""
    found = answer(place_of("llama3-405b", "dgx-h100", 8), JOB)

    assert found.layouts == ()
    assert re.fullmatch(r"none of the [\d,]+ configurations that obey every rule fits in memory", found.reason)


def test_runs_of_a_model_are_found_by_its_sizes():
    """Published runs of Llama 3 8B are its points, whatever name their source gives the model; others are not."""
    found = measured_by_model([RUNS / "torchao.csv", RUNS / "vtrain.csv"], model_names())

    assert set(found) == {"llama3-8b"}
    assert {run.model.num_layers for run in found["llama3-8b"]} == {32}
    assert all(run.step_time_s for run in found["llama3-8b"])


@pytest.mark.slow
def test_the_site_is_whole(meshtune, tmp_path):
    """Every link of every page leads to a page and a name that are there, and pages load nothing from elsewhere."""
    out, prices = tmp_path / "site", tmp_path / "prices.yaml"
    prices.write_text(
        "currency: EUR\ndate: '2026-01-01'\nprices: {H100: {per_device_hour: 2, source: a contract}}\n",
        encoding="utf-8",
    )
    done = meshtune(
        "atlas",
        *SMALL,
        "--out",
        out,
        "--prices",
        prices,
        "--measured",
        RUNS / "torchao.csv",
        "--tokens",
        "100B",
        "--json",
    )
    again = meshtune("atlas", *SMALL, "--out", out, "--json")
    pages = {path.relative_to(out): Links(path.read_text(encoding="utf-8")) for path in out.rglob("*.html")}

    assert done.status == again.status == 0
    assert set(done.json) == set(JSON_KEYS["atlas"][""])
    assert (done.json["places"], done.json["with_layout"], done.json["pages"]) == (4, 4, len(pages))
    assert done.json["bytes"] < 200_000
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            target, _, name = link.partition("#")
            place = (out / path.parent / target).resolve().relative_to(out) if target else path
            assert (out / place).is_file()
            assert not name or name in pages[place].names


@pytest.mark.slow
def test_pages_tell_layouts_costs_and_points(meshtune, tmp_path):
    """A model's page has the layout, its interval, its cost where there is a price, the points, and what to copy."""
    out, prices = tmp_path / "site", tmp_path / "prices.yaml"
    prices.write_text(
        "currency: EUR\ndate: '2026-01-01'\nprices: {H100: {per_device_hour: 2, source: a contract}}\n",
        encoding="utf-8",
    )
    meshtune("atlas", *SMALL, "--out", out, "--prices", prices, "--measured", RUNS / "torchao.csv", "--tokens", "100B")
    text = (out / "models" / "llama3-8b.html").read_text(encoding="utf-8")
    rows = json.loads((out / "places.js").read_text(encoding="utf-8").partition("= ")[2].rstrip(";\n"))
    found = answer(
        place_of("llama3-8b", "dgx-h100", 64), AtlasJob(sequence_length=4096, global_batch_size=1024, tokens=1e11)
    )
    days = 1e11 / (4096 * 1024) * found.layouts[0].step_time_s / 86400

    part = text[text.index('id="dgx-h100-64"') :].partition("</details>")[0]
    assert f"{found.layouts[0].step_time_s:.3g} s" in part
    assert f"cost {days * 24 * 64 * 2:,.0f} EUR" in part
    assert "name: llama3-8b-dgx-h100-64" in part
    assert "EUR" not in text[text.index('id="gb200-nvl72-64"') :].partition("</details>")[0]
    assert text.count("<circle") >= 2
    assert [row["order"][-1] is None for row in rows] == [False, False, True, True]


def test_pages_of_an_earlier_atlas_go(tmp_path):
    """Of an atlas with fewer models no page of the earlier one is left, and what is not a page of it stays."""
    frame = {"index.html": "", "atlas.css": ""}
    write_site(frame | {"models/old.html": "", "devices/H100.html": ""}, tmp_path)
    (tmp_path / "models" / "notes.txt").write_text("mine", encoding="utf-8")

    write_site(frame | {"models/new.html": ""}, tmp_path)

    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"index.html", "atlas.css", "models/new.html", "models/notes.txt"}


def test_folders_of_others_are_left_alone(meshtune, tmp_path):
    """A folder that holds anything but an atlas is refused, and nothing in it changes."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "index.html").write_text("mine", encoding="utf-8")

    done = meshtune("atlas", *SMALL, "--out", tmp_path / "thesis")

    assert done.status == 2
    assert "holds something else than an atlas" in done.err
    assert (tmp_path / "thesis" / "index.html").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--models", "lama3-8b"), "--models = 'lama3-8b': is not in the catalog; did you mean llama3-8b"),
        (("--clusters", "dgx-h100,dgx-h100"), "--clusters = 'dgx-h100,dgx-h100': must list each once"),
        (
            ("--clusters", "dgx-h100", "--devices", "12"),
            "--devices = '12': are whole hosts of none of the clusters; hosts have 8 devices",
        ),
        (("--devices", "0"), "--devices = '0': must be a whole number of at least 1"),
        (("--devices", "99999999"), "--devices = 99999999: must be numbers of devices up to 1,000,000"),
        (("--tokens", "many"), "--tokens = 'many': must be a number of tokens"),
    ],
)
def test_mistakes_are_told_in_one_message(meshtune, tmp_path, words, told):
    """A wrong option is told with its value and the nearest choice, before anything is predicted."""
    done = meshtune("atlas", "--out", tmp_path / "site", *words)

    assert done.status == 2
    assert told.split("; did")[0] in done.err
    assert len(done.err.splitlines()) <= 2
    assert not (tmp_path / "site").exists()


def test_the_catalog_tells_the_errors_of_each_source():
    """Accuracy by source is that of runs which no fit has seen."""
    found = read_accuracy()

    assert len(found.sources) > 20
    assert {each.tuned_by for each in found.sources} == {"vendor", "user"}
    assert all(0 <= each.step_error < 1 for each in found.sources if each.runs)
    assert "benchmarks.strangers" in found.made_with
