from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.dynamics import HostEvent, LinkEvent, intervals
from hardware.io.errors import ConfigError
from hardware.trace_file import read_trace
from tests.support.settings.random_clusters import changing_clusters

TRACES = Path(__file__).resolve().parents[3] / "configs" / "traces"
HEADER = "time_s,link,share\n"


def written(folder, text):
    """The path of a trace with this text."""
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def row_of(event):
    """The row that tells an event."""
    if isinstance(event, HostEvent):
        return f"{event.time_s},h{event.host},{'lost' if event.is_lost else 'back'}"
    link = event.link if isinstance(event.link, str) else "-".join(f"h{host}" for host in event.link)
    return f"{event.time_s},{link},{event.share}"


@given(changing_clusters())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, changing):
    """Every trace can be written in the form of the file, and reading gives it back."""
    cluster, trace = changing

    path = written(tmp_path, HEADER + "".join(f"{row_of(event)}\n" for event in trace.events))

    assert read_trace(path, cluster) == trace


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.csv")), ids=lambda path: path.name)
def test_every_example_is_a_trace(path):
    """Each file in configs/traces is a trace of the cluster and number of hosts in its name, and changes it."""
    name, hosts, _ = path.stem.rsplit("-", maxsplit=2)
    cluster = find_cluster(name, int(hosts))

    assert len(intervals(cluster, read_trace(path, cluster), 86_400)) > 2


def test_the_readme_shows_rows_that_work(tmp_path):
    """Every row of the table in configs/traces/README.md can stand in a file, in the order of the table."""
    lines = (TRACES / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("`")[1:4:2] for line in lines if line.startswith("| `") and line.count("`") == 4]
    rows = [f"{time_s},{link},{share}\n" for time_s, (link, share) in enumerate(cells) if share != "share"]

    trace = read_trace(written(tmp_path, HEADER + "".join(rows)), find_cluster("dgx-h100", 8))

    assert len(trace.events) == 7


def test_spelling_order_and_blanks_do_not_matter(tmp_path):
    """Comments, blank lines, a byte order mark, spaces, case, quotes, and the order of columns and pairs are free."""
    text = (
        '\ufeff# made up\n\n"share", link ,time_s\n 0.5,h3 - H0, 1 \n,,\nLost,H1,2.5e0\r\n#1,inter,1\n"# a, b",,\n'
        "1,Infini-Band,3\nBACK,h01,3\n"
    )

    trace = read_trace(written(tmp_path, text), find_cluster("dgx-h100", 4))

    assert trace.events == (
        LinkEvent(time_s=1.0, link=(0, 3), share=0.5),
        HostEvent(time_s=2.5, host=1, is_lost=True),
        LinkEvent(time_s=3.0, link="infiniband", share=1.0),
        HostEvent(time_s=3.0, host=1, is_lost=False),
    )


def test_hosts_may_change_places_at_once(tmp_path):
    """The last host may be lost in the moment in which another one returns, whichever row comes first."""
    cluster = find_cluster("dgx-h100", 2)

    trace = read_trace(written(tmp_path, HEADER + "1,h0,lost\n2,h1,lost\n2,h0,back\n"), cluster)

    assert [interval.hosts for interval in intervals(cluster, trace, 3)] == [(0, 1), (1,), (0,)]


def test_kinds_of_links_between_groups_have_names_too(tmp_path):
    """All links of a cluster may be named: inside hosts, between hosts and between groups."""
    ethernet = {"kind": "Office LAN", "bandwidth_gb_per_s": 1, "latency_us": 30}
    mapping = {"groups": [{"name": "dgx-h100"}, {"name": "v100-pcie"}], "inter_group_links": [ethernet]}

    trace = read_trace(written(tmp_path, HEADER + "1,office-lan,0.5\n"), cluster_from_mapping(mapping, Path()))

    assert trace.events[0].link == "Office LAN"


VALID = "(valid: infiniband, inter, intra, nvlink4), hosts h0 to h3, pairs such as h0-h1"
FORM = "the header is time_s,link,share"
IS_NO_TIME = "must be a finite number of seconds, 0 or more"
IS_NO_SHARE = "must be a number above 0 and at most 1"
IS_DEAD = "a dead link isolates a host; the loss of a host reads"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n# nothing\n", ": is empty; the first line is time_s,link,share"),
        ("zeit;höhe\n".encode("latin-1"), ": is not UTF-8 text"),
        ("time_s,link,share,note\n", f":1: header = 'note': is no column of a trace; {FORM}"),
        ("time_s,link\n", f":1: share: is a missing column; {FORM}"),
        ("time_s,link,link,share\n", f":1: link: appears twice in the header; {FORM}"),
        (HEADER + "1,inter\n", ":2: has 2 cells where the header has 3"),
        (HEADER + '1,"inter"x,0.5\n', ":2: is not valid CSV (',' expected after '\"')"),
        *(
            (f"{HEADER}{time_s},inter,0.5\n", f":2: time_s = '{time_s}': {IS_NO_TIME}")
            for time_s in ("soon", "-1", "inf", "nan", "1_0")
        ),
        (HEADER + "2,h1,1\n\n1.5,h1,1\n", ":4: time_s = '1.5': is earlier than 2 on line 2; rows ascend in time"),
        (
            HEADER + "1,infinband,1\n",
            f":2: link = 'infinband': is no link of the cluster; did you mean 'infiniband'? {VALID}",
        ),
        (HEADER + "1,,1\n", f":2: link = '': is no link of the cluster; {VALID[1:].replace('),', ',')}"),
        (HEADER + "1,h0-h4,1\n", ":2: link = 'h0-h4': is no host of the cluster, which has 4; valid: h0 to h3"),
        (HEADER + "1,h2-h2,1\n", ":2: link = 'h2-h2': pairs a host with itself; the NICs of that host are h2"),
        (HEADER + "1,h2,0\n", f":2: share = '0': must be above 0: {IS_DEAD} 1,h2,lost"),
        (HEADER + "1,h2-h3,1e-300\n", f":2: share = '1e-300': must be at least 1e-06: {IS_DEAD} 1,h0,lost"),
        (HEADER + "1,inter,-0.5\n", f":2: share = '-0.5': {IS_NO_SHARE}"),
        (HEADER + "1,inter,nan\n", f":2: share = 'nan': {IS_NO_SHARE}"),
        (HEADER + "1,inter,50%\n", f":2: share = '50%': {IS_NO_SHARE}; 50% is 0.5"),
        (HEADER + "1,h1,down\n", f":2: share = 'down': {IS_NO_SHARE}, or for a host lost or back"),
        (
            HEADER + "1,inter,1.5\n",
            ":2: share = '1.5': must be at most 1; 1 is the bandwidth that the cluster is described with",
        ),
        (HEADER + "1,inter,lost\n", ":2: share = 'lost': is for a host, and inter is none; hosts are h0 to h3"),
        (HEADER + "1,h0-h1,back\n", ":2: share = 'back': is for a host, and h0-h1 is none; hosts are h0 to h3"),
        (
            HEADER + "1,h2,lost\n2,h2,lost\n",
            ":3: link = 'h2': is lost already, since line 2; a return has the share back",
        ),
        (HEADER + "1,h2,back\n", ":2: link = 'h2': is not lost, and can't come back; a loss has the share lost"),
        (HEADER + "1,h2,lost\n1,h2,back\n", ":3: link = 'h2': changes twice at 1 s, first on line 2; keep one"),
        (
            HEADER + "1,h0-h1,0.5\n1.0,h1-h0,1\n",
            ":3: link = 'h1-h0': changes twice at 1.0 s, first on line 2; keep one",
        ),
        (
            HEADER + "1,h0,lost\n2,h1,lost\n3,h2,lost\n3,h3,lost\n3,inter,0.5\n",
            ":5: link = 'h3': is the last of 4 hosts: none is left; leave one host in the cluster",
        ),
    ],
)
def test_a_mistake_is_one_message(text, message, tmp_path):
    """Each mistake is one ConfigError that names the file, the line, the column, the value and the rule."""
    path = written(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        read_trace(path, find_cluster("dgx-h100", 4))

    assert str(caught.value) == f"{path}{message}"


def test_a_trace_that_is_not_there(tmp_path):
    """A missing file is told with the nearest one that is there."""
    written(tmp_path, HEADER)

    with pytest.raises(ConfigError, match=r"trase\.csv: no such file; did you mean 'trace\.csv'"):
        read_trace(tmp_path / "trase.csv", find_cluster("dgx-h100"))
