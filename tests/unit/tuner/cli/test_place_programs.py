"""`meshtune place` for steps of JAX functions and torch modules, from the factory to the schedule."""

import pytest

from tests.oracles.schedule_check import violations
from tests.oracles.schedule_exhaustive import schedule_exhaustively
from tests.support.studies.command_line import assert_users_mistake
from tuner.place.operators.answer import check_answer, place_operators
from tuner.place.operators.graph_file import read_operator_placement

pytest.importorskip("jax", reason="captured steps need JAX: pip install 'meshtune[jax]'")
pytest.importorskip("torch", reason="captured steps need torch: pip install 'meshtune[torch]'")

pytestmark = pytest.mark.slow  # JAX and torch are optional

TOWERS = "benchmarks.zoo.towers:two_towers_small"
PERCEPTRON = "benchmarks.zoo.torch_modules:perceptron_small"
TWO = ("--time-limit", "2")


@pytest.mark.parametrize(("option", "factory"), [("--jax", TOWERS), ("--torch", PERCEPTRON)])
def test_a_step_is_placed(meshtune, option, factory):
    """The answer costs no less than its bound and no more than its baselines, and says what was coarsened."""
    found = meshtune("place", option, factory, "--most-operators", "12", *TWO, "--json").json
    told = meshtune("place", option, factory, "--most-operators", "12", *TWO).out
    (captured,) = found["captured"]

    assert found["lower_bound_s"] <= found["cost_s"] <= min(one["cost_s"] or 1e9 for one in found["baselines"])
    assert captured["factory"] == factory
    assert len(found["operators"]) == captured["operators"] <= 12 < captured["captured"]
    assert f"{captured['captured']} operators, coarsened to {captured['operators']}" in told


def test_towers_run_beside_each_other(meshtune):
    """Two towers of large layers take two devices, and less time than on one."""
    found = meshtune("place", "--jax", "benchmarks.zoo.towers:two_towers", *TWO, "--json").json
    alone = next(one["cost_s"] for one in found["baselines"] if one["name"] == "one device")

    assert found["cost_s"] < 0.75 * alone
    assert len({device for one in found["operators"] for device in one["devices"]}) > 1


@pytest.mark.parametrize("most", [3, 4])
def test_the_answer_for_a_coarse_graph_is_the_best_of_all_schedules(most):
    """With no gap allowed, the cost is that of trying every schedule of the coarse operators."""
    mapping = {
        "cluster": {"name": "v100-pcie", "devices_per_host": 2},
        "graphs": {"step": {"jax": TOWERS, "most_operators": most}},
    }
    placement = read_operator_placement(mapping, None)
    answer = place_operators(placement, time_s=60, gap=0)
    best = schedule_exhaustively(placement.workload)

    check_answer(answer)
    assert answer.is_proven
    assert answer.outcome.best.cost == pytest.approx(best.cost_s(placement.workload), rel=1e-9)
    assert violations(placement.workload, answer.schedule) == []


def test_a_file_holds_captured_and_stated_operators(meshtune, tmp_path):
    """A captured step stands beside a graph of the file's own operators, and each ends by itself."""
    path = tmp_path / "both.yaml"
    path.write_text(
        "cluster: {name: v100-pcie, devices_per_host: 2}\n"
        f"graphs: {{step: {{jax: '{TOWERS}', most_operators: 8}}, other: {{operators: {{a: {{tflop: 1}}}}}}}}\n",
        encoding="utf-8",
    )
    found = meshtune("place", str(path), *TWO, "--json").json

    assert [one["name"] for one in found["graphs"]] == ["step", "other"]
    assert max(one["end_s"] for one in found["graphs"]) == found["makespan_s"]


@pytest.mark.parametrize("release", [True, False])
def test_what_lives_inside_of_an_operator_takes_memory_while_it_runs(release):
    """It is released at the end of the operator, or with `release_memory: false` stays as all else does."""
    mapping = {
        "cluster": {"name": "v100-pcie", "devices_per_host": 2},
        "graphs": {"step": {"jax": TOWERS, "most_operators": 8}},
        "release_memory": release,
    }
    placement = read_operator_placement(mapping, None)
    (captured,) = placement.captured
    workload = placement.workload

    assert captured.working_bytes > 0
    if release:
        assert workload.working_bytes.max() == captured.working_bytes
        assert workload.memory_bytes.sum() == captured.state_bytes
    else:
        assert workload.working_bytes is None
        assert workload.memory_bytes.sum() >= captured.state_bytes + captured.working_bytes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "place: needs a placement file, --jax or --torch alone; this one has none"),
        (("--jax", TOWERS, "--torch", PERCEPTRON), "needs a placement file, --jax or --torch alone"),
        (("file.yaml", "--jax", TOWERS), "this one has FILE and --jax"),
        (("file.yaml", "--hosts", "2"), "--hosts = '2': is for --jax or --torch"),
        (("--jax", "benchmarks.zoo.towers"), "--jax = 'benchmarks.zoo.towers': must be module:factory"),
        (("--jax", "benchmarks.zoo.towers:two_tower"), "did you mean 'two_towers'?"),
        (("--torch", "nowhere:step"), "--torch = 'nowhere:step': can't be imported"),
        (("--jax", TOWERS, "--cluster", "dgx-a10"), "--cluster = 'dgx-a10'"),
        (("--jax", TOWERS, "--hosts", "0"), "--hosts = '0': must be a whole number of at least 1"),
        (("--jax", TOWERS, "--hosts", "3"), "--cluster: has 24 devices; operators can be placed on at most 16"),
        (("--jax", TOWERS, "--most-operators", "1"), "--most-operators = '1': must be a whole number of at least 2"),
        (("--jax", TOWERS, "--most-operators", "1000"), "--most-operators = 1000: "),
        (("--jax", TOWERS, "--export", "verl"), "--export = 'verl': is for files of modules"),
        (
            ("--torch", "benchmarks.zoo.torch_modules:llama_two_layers", "--cluster", "v100-pcie"),
            "--most-operators = 32: fits on no device: ",
        ),
    ],
)
def test_what_cannot_be_placed_is_one_message(meshtune, options, told):
    """Options that exclude each other, factories and clusters that are none, and steps that are too large."""
    assert_users_mistake(meshtune("place", *options), told)


def test_a_graph_has_one_source_of_operators(meshtune, tmp_path):
    """A captured graph takes no operators and no fusions of the file."""
    for more, key in (("operators: {a: {tflop: 1}}", "operators"), ("fusions: [{first: a, second: b}]", "fusions")):
        path = tmp_path / "both.yaml"
        path.write_text(
            f"cluster: {{name: v100-pcie}}\ngraphs: {{step: {{jax: '{TOWERS}', {more}}}}}\n", encoding="utf-8"
        )

        assert_users_mistake(meshtune("place", str(path)), f"graphs.step.{key}: cannot be combined with `jax`")
