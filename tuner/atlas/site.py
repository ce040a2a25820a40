"""The atlas as files: pages of models and devices, the first page with its filters, accuracy, style and scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from costmodels.calibration.measured_runs import MeasuredRun
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from hardware.io.output_file import write_output
from hardware.price_file import Prices
from tuner.atlas.accuracy import read_accuracy
from tuner.atlas.answers import Answer
from tuner.atlas.assets import ATLAS_STYLE, FILTER_SCRIPT, PLACE_SCRIPT
from tuner.atlas.pages.accuracy_page import accuracy_page
from tuner.atlas.pages.device_page import device_page
from tuner.atlas.pages.frame import DATA_FILE, FILTER_FILE, PLACE_FILE, STYLE_FILE, device_path, model_path
from tuner.atlas.pages.index_page import data_script, index_page
from tuner.atlas.pages.model_page import model_page
from tuner.atlas.places import AtlasJob

FIRST_PAGE = "index.html"


def render_site(
    answers: Sequence[Answer], job: AtlasJob, prices: Prices | None, measured: Mapping[str, Sequence[MeasuredRun]]
) -> dict[str, str]:
    """Render all files by their path in the site; equal answers give equal texts.

    Args:
        answers: Answers of all places.
        job: Job of the atlas.
        prices: Prices of device-hours; None leaves costs out.
        measured: Measured runs by model.
    """
    by_model: dict[str, list[Answer]] = defaultdict(list)
    by_device: dict[str, list[Answer]] = defaultdict(list)
    for each in answers:
        by_model[each.place.model].append(each)
        by_device[find_cluster(each.place.cluster).devices[0].name].append(each)
    return {
        FIRST_PAGE: index_page(answers, job, prices),
        "accuracy.html": accuracy_page(read_accuracy(), job),
        STYLE_FILE: ATLAS_STYLE,
        FILTER_FILE: FILTER_SCRIPT,
        PLACE_FILE: PLACE_SCRIPT,
        DATA_FILE: data_script(answers, job, prices),
        **{
            model_path(name): model_page(name, own, job, prices, measured.get(name, ()))
            for name, own in by_model.items()
        },
        **{device_path(name): device_page(name, own, job) for name, own in by_device.items()},
    }


def check_folder(out: Path) -> None:
    """Check that a site can be written into a folder: a new one, an empty one, or one that holds an atlas.

    Raises:
        ConfigError: The folder holds something else, or cannot be made.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / STYLE_FILE).is_file():
        raise ConfigError(
            "is a folder that holds something else than an atlas", key="--out", value=str(out), nearest="name a new one"
        )
    if out.exists() and not out.is_dir():
        raise ConfigError("is a file, not a folder", key="--out", value=str(out), nearest="name a new folder")
    if not out.parent.is_dir():
        raise ConfigError("is in a directory that does not exist", key="--out", value=str(out))


def write_site(files: Mapping[str, str], out: Path) -> None:
    """Write the files of a site in place of those of an earlier one.

    The first page comes last, so that it is never there without the others; pages that an earlier one had alone go.

    Raises:
        ConfigError: A file cannot be written.
    """
    for path, text in sorted(files.items(), key=lambda each: each[0] == FIRST_PAGE):
        place = out / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot be made ({error.strerror})", key="--out", value=str(place.parent)) from None
        write_output(place, text)
    for page in (*out.glob("models/*.html"), *out.glob("devices/*.html")):
        if page.relative_to(out).as_posix() not in files:
            page.unlink(missing_ok=True)
