"""Ask pypi.org's advisories for known weaknesses of the installed packages, and say plainly if nobody could be asked.

Exit status 0: none is known. 1: some are, and are printed. 2: nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
WEAK, NOT_AUDITED = 1, 2
LIMIT_S = 600.0


def main() -> int:
    """Audit what is installed beside this interpreter; return the exit status."""
    if find_spec("pip_audit") is None:
        constraints = str(ROOT / "constraints.txt")
        done = _run("-m", "pip", "install", "--quiet", "--retries", "1", "-c", constraints, "pip-audit")
        if done.returncode:
            return _tell_nothing(f"pip-audit cannot be installed ({_last_line(done.stderr)})")
    with TemporaryDirectory() as folder:
        listed = Path(folder) / "installed.txt"
        frozen = _run("-m", "pip", "freeze", "--exclude-editable").stdout.splitlines()
        names = [line.partition("+")[0] for line in frozen if "==" in line]
        listed.write_text("\n".join(names) + "\n", encoding="utf-8")
        # strict: a package that could not be asked about is a failure, and not one without weaknesses
        options = ("--strict", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")
        done = _run("-m", "pip_audit", *options, "-r", str(listed))
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return _tell_nothing(_last_line(done.stderr))
    weak = [package for package in found if package.get("vulns")]
    for package in weak:
        for weakness in package["vulns"]:
            fixed = ", ".join(weakness.get("fix_versions", ())) or "no version"
            _say(f"{package['name']} {package['version']}: {weakness['id']}, fixed in {fixed}")
    _say(f"{len(found)} packages were audited; {len(weak)} have known weaknesses")
    return WEAK if weak else 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)  # noqa: S603 # our own


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _tell_nothing(reason: str) -> int:
    sys.stderr.write(f"nothing was audited: {reason}\n")
    return NOT_AUDITED


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "no reason was given")


if __name__ == "__main__":
    sys.exit(main())
