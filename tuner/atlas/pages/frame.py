"""Frame of every page of the atlas: head, navigation, footer, and the links between pages.

Pages load the style sheet and scripts beside them and nothing else, so that they open from a folder without a server.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.atlas.page_names import page_name
from tuner.atlas.places import AtlasJob, Place
from tuner.atlas.words import tokens_in_words
from tuner.report.markup import Content, Html, concatenate, tag

STYLE_FILE, FILTER_FILE, DATA_FILE, PLACE_FILE = "atlas.css", "filter.js", "places.js", "place.js"
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; base-uri 'none'"
"""Content-Security-Policy: pages load what lies beside them, and send nothing."""


def page(title: str, *contents: Content, root: str, job: AtlasJob, scripts: Sequence[str] = ()) -> str:
    """Render one page.

    Args:
        title: Title.
        contents: Contents below the title.
        root: Path from the page to the folder of the site: empty, or `../`.
        job: Job of the atlas.
        scripts: Scripts that the page loads.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{title}: Meshtune atlas"),
        Html(f'<link rel="stylesheet" href="{root}{STYLE_FILE}">'),
    )
    links = (("index.html", "All layouts"), ("accuracy.html", "Accuracy"))
    navigation = tag("nav", *(tag("a", words, href=root + path) for path, words in links), aria_label="Atlas")
    words = (
        f"Every layout is for {job.global_batch_size:,} sequences of {job.sequence_length:,} tokens a step "
        f"({tokens_in_words(job.tokens_per_step)} tokens); days are those of {tokens_in_words(job.tokens)} tokens "
        "without restarts. Times are predicted, with intervals that hold 95 of 100 measured runs; a few trials with "
        "the study file of a place tell what your cluster does."
    )
    body = tag(
        "body",
        tag("header", navigation, tag("h1", title), tag("p", words)),
        tag("main", *contents),
        tag("footer", tag("p", LEGEND)),
        *(tag("script", src=root + name) for name in scripts),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


LEGEND = (
    "pp: pipeline stages; tp: tensor parallel degree; dp: data parallel degree; cp: context parallel degree (rings); "
    "up: context parallel degree (Ulysses); vpp: chunks of a stage; ep: expert parallel degree; mbs: sequences of a "
    "micro-batch; assignment: layers of each stage and chunk. Degrees of 1 are left out."
)
"""What the degrees stand for."""


def model_path(model: str) -> str:
    """Return the path of a model's page in the site."""
    return f"models/{page_name('models', model)}.html"


def device_path(device: str) -> str:
    """Return the path of a device's page in the site."""
    return f"devices/{page_name('devices', device)}.html"


def anchor(place: Place) -> str:
    """Return the name of a place on its model's page, which permalinks end with."""
    return f"{page_name('clusters', place.cluster)}-{place.devices}"


def linked(words: Content, path: str) -> Html:
    """Render a link."""
    return tag("a", words, href=path)


def lines(*texts: Content) -> Html:
    """Render paragraphs."""
    return concatenate(*(tag("p", text) for text in texts if text))
