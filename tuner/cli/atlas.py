"""Command `meshtune atlas`: a static site of recommended layouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from hardware.io.errors import ConfigError
from tuner.cli.costs import parse_tokens
from tuner.cli.options import FOUND_NOTHING, AsJson, whole_number
from tuner.terminal.console import print_json, printable, say, warn


def atlas(
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder of the site.")] = Path("atlas"),
    models: Annotated[str | None, Option(metavar="NAME,...", help="Models; by default all of the catalog.")] = None,
    clusters: Annotated[str | None, Option(metavar="NAME,...", help="Clusters; by default all of the catalog.")] = None,
    devices: Annotated[str, Option(metavar="8,32,...", help="Numbers of devices.")] = "8,32,128,512,2048",
    sequence_length: Annotated[str, Option(metavar="N", help="Tokens of a sequence.")] = "4096",
    global_batch_size: Annotated[str, Option(metavar="N", help="Sequences of a step.")] = "1024",
    tokens: Annotated[str, Option(metavar="N", help="Tokens of a whole training (1e12, 300B, 1T).")] = "1T",
    prices: Annotated[
        Path | None, Option(metavar="FILE", help="Prices of device-hours (YAML), from which costs follow.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        Option(metavar="CSV", help="Measured runs to show beside the predictions; may be given several times."),
    ] = None,
    processes: Annotated[
        str | None, Option(metavar="N", help="Processes that predict at the same time; by default one per core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a static site: the recommended layout of each model on each cluster and size, why, and what to copy.

    Its pages open from the folder, without a server, and load nothing from elsewhere.
    """
    from costmodels.job.model_catalog import read_models
    from hardware.price_file import read_prices
    from tuner.atlas.answers import answer_all
    from tuner.atlas.measured_points import measured_by_model
    from tuner.atlas.places import AtlasJob, devices_of_host, named_clusters, named_models, places
    from tuner.atlas.site import FIRST_PAGE, check_folder, render_site, write_site
    from tuner.catalog.unread import notes_on_unread
    from tuner.terminal.progress import SizesLine

    check_folder(out)
    job = AtlasJob(
        sequence_length=whole_number("--sequence-length", sequence_length, 1),
        global_batch_size=whole_number("--global-batch-size", global_batch_size, 1),
        tokens=parse_tokens(tokens),
    )
    names, sizes = named_models(models), parse_devices(devices)
    broken = read_models()[1] if models is None else ()
    warn([*(f"{each.mistake}" for each in broken), *notes_on_unread()])
    chosen = named_clusters(clusters)
    asked = list(places(names, chosen, sizes))
    if not asked:
        hosts = sorted({devices_of_host(name) for name in chosen})
        rule, nearest = "are whole hosts of none of the clusters", f"hosts have {', '.join(map(str, hosts))} devices"
        raise ConfigError(rule, key="--devices", value=devices, nearest=nearest)
    found_prices = None if prices is None else read_prices(prices)
    points = measured_by_model(measured or [], names)
    count = os.cpu_count() or 1 if processes is None else whole_number("--processes", processes, 1)
    with SizesLine() as line:
        answers = answer_all(asked, job, processes=count, on_answer=line.show)
    files = render_site(answers, job, found_prices, points)
    write_site(files, out)
    told = {
        "places": len(answers),
        "with_layout": sum(1 for each in answers if each.layouts),
        "pages": sum(1 for path in files if path.endswith(".html")),
        "bytes": sum(len(text.encode()) for text in files.values()),
        "written": str(out / FIRST_PAGE),
    }
    if as_json:
        print_json(told)
    else:
        say(f"Places with a layout that fits: {told['with_layout']:,} of {told['places']:,}")
        say(f"Wrote {told['pages']} pages; open {printable(str(told['written']))}.", err=True)
    if not told["with_layout"]:
        raise typer.Exit(FOUND_NOTHING)


def parse_devices(text: str) -> tuple[int, ...]:
    """Return the numbers of devices that `--devices 8,32` lists, ascending.

    Raises:
        ConfigError: An entry is no possible number of devices.
    """
    from hardware.cluster_file import MAX_DEVICES

    sizes = sorted({whole_number("--devices", entry.strip(), 1) for entry in text.split(",")})
    if sizes[-1] > MAX_DEVICES:
        raise ConfigError(f"must be numbers of devices up to {MAX_DEVICES:,}", key="--devices", value=sizes[-1])
    return tuple(sizes)
