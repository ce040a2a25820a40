"""The documentation as a site, and its links as they are on a code host."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.documented import PAGES, ROOT

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    """Every relative link of a page is the path of a file in the repository."""
    links = LINK.findall(page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).is_file()] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; pages without a place in its navigation, and links or anchors that lead nowhere, fail."""
    pytest.importorskip("material", reason="the site needs mkdocs-material: pip install 'meshtune[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site):
    """Each page has a place of its own, and the front page is the README."""
    for page in PAGES:
        place = page.relative_to(ROOT).with_suffix(".html")
        place = place.with_name("index.html") if place.stem == "README" else place
        assert (site / place).is_file(), place


def test_pages_load_nothing_from_elsewhere(site):
    """No page fetches a script, a style or a picture over the network."""
    fetched = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="https?:|<link[^>]*rel="stylesheet"[^>]*href="https?:""")
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page


def test_pages_of_newcomers_come_first_in_a_search(site):
    """The search weighs questions and instructions more than references, and these more than research."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    weights = {entry["location"]: entry.get("boost", 1) for entry in index["docs"]}

    assert weights["docs/questions.html"] == weights["docs/how-to/failed-trials.html"] > weights["docs/study-file.html"]
    assert weights["docs/study-file.html"] > weights["docs/decisions.html"] == weights["docs/research/toast.html"]


def test_newcomers_meet_few_pages():
    """Outside of reference and research there are at most 20 pages with 40,000 words together."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    groups = {name: pages for group in navigation for name, pages in group.items()}
    pages = [place for name in ("Start", "How to", "Concepts") for entry in groups[name] for place in entry.values()]
    words = sum(len((ROOT / place).read_text(encoding="utf-8").split()) for place in pages)

    assert len(pages) <= 20
    assert words <= 40_000
