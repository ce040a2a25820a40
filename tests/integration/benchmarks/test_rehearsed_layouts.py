"""Judge of the rules by rehearsals: layouts of Megatron-LM, each asked once."""

from __future__ import annotations

import json

import pytest

from benchmarks.judges.rehearsed_layouts import main
from tests.support.rehearsal.megatron_study import needs_megatron

pytestmark = [pytest.mark.slow, needs_megatron()]


def test_layouts_are_asked_once(tmp_path, capsys):
    """The rules agree with the framework on six layouts, and a longer run goes on after what a shorter one was told."""
    file = tmp_path / "answers.jsonl"

    def counted(layouts):
        assert main(["--count", str(layouts), "--answers", str(file), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert not found["disagree"]
        assert sum(found["counts"].values()) == layouts
        return file.read_text().splitlines()

    first = counted(2)
    longer = counted(6)

    assert (len(first), len(longer)) == (4, 12)
    assert longer[:4] == first
    assert {told["verdict"] for line in longer for told in json.loads(line).values()} == {"accepted", "refused"}
