"""Write the generated parts of the reference pages and the schema of study files: `python -m docs.site`."""

from __future__ import annotations

from docs.site.pages import PAGES, schema_text, written
from tuner.study_file.schema_file import SCHEMA

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
