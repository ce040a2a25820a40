"""The documentation as a site, and its links as they are on a code host."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
