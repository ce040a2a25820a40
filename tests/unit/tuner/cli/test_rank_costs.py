import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import FASTEST, ROOT, assert_users_mistake

PRICES = """\
currency: EUR
date: 2026-01-31
prices:
  H100: {per_device_hour: 2, source: our contract}
  A100: {per_device_hour: 1, source: our contract}
"""
TOKENS = ("--tokens", "1e9")
CLUSTERS = ("--clusters", "dgx-h100,dgx-a100", "--hosts", "1..4")


@pytest.fixture
def prices(tmp_path):
    """A file of prices."""
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES, encoding="utf-8")
    return path


def test_costs_by_hand(meshtune, simulated, prices):
    """Days are steps times the step time, and the cost is that time on all devices at their price."""
    told = meshtune("rank", simulated, *TOKENS, *CLUSTERS, "--prices", prices, "--json")

    assert told.status == 0, told.err
    steps = -(-(10**9) // (4096 * 16))
    assert told.json["steps"] == steps
    assert told.json["prices"] == {"currency": "EUR", "date": "2026-01-31", "file": str(prices)}
    offers = told.json["offers"]
    assert [(o["cluster"], o["hosts"]) for o in offers] == [(c, h) for c in ("dgx-h100", "dgx-a100") for h in (1, 2, 4)]
    for offer in offers:
        hours = steps * offer["step_time_s"] / 3600
        price = 2 if offer["cluster"] == "dgx-h100" else 1
        assert offer["days"] == pytest.approx(hours / 24)
        assert offer["device_hours"] == pytest.approx(hours * 8 * offer["hosts"])
        assert offer["cost"] == pytest.approx(price * hours * 8 * offer["hosts"])
        assert offer["days_range"][0] < offer["days"] < offer["days_range"][1]
        assert offer["cost_range"][0] / offer["cost"] == pytest.approx(offer["days_range"][0] / offer["days"])
        limit_kw = 0.7 if offer["cluster"] == "dgx-h100" else 0.4
        device_kw = offer["energy_kwh"] / hours / 8 / offer["hosts"]
        assert 1.0 * limit_kw <= device_kw <= 1.5 * limit_kw


def test_the_studys_own_size_agrees_with_rank_and_estimate(meshtune, simulated, prices):
    """On the study's own cluster the offer is the first of `rank`, with the days, range and cost of `estimate`."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]
    estimate = meshtune("estimate", simulated, *TOKENS, "--prices", prices, "--json").json["trainings"][-1]

    (offer,) = meshtune("rank", simulated, *TOKENS, "--prices", prices, "--json").json["offers"]

    assert {name: offer["config"][name] for name in FASTEST} == {name: first[name] for name in FASTEST}
    assert offer["days"] * 86_400 == pytest.approx(estimate["seconds"])
    assert [days * 86_400 for days in offer["days_range"]] == pytest.approx(estimate["seconds_range"])
    assert offer["cost"] == pytest.approx(estimate["cost"])


def test_the_front_is_of_time_and_cost(meshtune, simulated, prices):
    """An offer is on the front if none is both faster and cheaper, and the named ones are its ends."""
    told = meshtune("rank", simulated, *TOKENS, *CLUSTERS, "--prices", prices, "--json").json

    points = [(offer["days"], offer["cost"]) for offer in told["offers"]]
    for offer, own in zip(told["offers"], points, strict=True):
        is_beaten = any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in points)
        assert offer["on_front"] is not is_beaten
        assert 0 <= offer["front_chance"] <= 1
    assert points[told["fastest"]] == min(points)
    assert points[told["cheapest"]] == min(points, key=lambda point: point[1])
    assert told["nearest_miss"] is None


@pytest.mark.slow
def test_limits_mark_what_breaks_them_and_name_the_nearest(meshtune, simulated, prices):
    """What takes longer than a deadline is marked, is on no front, and is told the nearest that keeps it."""
    arguments = ("rank", simulated, *TOKENS, *CLUSTERS, "--prices", prices)
    free = meshtune(*arguments, "--json").json["offers"]
    deadline = sorted(offer["days"] for offer in free)[3]

    told, shown = (meshtune(*arguments, "--max-days", f"{deadline:.9g}1", *more) for more in (("--json",), ()))

    offers = told.json["offers"]
    late = [offer for offer in offers if offer["days"] > deadline]
    assert len(late) == 2
    for offer in late:
        assert offer["breaks"] == ["max_days"]
        assert not offer["on_front"]
        assert offers[offer["nearest"]]["on_front"]
        assert offer["chance_within"] < 0.5
    assert shown.out.count("\n!") == 2 + 2
    assert f"more than {deadline:g} days" in shown.out


def test_a_budget_nothing_keeps(meshtune, simulated, prices):
    """Where no size keeps the limits, the one that exceeds them least is named, and the command ends 1."""
    arguments = ("rank", simulated, *TOKENS, *CLUSTERS, "--prices", prices, "--max-cost", "0.01")
    told, shown = meshtune(*arguments, "--json"), meshtune(*arguments)

    assert (told.status, shown.status) == (1, 1)
    costs = [offer["cost"] for offer in told.json["offers"]]
    assert costs[told.json["nearest_miss"]] == min(costs)
    assert told.json["fastest"] is None
    assert "Nothing keeps the limits; nearest: " in shown.out


def test_limits_and_prices_may_stand_in_the_study(meshtune, tmp_path, prices):
    """The study's keys do what the options do, and options win."""
    path = tmp_path / "study.yaml"
    path.write_text(
        study(cost=f"{{prices: {prices.name}}}", limits="{tokens: 1e9, max_days: 1000, max_cost: 1e6}"),
        encoding="utf-8",
    )

    own, less = meshtune("rank", path, *CLUSTERS, "--json"), meshtune("rank", path, "--max-cost", "0.01", "--json")

    assert own.json["limits"] == {"max_days": 1000, "max_cost": 1e6}
    assert own.json["tokens"] == 1e9
    assert own.json["prices"]["currency"] == "EUR"
    assert less.status == 1


def test_one_price_of_all_devices(meshtune, tmp_path):
    """`cost.price_per_device_hour` prices every device, in the study's currency."""
    path = tmp_path / "study.yaml"
    path.write_text(study(cost="{price_per_device_hour: 3, currency: CHF}"), encoding="utf-8")

    told, shown = (meshtune("rank", path, *TOKENS, *more) for more in (("--json",), ()))

    (offer,) = told.json["offers"]
    assert offer["cost"] == pytest.approx(3 * offer["device_hours"])
    assert "costs in CHF by the price that the study states" in shown.out


@pytest.mark.slow
def test_without_prices_the_front_is_of_energy(meshtune, simulated):
    """Without a price there is no cost, and the front is that of time and energy."""
    told, shown = (meshtune("rank", simulated, *TOKENS, *CLUSTERS, *more) for more in (("--json",), ()))

    assert told.json["front"] == "energy"
    assert all(offer["cost"] is None for offer in told.json["offers"])
    assert "no prices are given" in shown.out
    assert "Least energy: " in shown.out


def test_a_cluster_without_a_price_is_shown_without_cost(meshtune, simulated, prices):
    """A device that the file does not price has its days but no cost, is on no front, and is named."""
    arguments = ("rank", simulated, *TOKENS, "--clusters", "dgx-h100,b200", "--prices", prices)
    told, shown = meshtune(*arguments, "--json"), meshtune(*arguments)

    priced, unpriced = told.json["offers"]
    assert priced["on_front"]
    assert unpriced["cost"] is None
    assert unpriced["days"] is not None
    assert not unpriced["on_front"]
    assert "no price of B200" in shown.out


def test_what_does_not_fit_says_why(meshtune, simulated, prices):
    """Sizes that hold no configuration, and devices without the job's precision, have a reason instead of a cost."""
    arguments = ("rank", simulated, *TOKENS, "--prices", prices)
    large = meshtune(*arguments, "--set", "model=llama3-70b", "--set", "space.pp=[1]", "--hosts", "1,8", "--json")
    old = meshtune(*arguments, "--set", "job.precision=fp8", "--clusters", "dgx-h100,dgx-a100")

    small, enough = large.json["offers"]
    assert "fits in memory" in small["reason"]
    assert small["days"] is None
    assert enough["on_front"]
    assert "dgx-a100, 1 host: precision fp8 has no known peak on A100-SXM-80" in old.out


def test_more_free_memory_costs_time(meshtune, simulated):
    """With a larger share of memory to stay free, peaks are lower, and the training gets no faster."""
    usual, spare = (
        meshtune("rank", simulated, *TOKENS, "--hosts", "1,2", "--free-memory", share, "--json").json["offers"]
        for share in ("8%", "0.5")
    )

    for before, after in zip(usual, spare, strict=True):
        assert after["peak_memory_bytes"] < before["peak_memory_bytes"]
        assert after["days"] >= before["days"]


def test_the_page_is_written(meshtune, simulated, prices, tmp_path):
    """`--out` writes a page with every cluster, its sizes and the prices."""
    out = tmp_path / "costs.html"

    told = meshtune(
        "rank", simulated, *TOKENS, *CLUSTERS, "--prices", prices, "--max-days", "9", "--out", out, "--json"
    )

    page = out.read_text(encoding="utf-8")
    assert told.json["written"] == str(out)
    assert all(word in page for word in ("dgx-h100", "dgx-a100", "EUR", "2026-01-31", "figure-front", "at most 9 days"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--clusters", "dgx-h100"), ("--tokens", "needed")),
        (("--tokens", "many"), ("--tokens", "many", "for example 1e12")),
        ((*TOKENS, "--clusters", "dgx-h10"), ("--clusters", "dgx-h10", "no cluster and no device", "did you mean")),
        ((*TOKENS, "--clusters", "dgx-h100,dgx-h100"), ("--clusters", "once")),
        ((*TOKENS, "--hosts", "4..2"), ("--hosts", "4..2", "2..4")),
        ((*TOKENS, "--hosts", "1..2..4"), ("--hosts", "must list")),
        ((*TOKENS, "--max-days", "0"), ("--max-days", "above 0")),
        ((*TOKENS, "--max-cost", "5"), ("--max-cost", "needs prices", "--prices FILE")),
        ((*TOKENS, "--top", "3"), ("--top", "comparison of clusters")),
        ((*TOKENS, "--prices", "none.yaml"), ("none.yaml", "no such file")),
        (("--free-memory", "108%"), ("--free-memory", "108%", "for example 8%")),
    ],
)
def test_bad_options_of_costs(meshtune, simulated, arguments, words):
    """An option that cannot work is told with its value and what would be right."""
    assert_users_mistake(meshtune("rank", simulated, *arguments), *words)


def test_the_example_prices_work(meshtune):
    """The prices that are shipped as an example give costs of a shipped study on three clusters."""
    (path,) = sorted((ROOT / "configs" / "prices").glob("*.yaml"))
    arguments = ("--tokens", "1e12", "--clusters", "dgx-h100,dgx-a100,gb200", "--hosts", "4", "--prices", path)

    told = meshtune("rank", ROOT / "configs" / "studies" / "llama3-8b-dgx-h100.yaml", *arguments, "--json")

    assert all(offer["cost"] > 0 for offer in told.json["offers"])
