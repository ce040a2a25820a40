"""JSON schema of study files, for editors: `python -m docs.site` writes it, and the package brings it along."""

from __future__ import annotations

from pathlib import Path

SCHEMA = Path(__file__).with_name("study.schema.json")


def with_schema(text: str) -> str:
    """Return the text of a study file behind a comment that names its schema to editors with a YAML language server.

    It is the file of this installation, so that no network is needed. Where it is missing, editors check nothing.
    """
    return f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n{text}"
