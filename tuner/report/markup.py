"""HTML builder that escapes by construction: only results of `tag` are markup, other text is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is already valid HTML."""

    __slots__ = ()


Content = str | int | None
"""Content of a tag: Html is inserted as is, other text is escaped, None is omitted."""

_VOID = frozenset({"meta", "br"})


def markup(content: Content) -> Html:
    """Convert the content to HTML."""
    if content is None:
        return Html("")
    return content if isinstance(content, Html) else Html(escape(str(content), quote=True))


def concatenate(*contents: Content) -> Html:
    """Concatenate the contents."""
    return Html("".join(markup(content) for content in contents))


def tag(name: str, /, *contents: Content, **attributes: str) -> Html:
    """Render one element; `class_` gives the attribute class, and an underscore inside a name becomes a dash."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{concatenate(*contents)}</{name}>")


def section(identity: str, title: str, *contents: Content) -> Html:
    """Render one section of the report."""
    return tag("section", tag("h2", title), *contents, id=identity)


def empty_section(identity: str, title: str, words: str) -> Html:
    """Render a section that has nothing to show yet."""
    return section(identity, title, tag("p", words, class_="empty"))


def table(head: list[Content], rows: list[list[Content]], *, numeric: frozenset[int] = frozenset()) -> Html:
    """Render a table that scrolls sideways on narrow pages; the columns in `numeric` are right-aligned."""

    def cells(kind: str, row: list[Content]) -> Html:
        styled = [
            tag(kind, cell, class_="number") if column in numeric else tag(kind, cell)
            for column, cell in enumerate(row)
        ]
        return tag("tr", *styled)

    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="scroll")
