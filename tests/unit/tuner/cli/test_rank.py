import re

import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import FASTEST, ROOT, assert_users_mistake, write_replay

SLOW_STUDIES = ("cpu-torch-planned", "unlike-hosts")
"""Examples whose candidates take many seconds to plan."""


def test_rank_is_sorted_and_as_long_as_asked(meshtune, simulated):
    """`rank --top` prints so many configurations, the fastest prediction first, and the current one below; ten without
    it.
    """
    told, default = meshtune("rank", simulated, "--top", 3, "--json"), meshtune("rank", simulated, "--json")
    shown = meshtune("rank", simulated, "--top", 3)

    configs = told.json["configs"]
    assert len(configs) == 3
    assert len(default.json["configs"]) == 10
    degrees = [[config[name] for name in FASTEST] for config in configs]
    assert [[config[name] for name in FASTEST] for config in default.json["configs"][:3]] == degrees
    assert [c["step_time_s"] for c in configs] == sorted(c["step_time_s"] for c in configs)
    assert all(c.keys() >= {*FASTEST, "step_time_s", "peak_memory_bytes"} for c in configs)
    lines = shown.out.splitlines()
    assert len(lines) == 5
    assert len(set(map(len, lines))) == 1
    heads = ["step", "[s]", "95%", "speed-up", "MFU", "GiB", "fits", "bound", "by", "and", "then", "tokens/s/device"]
    assert lines[0].split()[-len(heads) :] == heads
    assert "pp pipeline, tp tensor, dp data" in shown.err


def test_rank_agrees_with_predict(meshtune, simulated):
    """The configuration that `rank` puts first has the step time and memory that `predict` tells of it."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]
    config = ",".join(f"{name}={first[name]}" for name in FASTEST)

    told = meshtune("predict", simulated, "--config", config, "--json").json

    assert told["step_time_s"] == pytest.approx(first["step_time_s"])
    assert told["peak_memory_bytes"] == first["peak_memory_bytes"]
    assert told["step_time_range_s"] == pytest.approx(first["step_time_range_s"])
    assert told["fit_probability"] == pytest.approx(first["fit_probability"])
    assert told["mfu"] == pytest.approx(first["mfu"])


def test_what_bounds_a_step_is_of_its_parts(meshtune, simulated):
    """The shares of a step add up to it, the largest is what bounds it, and they are sums of what `predict` tells."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]
    config = ",".join(f"{name}={first[name]}" for name in FASTEST)
    told = meshtune("predict", simulated, "--config", config, "--json").json

    parts = {name: seconds / told["step_time_s"] for name, seconds in told["breakdown_s"].items()}
    shares = first["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert first["bound_by"] == next(iter(shares))
    communication = ("tp", "cp", "up", "ep", "dp", "pp")
    assert shares["network"] == pytest.approx(sum(parts[name] for name in communication))
    assert shares["compute"] + shares["memory traffic"] == pytest.approx(parts["compute"] + parts["optimizer"])
    assert shares["memory traffic"] > parts["optimizer"]
    if first["exposed"] is not None:
        assert parts[first["exposed"]] == max(parts[name] for name in communication)


def test_speed_up_is_over_the_current_configuration(meshtune, simulated, tmp_path):
    """The speed-up of a row is the current configuration's step time over its own; without one, the baseline's, and
    without either, the first row's.
    """
    told = meshtune("rank", simulated, "--json").json
    path = tmp_path / "without.yaml"
    path.write_text(study(name="without"), encoding="utf-8")
    baseline = meshtune("rank", path, "--set", "search.baseline=true", "--json").json
    first = meshtune("rank", path, "--json").json

    current_s = told["current"]["step_time_s"]
    assert told["compared_with"] == "current"
    assert [row["speedup"] for row in told["configs"]] == [
        pytest.approx(current_s / row["step_time_s"]) for row in told["configs"]
    ]
    assert told["current"]["speedup"] == 1
    assert (baseline["compared_with"], first["compared_with"]) == ("baseline", "first")
    assert baseline["configs"][0]["speedup"] > 1
    assert first["configs"][0]["speedup"] == 1


def test_rank_puts_what_does_not_fit_last(meshtune, tmp_path):
    """Candidates of a replay that are predicted not to fit come after all that do, marked as such."""
    path = write_replay(tmp_path, limits="{free_memory: 0.6}")

    fits = [config["fits"] for config in meshtune("rank", path, "--top", 12, "--json").json["configs"]]
    shown = meshtune("rank", path, "--top", 12)

    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits
    assert shown.out.count("!") == fits.count(False)
    assert "does not fit" in shown.err


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in SLOW_STUDIES else [])
        for file in sorted((ROOT / "configs" / "studies").glob("*.yaml"))
    ],
)
def test_the_shipped_studies_work(meshtune, file):
    """Every example that stands beside the README of the studies has a best prediction."""
    assert meshtune("rank", file, "--top", 1, "--json").status == 0


def test_rank_marks_the_current_configuration(meshtune, tmp_path):
    """The current configuration has a mark, also below the table where it is not among the first."""
    path = write_replay(tmp_path, current="{tp: 8}")

    told, whole, short = (meshtune("rank", path, *more) for more in (("--json",), ("--top", 12), ("--top", 1)))

    place = told.json["current"]["rank"]
    assert told.json["taught_by_trials"] == 0
    assert {row["source"] for row in told.json["configs"]} == {"predicted"}
    assert whole.out.splitlines()[place].split()[0] == f">{place}"
    assert short.out.splitlines()[-1].split()[0] == f">{place}"
    assert whole.out.count(">") == 1
    assert "> the current configuration" in short.err


def test_rank_after_trials_is_by_what_they_taught(finished, meshtune):
    """Once trials have ended, the measured ones have their step times, the best of them leads, and failed ones come
    last.
    """
    path, storage, run = finished

    told, shown = (meshtune("rank", path, "--storage", storage, "--top", 12, *more) for more in (("--json",), ()))

    configs = told.json["configs"]
    assert told.json["taught_by_trials"] == run.json["trials"]
    measured = [row for row in configs if row["source"] == "measured"]
    assert len(measured) == run.json["trials"] - run.json["failed"]
    assert {name: measured[0][name] for name in FASTEST} == FASTEST
    assert measured[0]["step_time_s"] == pytest.approx(0.95)
    assert told.json["current"]["step_time_s"] == pytest.approx(1.5)
    assert measured[0]["speedup"] == pytest.approx(1.5 / 0.95)
    for row in configs:
        low_s, high_s = row["step_time_range_s"]
        assert low_s < row["step_time_s"] < high_s
        assert 0 <= row["fit_probability"] <= 1
    assert {row["fit_probability"] for row in measured} == {1.0}
    fits = [row["fits"] for row in configs]
    assert fits == sorted(fits, reverse=True)
    assert shown.out.startswith(f"By {run.json['trials']} trials of study {run.json['study_name']} in ")


# Other sizes of the cluster


def test_rank_of_sizes(meshtune, simulated):
    """`rank --hosts` gives the best prediction for each number of hosts, in the order asked for."""
    done = meshtune("rank", simulated, "--hosts", "2,1,4", "--json")

    assert done.status == 0, done.err
    sizes = done.json["sizes"]
    assert [(size["hosts"], size["devices"]) for size in sizes] == [(2, 16), (1, 8), (4, 32)]
    assert done.json["smallest_that_fits"] == 1
    for size in sizes:
        degrees = size["config"]
        assert degrees["pp"] * degrees["tp"] * degrees["dp"] * degrees["cp"] * degrees["up"] == size["devices"]
        per_device = 4096 * 16 / (size["devices"] * size["step_time_s"])
        assert size["tokens_per_s_per_device"] == pytest.approx(per_device)
    times = {size["hosts"]: size["step_time_s"] for size in sizes}
    assert times[4] < times[2] < times[1]


def test_rank_of_the_studys_own_size(meshtune, simulated):
    """The best of the study's own size is the one that `rank` puts first."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]

    (size,) = meshtune("rank", simulated, "--hosts", 1, "--json").json["sizes"]

    assert {name: size["config"][name] for name in FASTEST} == {name: first[name] for name in FASTEST}
    assert size["step_time_s"] == pytest.approx(first["step_time_s"])


def test_the_smallest_size_that_fits(meshtune, simulated):
    """Sizes that are too small have a reason instead of a configuration, and the smallest that fits is named."""
    arguments = ("rank", simulated, "--set", "model=llama3-70b", "--set", "space.pp=[1, 2]", "--hosts", "1,3,8")

    told, shown = meshtune(*arguments, "--json"), meshtune(*arguments)

    assert told.status == 0, told.err
    small, odd, enough = told.json["sizes"]
    assert small["config"] is None
    assert "fits in memory" in small["reason"]
    assert re.fullmatch(r"no configuration obeys every rule; \w+ removed the most", odd["reason"])
    assert enough["config"] is not None
    assert told.json["smallest_that_fits"] == 8
    assert "1 host: none of the" in shown.out
    assert shown.out.endswith("Smallest that fits: 8 hosts (64 devices)\n")


def test_no_size_fits(meshtune, hopeless):
    """Where no size fits, `rank --hosts` ends 1."""
    done = meshtune("rank", hopeless, "--hosts", "1,2", "--json")

    assert done.status == 1
    assert done.json["smallest_that_fits"] is None


@pytest.mark.parametrize("hosts", ["", "x", "1,x", "0", "-1", "1,,2", "1.5", "1,1", "999999999", "1" * 5000, "²"])
def test_a_bad_list_of_sizes(meshtune, simulated, hosts):
    """What is no list of different numbers of hosts is refused by name."""
    assert_users_mistake(meshtune("rank", simulated, f"--hosts={hosts}"), "--hosts", "must list")


def test_sizes_need_equal_hosts(meshtune, tmp_path):
    """A cluster of unlike groups has no one number of hosts."""
    path = tmp_path / "study.yaml"
    path.write_text(study(cluster="{groups: [{name: dgx-h100}, {name: dgx-a100}]}"), encoding="utf-8")

    assert_users_mistake(meshtune("rank", path, "--hosts", "1,2"), "--hosts", "equal hosts", "2 groups")


def test_sizes_need_predictions(meshtune, replay):
    """Nobody measured a replay's job on other sizes."""
    assert_users_mistake(meshtune("rank", replay, "--hosts", "1,2"), "--hosts", "8 devices")


def test_sizes_exclude_top(meshtune, simulated):
    """`--top` beside `--hosts` is refused rather than ignored."""
    assert_users_mistake(meshtune("rank", simulated, "--hosts", "1", "--top", "3"), "--top", "--hosts")


@pytest.mark.slow
def test_leaders_on_unlike_hosts_are_simulated(meshtune, simulated):
    """On unlike hosts `rank` puts the leaders in the order of their simulated steps, and says so; `best` agrees."""
    changes = (
        "cluster={groups: [{name: dgx-h100}, {name: dgx-a100}]}",
        "current={tp: 8, dp: 2}",
        "space={cp: [1], vpp: [1]}",
    )
    changed = [word for change in changes for word in ("--set", change)]
    told, best = (meshtune(command, simulated, *changed, "--json") for command in ("rank", "best"))
    shown = meshtune("rank", simulated, *changed)

    rows = told.json["configs"]
    assert {row["source"] for row in rows} == {"simulated"}
    assert [row["step_time_s"] for row in rows] == sorted(row["step_time_s"] for row in rows)
    assert best.json["step_time_s"] == rows[0]["step_time_s"]
    assert "simulating the 30 fastest predictions" in shown.err
