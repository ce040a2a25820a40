"""Read traces: CSV files that tell how a cluster changes over time.

The header is `time_s,link,share`, and rows ascend in time; blank lines and lines that begin with `#` are passed over.
Hosts are h0, h1, ... in rank order.

| link | share | from `time_s` on |
|---|---|---|
| `intra` | 0.8 | all links inside hosts and domains have 0.8 of their nominal bandwidth |
| `inter` | 0.5 | all NICs, and all links between groups of hosts, have half of it |
| `infiniband` | 0.5 | all links of this kind; the cluster says which kinds it has |
| `h3` | 0.25 | the NICs of host 3 have a quarter |
| `h0-h3` | 0.1 | the path between hosts 0 and 3 has a tenth of what their NICs have, or the links of their domain |
| `h3` | `lost` | host 3 is lost |
| `h3` | `back` | host 3 is there again |

`hardware.dynamics` documents the sum of several events.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from hardware.cluster import Cluster
from hardware.dynamics import INTER, INTRA, HostEvent, LinkEvent, Trace
from hardware.io.config_file import number_in, read_text
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import spelling_key

COLUMNS = ("time_s", "link", "share")
LOST, BACK = "lost", "back"
LEAST_SHARE = 1e-6
"""Least share of a link, below that of any working link; products of shares stay far from underflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    place: str
    line: int
    time_s: str
    link: str
    share: str

    def mistake(self, column: str, rule: str, nearest: str | None = None) -> ConfigError:
        """Return the error for the value in one column."""
        return ConfigError(rule, key=column, value=getattr(self, column), nearest=nearest, file=self.place)


_Placed = tuple[_Row, LinkEvent | HostEvent]


def read_trace(path: Path, cluster: Cluster) -> Trace:
    """Read the trace in a CSV file of the form above.

    Args:
        path: Path of the CSV file.
        cluster: Nominal cluster that the trace describes.

    Raises:
        ConfigError: the file can't be read, or something in it can't happen to this cluster.
    """
    return parse_trace(read_text(path), cluster, place=str(path))


def parse_trace(text: str, cluster: Cluster, *, place: str) -> Trace:
    """Read the trace in a text of the form above.

    Args:
        text: Text of a CSV file.
        cluster: Nominal cluster that the trace describes.
        place: File of the text, for messages.

    Raises:
        ConfigError: something in the text can't happen to this cluster.
    """
    names = _Names(cluster)
    placed: list[_Placed] = []
    for row in _rows(text, place):
        time_s = _time_s(row, placed[-1] if placed else None)
        placed.append((row, _event(row, time_s, names)))
    _check_order(placed, names)
    return Trace(events=tuple(event for _, event in placed))


def format_trace(trace: Trace) -> str:
    """Write a trace in the form above."""
    rows = [",".join(COLUMNS)]
    for event in trace.events:
        if isinstance(event, HostEvent):
            rows.append(f"{event.time_s!r},h{event.host},{LOST if event.is_lost else BACK}")
        else:
            link = event.link if isinstance(event.link, str) else "-".join(f"h{host}" for host in event.link)
            rows.append(f"{event.time_s!r},{link},{event.share!r}")
    return "\n".join(rows) + "\n"


class _Names:
    """Hosts and links of a cluster that a trace may name."""

    def __init__(self, cluster: Cluster) -> None:
        links = [link for group in cluster.groups for link in group.intra_links + group.nic_links]
        kinds = [link.kind for link in [*links, *cluster.inter_group_links]]
        self.num_hosts = cluster.num_hosts
        self.hosts = f"h0 to h{self.num_hosts - 1}" if self.num_hosts > 1 else "h0"
        # INTRA and INTER win over kinds of links with the same spelling
        self.links = {spelling_key(name): name for name in [*kinds, INTRA, INTER]}

    def link(self, row: _Row) -> str | tuple[int, ...]:
        """Return the link that a row names, in the form of `LinkEvent.link`.

        Raises:
            ConfigError: the cluster has no such link.
        """
        numbers = re.fullmatch(r"h([0-9]{1,9})(?:\s*-\s*h([0-9]{1,9}))?", row.link, flags=re.IGNORECASE)
        if numbers is None:
            known = self.links.get(spelling_key(row.link))
            if known is None:
                nearest = f"{did_you_mean(row.link, self.links.values())}, hosts {self.hosts}, pairs such as h0-h1"
                raise row.mistake("link", "is no link of the cluster", nearest)
            return known
        hosts = tuple(sorted(int(number) for number in numbers.groups() if number is not None))
        if hosts[-1] >= self.num_hosts:
            raise row.mistake("link", f"is no host of the cluster, which has {self.num_hosts}", f"valid: {self.hosts}")
        if len(set(hosts)) < len(hosts):
            raise row.mistake("link", "pairs a host with itself", f"the NICs of that host are h{hosts[0]}")
        return hosts


def _rows(content: str, file: str) -> list[_Row]:
    """Return every row below the header."""
    header: list[str] = []
    rows = []
    for line, text in enumerate(content.removeprefix("\ufeff").splitlines(), start=1):
        if text.lstrip(' "').startswith("#"):  # a spreadsheet may have quoted the comment
            continue
        place = f"{file}:{line}"
        try:
            cells = [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
        except csv.Error as error:
            raise ConfigError(f"is not valid CSV ({error})", file=place) from None
        if not any(cells):
            continue
        if not header:
            header = _header(cells, place)
            continue
        if len(cells) != len(header):
            raise ConfigError(f"has {len(cells)} cells where the header has {len(header)}", file=place)
        rows.append(_Row(place=place, line=line, **dict(zip(header, cells, strict=True))))
    if not header:
        raise ConfigError("is empty", nearest=f"the first line is {','.join(COLUMNS)}", file=file)
    return rows


def _header(cells: list[str], place: str) -> list[str]:
    form = f"the header is {','.join(COLUMNS)}"
    for name in cells:
        if name not in COLUMNS:
            raise ConfigError("is no column of a trace", key="header", value=name, nearest=form, file=place)
    for name in COLUMNS:
        if cells.count(name) != 1:
            rule = "appears twice in the header" if name in cells else "is a missing column"
            raise ConfigError(rule, key=name, nearest=form, file=place)
    return cells


def _time_s(row: _Row, before: _Placed | None) -> float:
    time_s = number_in(row.time_s)
    if time_s is None or not math.isfinite(time_s) or time_s < 0:
        raise row.mistake("time_s", "must be a finite number of seconds, 0 or more")
    if before is not None and time_s < before[1].time_s:
        rule = f"is earlier than {before[0].time_s} on line {before[0].line}"
        raise row.mistake("time_s", rule, "rows ascend in time")
    return time_s


def _event(row: _Row, time_s: float, names: _Names) -> LinkEvent | HostEvent:
    link = names.link(row)
    word = row.share.lower()
    if word not in (LOST, BACK):
        return LinkEvent(time_s=time_s, link=link, share=_share(row, link))
    if isinstance(link, str) or len(link) > 1:
        raise row.mistake("share", f"is for a host, and {row.link} is none", f"hosts are {names.hosts}")
    return HostEvent(time_s=time_s, host=link[0], is_lost=word == LOST)


def _share(row: _Row, link: str | tuple[int, ...]) -> float:
    is_host = not isinstance(link, str) and len(link) == 1
    share = number_in(row.share)
    if share is None or math.isnan(share) or share < 0:
        percent = number_in(row.share.removesuffix("%"))
        raise row.mistake(
            "share",
            "must be a number above 0 and at most 1" + f", or for a host {LOST} or {BACK}" * is_host,
            f"{row.share} is {percent / 100:g}" if row.share.endswith("%") and percent else None,
        )
    if share < LEAST_SHARE:
        raise row.mistake(
            "share",
            f"must be {'above 0' if share == 0 else f'at least {LEAST_SHARE:g}'}: a dead link isolates a host",
            f"the loss of a host reads {row.time_s},{row.link if is_host else 'h0'},{LOST}",
        )
    if share > 1:
        raise row.mistake("share", "must be at most 1", "1 is the bandwidth that the cluster is described with")
    return share


def _check_order(placed: list[_Placed], names: _Names) -> None:
    """Check that only present hosts get lost, only lost ones return, one is left, and nothing changes twice at once.

    Raises:
        ConfigError: a row can't happen after the rows before it.
    """
    lost_since: dict[int, _Row] = {}
    for _, at_once in itertools.groupby(placed, key=lambda item: item[1].time_s):
        seen: dict[object, _Row] = {}
        last_lost: _Row | None = None
        for row, event in at_once:
            key = event.link if isinstance(event, LinkEvent) else event.host
            if key in seen:
                raise row.mistake(
                    "link", f"changes twice at {row.time_s} s, first on line {seen[key].line}", "keep one"
                )
            seen[key] = row
            if isinstance(event, LinkEvent):
                continue
            before = lost_since.pop(event.host, None)
            if event.is_lost:
                if before is not None:
                    raise row.mistake(
                        "link", f"is lost already, since line {before.line}", f"a return has the share {BACK}"
                    )
                lost_since[event.host] = last_lost = row
            elif before is None:
                raise row.mistake("link", "is not lost, and can't come back", f"a loss has the share {LOST}")
        if last_lost is not None and len(lost_since) == names.num_hosts:
            raise last_lost.mistake(
                "link", f"is the last of {names.num_hosts} hosts: none is left", "leave one host in the cluster"
            )
