"""The audit of installed packages, where nobody can be asked."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_an_audit_without_the_service_says_that_nothing_was_audited():
    """Behind a proxy that is not there the status is 2, and the message says so: that is no audit without findings."""
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy"), nowhere)
    environment = {**os.environ, **proxies, "NO_PROXY": "", "no_proxy": "", "PIP_INDEX_URL": f"{nowhere}/simple"}

    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "audit.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("nothing was audited: ")
    assert "were audited" not in done.stdout
