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


def title_after(page, address, program):
    """Return the title of a page that a program has set to what it found, after the page's own scripts."""
    page.with_name("probe.js").write_text(f"document.title = (() => {{ {program} }})();", encoding="utf-8")
    probe = page.with_name("probe.html")
    text = page.read_text(encoding="utf-8")
    probe.write_text(text.replace("</body>", '<script src="probe.js"></script></body>'), encoding="utf-8")
    return re.search("<title>(.*?)</title>", rendered_dom(f"{probe.as_uri()}{address}"))[1]


def test_an_address_of_another_atlas_filters_nothing(site):
    """A model that this atlas has not leaves its filter at all, and not empty."""
    program = 'return [...document.querySelectorAll("select")].map(each => each.selectedIndex).join();'

    assert title_after(site / "index.html", "#model=gone&devices=64", program) == "0,0,0,2"


def test_a_link_that_takes_the_focus_is_in_view(site):
    """On a narrow screen the table scrolls to the link that the keyboard has reached."""
    program = """
      const scroll = document.querySelector(".scroll"), link = document.querySelector("#rows a");
      scroll.style.width = "330px";
      scroll.scrollLeft = link.getBoundingClientRect().right - scroll.getBoundingClientRect().left - 6;
      link.focus();
      return link.getBoundingClientRect().left > scroll.getBoundingClientRect().left - 1;
    """

    assert title_after(site / "index.html", "", program) == "true"


def test_an_odd_address_stops_no_script(site):
    """A lone percent sign opens no place, and the places still write the address."""
    program = """
      const place = document.querySelector("details");
      place.open = true;
      place.addEventListener("toggle", () => { document.title = decodeURIComponent(location.hash); });
      return "nothing";
    """

    assert title_after(site / "models" / "llama3-8b.html", "#%", program) == "#dgx-h100-8"
