import numpy as np
import optuna
import pytest

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import assert_users_mistake, write_replay
from tuner.forecast.objective import objective_of
from tuner.run.studies import prepared_of
from tuner.study_file.config import load_study

MIXED = "{groups: [{name: dgx-h100, hosts: 1}, {name: v100-pcie, hosts: 3}]}"
"""Hosts of which the slow ones are worth leaving out."""


def options_of(objective, **changes):
    """The options that make a study minimize something."""
    changes = {"objective": objective} | changes
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def storage(tmp_path):
    """The place of a database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_study_of_two_values_keeps_their_front(meshtune, tmp_path, storage):
    """A run of two values is a multi-objective study of Optuna's, whose best trials are the front that it prints."""
    path = write_replay(tmp_path)
    options = [*options_of("[step_time, memory]"), "--storage", storage]

    told, again = (meshtune("run", path, *options, *more) for more in (("--json",), ()))

    assert told.status == 0, told.err
    kept = optuna.load_study(study_name=told.json["study_name"], storage=storage)
    assert [direction.name for direction in kept.directions] == ["MINIMIZE"] * 2
    assert kept.metric_names == ["step time [s]", "peak memory [GiB]"]
    front = told.json["front"]
    assert {entry["trial"] for entry in front} == {trial.number for trial in kept.best_trials}
    assert [entry["step_time"] for entry in front] == sorted(entry["step_time"] for entry in front)
    assert [entry["memory"] for entry in front] == sorted((entry["memory"] for entry in front), reverse=True)
    assert told.json["step_time_s"] == pytest.approx(front[0]["step_time"])
    assert f"better in both values than these {len(front)}" in again.out
    for command in ("status", "trials", "best", "rank", "report"):
        assert meshtune(command, path, *options).status == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_energy_orders_candidates_and_trials(meshtune, simulated, storage):
    """A study of energy ranks by it, its trials' values are energies, and the best is the one of the least."""
    options = [*options_of("energy_per_token", **{"search.max_trials": 4}), "--storage", storage]
    ranked = meshtune("rank", simulated, *options, "--json").json["configs"]

    told = meshtune("run", simulated, *options, "--json")

    assert told.status == 0, told.err
    energies = [row["energy_per_token"] for row in ranked]
    assert energies == sorted(energies)
    kept = optuna.load_study(study_name="small", storage=storage)
    assert kept.metric_names == ["energy of a token [J]"]
    best = kept.best_trial
    values = {name: value for name, value in told.json["best"].items() if name != "assignment"}  # kept as a code
    assert {name: best.params.get(name, value) for name, value in values.items()} == values
    assert told.json["step_time_s"] < best.value * 1e6, "the step time is told, not the energy"
    found = meshtune("trials", simulated, *options, "--json").json
    assert found["best_trial"] == best.number
    assert meshtune("rank", simulated, *options).status == 0


def test_on_the_same_devices_cost_is_proportional_to_time(tmp_path):
    """Where every candidate pays for the same devices, the order by cost is that by step time."""
    path = tmp_path / "study.yaml"
    path.write_text(study(objective="cost_per_token", cost="{price_per_device_hour: 2}"), encoding="utf-8")
    config = load_study(path)

    (cost,) = objective_of(prepared_of(config)).values

    assert cost.log_rate.min() == pytest.approx(cost.log_rate.max())
    # eight devices at 2 an hour, 16 sequences of 4,096 tokens per step
    assert np.exp(cost.log_rate[0]) == pytest.approx(1e6 * 8 * 2 / 3600 / (16 * 4096))


@pytest.mark.slow
def test_idle_hosts_that_are_given_back_make_a_layout_cheaper(meshtune, simulated):
    """Hosts that are paid for cost the same idle or not; if they are given back, a layout without them is cheapest."""
    options = options_of("cost_per_token", cluster=MIXED, current="{pp: 1, tp: 8, dp: 4}", space="{tp: [8], vpp: [1]}")
    prices = ("--set", "cost.price_per_device_hour=2")
    paid, released = (
        meshtune("rank", simulated, *options, *prices, "--set", f"cost.idle_hosts={idle}", "--top", 500, "--json").json
        for idle in ("paid", "released")
    )

    ratios = {round(row["cost_per_token"] / row["step_time_s"], 9) for row in paid["configs"]}
    assert len(ratios) == 1
    by_cost = [row["cost_per_token"] for row in released["configs"] if row["fits"]]
    assert by_cost == sorted(by_cost)
    first, usual = released["configs"][0], paid["configs"][0]
    assert "h" in first["assignment"]
    assert first["cost_per_token"] < usual["cost_per_token"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_stored_study_keeps_its_objective(meshtune, simulated, storage):
    """Trials that measured energies do not go on as step times, nor the other way round."""
    few = {"search.max_trials": 1}
    assert meshtune("run", simulated, *options_of("energy_per_token", **few), "--storage", storage).status == 0

    assert_users_mistake(meshtune("run", simulated, "--storage", storage), "objective", "no longer mean the same")
    more = options_of("energy_per_token", **{"search.max_trials": 2})
    assert meshtune("run", simulated, *more, "--storage", storage, "--json").json["trials"] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "cost_per_token"}, ("objective", "cost_per_token", "price of every device", "cost:")),
        ({"objective": "speed"}, ("objective", "speed", "step_time")),
        ({"objective": "memory"}, ("objective", "two different values", "[step_time, memory]")),
        ({"objective": "[step_time, step_time]"}, ("objective", "two different values")),
        ({"objective": "energy_per_token", "search": "{acquisition: ei_per_second}"}, ("search.acquisition", "leave")),
        ({"objective": "energy_per_token", "search": "{repeats: 2}"}, ("search.repeats", "leave")),
        ({"objective": "energy_per_token", "cluster": "{name: trn2}"}, ("objective", "power limit", "Trainium2")),
        ({"cost": "{prices: p.yaml, price_per_device_hour: 2}"}, ("cost.price_per_device_hour", "keep one of the two")),
        ({"cost": "{prices: none.yaml}"}, ("none.yaml", "no such file")),
        ({"limits": "{max_days: 0}"}, ("limits.max_days", "greater than 0")),
        ({"cost": "{idle_hosts: free}"}, ("cost.idle_hosts", "free", "'paid' or 'released'")),
    ],
)
def test_bad_keys_of_costs(meshtune, tmp_path, changes, words):
    """A key on costs that cannot work is told with its value and what would be right."""
    path = tmp_path / "study.yaml"
    path.write_text(study(**changes), encoding="utf-8")

    assert_users_mistake(meshtune("rank", path), *words)
