"""Pages of the atlas as a browser shows them."""

import re
import sys

import pytest

from tests.support.browser import rendered_dom
from tuner.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small atlas."""
    out = tmp_path_factory.mktemp("atlas") / "site"
    words = "atlas --models llama3-8b,llama3-70b --clusters dgx-h100,dgx-a100 --devices 8,64 --processes 1 --out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["meshtune", *words.split(), str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    return out


def rows_of(dom):
    """Cells of each row of the table of places."""
    body = re.search(r'<tbody id="rows">(.*?)</tbody>', dom, re.DOTALL)[1]
    return [re.sub(r"<[^>]+>", "|", row).strip("|").split("||") for row in body.split("</tr>") if row]


def test_filters_and_order_come_from_the_address(site):
    """A permalink shows the model and the size that it names, the fastest first, and says how many there are."""
    address = (site / "index.html").as_uri()

    everything = rendered_dom(address)
    some = rendered_dom(f"{address}#model=llama3-8b&devices=64&order=step")

    assert len(rows_of(everything)) == 8
    assert "8 places" in everything
    assert [row[:2] for row in rows_of(some)] == [["llama3-8b", "dgx-h100"], ["llama3-8b", "dgx-a100"]]
    assert 'aria-sort="ascending"' in some
    assert [row[:2] for row in rows_of(rendered_dom(f"{address}#model=llama3-8b&devices=64&order=-step"))] == [
        ["llama3-8b", "dgx-a100"],
        ["llama3-8b", "dgx-h100"],
    ]


def test_a_permalink_opens_its_place(site):
    """The place that the address names is open, and no other."""
    dom = rendered_dom(f"{(site / 'models' / 'llama3-8b.html').as_uri()}#dgx-a100-64")

    assert re.findall(r'<details id="([^"]+)" open', dom) == ["dgx-a100-64"]
