"""MkDocs hook that gives every page of the site the same path as in the repository.

Links between pages, and from pages to other files, then work both on a code host and on the site. Linked files that
are not pages, such as programs and CSV files, are added as plain text, which a browser shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "configs/*/README.md")
"""Patterns of the pages outside docs/, relative to the repository's root."""

FIRST_IN_SEARCH = re.compile(r"docs/(questions|glossary|quickstart|how-to/.*)\.md")
"""Pages that answer what newcomers search for."""

LAST_IN_SEARCH = re.compile(r"(docs/(research/.*|decisions|architecture|licences)|CHANGELOG|CONTRIBUTING)\.md")
"""Pages that newcomers do not search for."""

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Return the site's files: pages at their repository paths, the theme's files, and all files that pages link to.

    MkDocs calls this function by its name, after it has collected docs/ and before it renders pages.

    Args:
        files: Files that MkDocs has collected from docs/ and from the theme.
        config: Configuration of the site, as MkDocs has loaded it from mkdocs.yml.
    """
    moved = Files([])
    for file in files:
        if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            moved.append(file)  # belongs to the theme
        elif not file.inclusion.is_excluded():
            moved.append(_repository_file(Path(file.abs_src_path), config))
    for pattern in OTHER_PAGES:
        for path in sorted(ROOT.glob(pattern)):
            moved.append(_repository_file(path, config))
    # The list is built before the loop, because linked files are appended to `moved` inside it.
    for page in [file for file in moved if file.is_documentation_page()]:
        folder = Path(str(page.abs_src_path)).parent
        for link in _LINK.findall(page.content_string):
            target = (folder / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                place = target.relative_to(ROOT).as_posix()
                if place not in moved.src_uris:
                    moved.append(_repository_file(target, config))
    return moved


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Return the text of a page as it is, after it has got its place among the results of a search.

    MkDocs calls this function by its name, and its search plugin multiplies the score of a page by its boost.

    Args:
        markdown: Text of the page.
        page: The page, whose `meta` the search plugin reads.
    """
    if FIRST_IN_SEARCH.fullmatch(page.file.src_uri):
        page.meta["search"] = {"boost": 2}
    elif LAST_IN_SEARCH.fullmatch(page.file.src_uri):
        page.meta["search"] = {"boost": 0.5}
    return markdown


def _repository_file(path: Path, config: Any) -> File:
    """Return the site's entry for a file of the repository, at its path from the repository's root."""
    place = path.relative_to(ROOT).as_posix()
    file = File.generated(config, place, abs_src_path=str(path))
    if path.suffix in {".py", ".sh", ".yaml", ".csv"}:
        file.dest_uri += ".txt"  # browsers show .txt, but download the other types
    return file
