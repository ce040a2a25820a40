"""What the site's builder does beside its own: pages keep the places that they have in the repository.

So links between pages, and from pages to other files, are the same on a code host and on the site. Files that are no
pages become texts that a browser shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "configs/*/README.md")
"""Pages that do not lie in docs/."""

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Moves docs/ to where it is in the repository, and adds the other pages and what pages link to."""
    moved = Files([])
    for file in files:
        if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            moved.append(file)  # the theme's
        elif not file.inclusion.is_excluded():
            moved.append(_repository_file(Path(file.abs_src_path), config))
    for pattern in OTHER_PAGES:
        for path in sorted(ROOT.glob(pattern)):
            moved.append(_repository_file(path, config))
    for page in [file for file in moved if file.is_documentation_page()]:
        folder = Path(str(page.abs_src_path)).parent
        for link in _LINK.findall(page.content_string):
            target = (folder / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                place = target.relative_to(ROOT).as_posix()
                if place not in moved.src_uris:
                    moved.append(_repository_file(target, config))
    return moved


def _repository_file(path: Path, config: Any) -> File:
    place = path.relative_to(ROOT).as_posix()
    file = File.generated(config, place, abs_src_path=str(path))
    if path.suffix in {".py", ".sh", ".yaml", ".csv"}:
        file.dest_uri += ".txt"  # which every browser shows
    return file
