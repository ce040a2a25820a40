"""HTML that is escaped by construction: only what `tag` made is markup, any other text is data."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


Content = str | int | None
"""What a tag may hold: Html stands as it is, other text is escaped, None is left out."""

_VOID = frozenset({"meta", "br"})


def markup(content: Content) -> Html:
    """The content as HTML."""
    if content is None:
        return Html("")
    return content if isinstance(content, Html) else Html(escape(str(content), quote=True))


def joined(*contents: Content) -> Html:
    """The contents one after the other."""
    return Html("".join(markup(content) for content in contents))


def tag(name: str, /, *contents: Content, **attributes: str) -> Html:
    """One element; `class_` gives the attribute class, and an underscore inside a name stands for a dash."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{joined(*contents)}</{name}>")


def section(identity: str, title: str, *contents: Content) -> Html:
    """One section of the report."""
    return tag("section", tag("h2", title), *contents, id=identity)


def table(head: list[Content], rows: list[list[Content]], *, numeric: frozenset[int] = frozenset()) -> Html:
    """A table that scrolls sideways where the page is narrow; the columns in `numeric` are right-aligned."""

    def cells(kind: str, row: list[Content]) -> Html:
        styled = [
            tag(kind, cell, class_="number") if column in numeric else tag(kind, cell)
            for column, cell in enumerate(row)
        ]
        return tag("tr", *styled)

    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="scroll")
