"""Answers that leave hosts idle: which, what that gains, and how flags and trials follow."""

from pathlib import Path

import pytest
import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.programs.small_commands import backend_of
from trials.command.slurm.jobs import SlurmJobs
from trials.trial_keys import ProxyOptions
from tuner.export import find_exporter
from tuner.forecast.candidates import candidates_of
from tuner.replan.cluster_states import Pricing
from tuner.run.studies import prepared_of
from tuner.search.proxy.proxy_trials import proxy_of
from tuner.space.fewer_hosts import leaves_hosts_idle
from tuner.study_file.config import load_study

STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "unlike-hosts.yaml"
SIX_HOSTS = ("cluster={groups: [{name: dgx-a100, hosts: 2}, {name: v100-pcie, hosts: 4}]}", "job.global_batch_size=192")
FEW = {"tp": [4, 8], "vpp": [1], "cp": [1], "up": [1], "mbs": [2, 4]}
"""Degrees with which a space is quick to build."""
ON_TWO = ParallelConfig(dp=2, tp=8, assignment=Assignment(hosts=(0, 1)))


@pytest.fixture
def study(tmp_path):
    """Writes the shipped study with some keys replaced, and returns its path."""

    def write(**keys) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(STUDY.read_text(encoding="utf-8")) | keys), encoding="utf-8")
        return path

    return write


@pytest.mark.slow
def test_the_answer_says_what_idle_hosts_gain_and_cost(meshtune, study, tmp_path):
    """`rank`, `best` and `export` name the idle hosts, their share, and the ratio to the best layout on all hosts."""
    storage = ("--storage", f"sqlite:///{tmp_path}/none.db")
    path = study(space=FEW)
    ranked, best = (meshtune(command, path, *storage, "--json").json for command in ("rank", "best"))
    on_all = meshtune("rank", path, "--set", "space.assignment=[layers, hosts]", *storage, "--json").json
    shown, flags = meshtune("rank", path, *storage), meshtune("export", path, "--to", "megatron", *storage)

    gain = on_all["configs"][0]["step_time_s"] / ranked["configs"][0]["step_time_s"]
    assert gain > 1
    assert on_all["idle_hosts"] is None
    assert ranked["idle_hosts"]["hosts"] == best["idle_hosts"]["hosts"]
    found = ranked["idle_hosts"]
    assert found == {"hosts": [1, 2], "device_share": pytest.approx(2 / 3), "gain": pytest.approx(gain, rel=0.02)}
    idle, best_gain = "leaves 2 of 2 v100-pcie hosts idle: ", best["idle_hosts"]["gain"]
    said = f"{found['gain']:.2f} times as fast as the best layout that uses all; idle devices 67% of the cluster"
    assert f"The first {idle}{said}" in shown.out
    assert f"{idle}predicted to be {best_gain:.2f} times as fast" in flags.err
    assert "launch on 1 node, without the other 2" in flags.out


@pytest.mark.slow
def test_candidates_on_fewer_hosts_are_few_and_near_the_best():
    """At most 15 candidates leave hosts idle, and each is predicted to be at most a tenth slower than the best."""
    config = load_study(STUDY)
    candidates = candidates_of(config.problem)
    seconds = candidates.estimate.step_time_s
    is_idle = leaves_hosts_idle(config.problem.setting.cluster, candidates.space.grid)
    fits = candidates.space.memory.fits(config.problem.options.memory_headroom)

    assert 0 < is_idle.sum() <= 15
    assert (seconds[is_idle] < 1.1 * seconds[fits & ~is_idle].min()).all()


def test_exports_count_the_nodes_in_use():
    """NeMo gets the number of listed hosts, and the JSON names them in the order of node ranks."""
    setting = load_study(STUDY, overrides=SIX_HOSTS).problem.setting
    chosen = ParallelConfig(dp=3, tp=8, assignment=Assignment(hosts=(5, 0, 1)))

    assert "recipe.trainer.num_nodes = 3" in find_exporter("nemo")(setting, chosen).text
    assert yaml.safe_load(find_exporter("json")(setting, chosen).text)["cluster"]["hosts_in_rank_order"] == [5, 0, 1]


def test_a_command_that_reaches_its_hosts_gets_their_numbers(study):
    """With `launch: once`, placeholders hold the hosts that a layout uses, their number and their devices."""
    trial = {"backend": "command", "command": ["run", "{hosts}", "{num_hosts}", "{num_devices}"], "launch": "once"}
    backend = load_study(study(trial=trial), overrides=SIX_HOSTS).trials.backend
    plans = [backend.plan(config, 0) for config in (ON_TWO, ParallelConfig(dp=6, tp=8))]

    assert [[dict(plan.values)[name] for name in ("hosts", "num_hosts", "num_devices")] for plan in plans] == [
        ["0,1", "2", "16"],
        ["0,1,2,3,4,5", "6", "48"],
    ]


def test_trials_that_take_all_hosts_are_not_asked_to_leave_some(study):
    """Where trials take all hosts, a study that asks for idle hosts, or has some today, is refused."""
    cluster = {"name": "dgx-h100", "hosts": 3}
    command = {"backend": "command", "command": ["run", "{hosts}"], "launch": "per_host"}
    asked, today = {"assignment": ["idle_hosts"]}, {"dp": 2, "tp": 8, "assignment": "hosts=0/1"}
    with pytest.raises(ConfigError, match="trials that can run on some of the hosts") as refused:
        load_study(study(cluster=cluster, trial=command, space=asked))
    assert refused.value.key == "space.assignment"
    with pytest.raises(ConfigError, match="take all 3 hosts"):
        load_study(study(cluster=cluster, trial=command, current=today, space={"assignment": ["hosts"]}))
    with pytest.raises(ConfigError, match="not supported by the runtime torch-reference"):
        load_study(study(runtime="torch-reference", trial={"backend": "torch"}, space=asked))
    once = load_study(study(cluster=cluster, trial=command | {"launch": "once"}, current=today, space=asked))
    assert (once.problem.current, once.problem.options.uneven) == (ON_TWO, ("idle_hosts",))


def test_a_job_of_slurm_asks_for_the_hosts_that_a_layout_uses():
    """A trial's job has as many nodes as its layout lists hosts."""
    jobs = SlurmJobs(study="study-", outputs=Path("/shared"))
    backend = backend_of(cluster=find_cluster("dgx-h100", hosts=4), slurm=jobs)
    jobs_of = [backend.job_of(jobs, backend.plan(config, 0), config) for config in (ON_TWO, ParallelConfig(dp=4, tp=8))]

    assert [option for job in jobs_of for option in job.options if "--nodes" in option] == ["--nodes=2", "--nodes=4"]


def test_like_hosts_are_left_out_where_that_is_asked_for(study):
    """Seven like hosts keep all by default, and with `idle_hosts` a layout may use fewer."""
    cluster = {"name": "dgx-h100", "hosts": 7}
    every, fewer = (
        candidates_of(load_study(study(cluster=cluster, **keys)).problem).space.grid
        for keys in ({}, {"space": {"assignment": ["idle_hosts"]}})
    )

    assert [hosts for hosts, _ in every.by_host_order()] == [()]
    assert {len(one.hosts) for one in fewer.assignments} - {0} <= set(range(1, 7))
    assert not fewer.is_even


@pytest.mark.slow
def test_replanning_goes_on_from_a_layout_with_idle_hosts():
    """Fewer hosts of a replan have spaces of their own, without further idle hosts."""
    pricing = Pricing(prepared_of(load_study(STUDY, overrides=SIX_HOSTS)))
    space = pricing.space_on(pricing.base((0, 1, 2, 3)))

    assert len(space.grid)
    assert {len(one.hosts) for one in space.grid.assignments} <= {0, 4}


@pytest.mark.slow
def test_a_profile_that_names_micro_batches_is_searched_with_them(study, tmp_path):
    """On unlike hosts uneven micro-batches are candidates by default wherever the runtime supports them."""
    catalog = Path(__file__).resolve().parents[4] / "costmodels" / "catalog" / "runtimes" / "megatron-core.yaml"
    profile = yaml.safe_load(catalog.read_text(encoding="utf-8"))
    profile["supports"]["uneven"] = ["layers", "micro_batches", "hosts"]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    grid = candidates_of(load_study(study(runtime="own.yaml", space=FEW)).problem).space.grid

    assert any(grid.assignments[code].micro_batches for code in grid.assignment.tolist())


def test_proxies_of_layouts_with_idle_hosts_use_their_own(study):
    """A proxy on fewer like hosts does not inherit the list of hosts of its candidate."""
    cluster = {"name": "dgx-h100", "hosts": 5}
    setting = load_study(study(cluster=cluster, job={"sequence_length": 2048, "global_batch_size": 64})).problem.setting
    candidate = ParallelConfig(dp=4, tp=8, assignment=Assignment(hosts=(0, 1, 2, 3)))
    proxy = proxy_of(candidate, setting, ProxyOptions(hosts=2, layers="auto", full_trials=1))

    assert proxy is not None
    assert (proxy.config.assignment.hosts, proxy.config.num_devices) == ((), 16)
