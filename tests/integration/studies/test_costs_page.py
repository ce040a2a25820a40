"""Page of `meshtune rank --tokens` as a browser draws it."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.browser import rendered_dom
from tuner.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_draws_every_cluster(tmp_path, monkeypatch, capsys):
    """Chromium draws a point for each size, the front and the limits, under a legend that names each cluster once."""
    out = tmp_path / "costs.html"
    study, prices = ROOT / "configs/studies/llama3-8b-dgx-h100.yaml", ROOT / "configs/prices/aws-2026-08-26.yaml"
    options = "--tokens 1e12 --clusters dgx-h100,dgx-a100,gb200 --hosts 4..16 --max-days 30 --max-cost 500000"
    words = ["rank", study, "--prices", prices, *options.split(), "--out", out]
    monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err

    page = rendered_dom(out.as_uri())

    legend = re.search(r'<div class="legend">(.*?)</div>', page, re.DOTALL)[1]
    for name in ("dgx-h100", "dgx-a100", "GB200", "front", "limits"):
        assert legend.count(f"</i>{name}</span>") == 1
    assert len(re.findall(r'<path class="point"', page)) == 9
    assert "time of the training [days]" in page
    assert "cost [USD]" in page
