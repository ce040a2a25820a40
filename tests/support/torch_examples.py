"""Runner of the documentation's torch programs on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.documented import ROOT


def run_example(heading: str, file: Path) -> str:
    """Run the first Python block below a heading of docs/plans-in-your-code.md on two ranks, and return its stderr."""
    text = (ROOT / "docs" / "plans-in-your-code.md").read_text(encoding="utf-8")
    example = text[text.index(heading) :].partition("```python\n")[2].partition("```")[0]
    file.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file.name],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
