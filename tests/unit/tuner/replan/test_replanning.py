import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster_file import cluster_from_mapping
from hardware.dynamics import HostEvent, LinkEvent, Trace, cluster_at, intervals, lost_hosts
from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import assert_users_mistake
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.answers.best import best_known
from tuner.forecast.candidates import predict_candidate
from tuner.replan import cluster_states as scenes
from tuner.replan.cluster_states import Pricing, Setup, cluster_of, fastest_hosts, has_slow_hosts, options_over
from tuner.replan.network import study_at
from tuner.replan.replanning import (
    STATISTICS,
    Assumptions,
    Course,
    course_of,
    on_trace,
    replan_trace,
    robust_choice,
    stays,
)
from tuner.run.loop import run_study
from tuner.run.studies import prepared_of
from tuner.storage.opening import find_study
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

FREE = Assumptions(restart_s=0.0, storage_bytes_per_s=1e18, checkpoint_every_s=0.0)
HOSTS = (0, 1, 2, 3)
SLOW = ("9,inter,0.5",)


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch, tmp_path):
    """Every test works in a folder of its own, with few configurations of each state of the cluster: it is quick."""
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scenes, "MOST_KEPT", 6)


def write_study(folder: Path, **changes) -> Path:
    """A study of four hosts, three of which no configuration occupies."""
    path = folder / "study.yaml"
    keys = {
        "name": "changing",
        "cluster": "{name: dgx-h100, hosts: 4}",
        "job": "{sequence_length: 4096, global_batch_size: 64}",
        "space": "{pp: [1, 2, 4], cp: [1], up: [1], vpp: [1], mbs: [1, 2]}",
    }
    path.write_text(study(**(keys | changes)), encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path):
    """The same, read."""
    return load_study(write_study(tmp_path))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The same after five trials of what two hosts have room for too, in SQLite."""
    folder = tmp_path_factory.mktemp("tuned")
    space = "{pp: [1, 2, 4], tp: [2, 4, 8], cp: [1], up: [1], vpp: [1], mbs: [1, 2]}"
    path = write_study(folder, search="{max_trials: 5, confidence: 1}", space=space)
    found = load_study(path, storage=f"sqlite:///{folder / 'done.db'}")
    run_study(found, on_progress=lambda _: None, executor=InProcessExecutor(found.trials.backend))
    return found


def lost(time_s):
    """The last host is lost."""
    return HostEvent(time_s=time_s, host=3, is_lost=True)


def back(time_s):
    """The last host returns."""
    return HostEvent(time_s=time_s, host=3, is_lost=False)


def slow(time_s, share, link="inter"):
    """A link changes its share."""
    return LinkEvent(time_s=time_s, link=link, share=share)


def trace(*events):
    """What happens, in order."""
    return Trace(events=events)


def setups(timeline):
    """What runs in each interval."""
    return [one.setup for one in timeline.stretches]


# What can run


def test_some_hosts_are_a_cluster_as_they_are_then(config):
    """A set of hosts at a time is the cluster without the others, whether these are lost or left idle."""
    nominal = config.problem.setting.cluster
    events = trace(slow(10.0, 0.5, link=(1,)), lost(20.0))

    assert cluster_of(nominal, events, 30.0, (0, 1, 2)) == cluster_at(nominal, events, 30.0)
    assert cluster_of(nominal, events, 15.0, (0, 2)).num_hosts == 2
    assert cluster_of(nominal, events, 15.0, (0, 2)) == cluster_of(nominal, events, 30.0, (0, 2))
    assert lost_hosts(events, 19.9) == ()
    assert lost_hosts(events, 20.0) == (3,)


def test_the_hosts_with_the_slowest_network_are_left_out_first(config):
    """Of unlike hosts those behind slow NICs and slow paths go first, and of equals the last."""
    nominal = config.problem.setting.cluster
    plain, nic, path = (
        intervals(nominal, trace(*events), 20.0)[-1]
        for events in ((), (slow(10.0, 0.5, link=(1,)),), (slow(10.0, 0.2, link=(0, 2)),))
    )

    assert fastest_hosts(plain, 3) == (0, 1, 2)
    assert fastest_hosts(nic, 3) == (0, 2, 3)
    assert fastest_hosts(path, 3) == (0, 1, 3)
    assert [has_slow_hosts(one, nominal) for one in (plain, nic, path)] == [False, True, True]


def test_equally_many_hosts_of_few_racks_go_on():
    """If a host of a rack is lost, the others of that rack are the first to idle, or every rack gives up one."""
    keys = {"name": "gb200-nvl72", "hosts": 8, "devices_per_host": 4, "hosts_per_domain": 4}
    racks = cluster_from_mapping(keys, Path())

    events = trace(HostEvent(time_s=20.0, host=1, is_lost=True))
    (whole, left) = intervals(racks, events, 30.0)

    assert racks.devices_per_domain == 16
    assert fastest_hosts(whole, 4) == (0, 1, 2, 3)
    assert fastest_hosts(left, 4) == (4, 5, 6, 7)
    assert fastest_hosts(left, 6) == (0, 2, 3, 4, 5, 6)
    assert (
        cluster_of(
            racks, trace(HostEvent(time_s=20.0, host=1, is_lost=True)), 25.0, fastest_hosts(left, 6)
        ).devices_per_domain
        == 12
    )


def test_of_many_states_some_stand_for_others(monkeypatch):
    """The first of each base stands for itself, then what is the farthest from those; others take the nearest."""
    monkeypatch.setattr(scenes, "MOST_CORRECTED", 3)
    values = [np.array([value]) for value in (0.0, 1.0, 9.0, 8.5, 0.2, 50.0)]

    found = scenes._representatives(["a", "a", "a", "a", "a", "b"], values)

    assert found == [0, 0, 2, 2, 0, 5]


def test_every_setup_occupies_its_hosts(config):
    """What may run in an interval stands on hosts that are there, and occupies all of their devices; without a trial
    its step times are those that `predict` gives on the cluster of the time.
    """
    events = trace(lost(10.0), back(20.0), slow(30.0, 0.1))
    course = course_of(config.problem, events, 40.0)

    options = options_over(Pricing(prepared_of(config)), [course], [], None)

    for interval, figures in zip(course.intervals, options.figures[0], strict=True):
        assert figures
        then = study_at(config, events, interval.from_s)
        for at, told in figures.items():
            setup = options.setups[at]
            assert {*interval.hosts} >= {*setup.hosts}
            assert setup.config.num_devices == 8 * len(setup.hosts)
            if setup.hosts == HOSTS:
                expected = predict_candidate(then.problem, setup.config)["step_time_s"]
                assert told.step_time_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_trials_correct_what_is_predicted_for_other_clusters(tuned):
    """What the trials measured is expected where they ran, and their common error also with a host less."""
    best = best_known(prepared_of(tuned), StoredStudies(tuned.storage).find(tuned.name))
    events = trace(lost(10.0))
    course = course_of(tuned.problem, events, 20.0)
    pricing = Pricing(prepared_of(tuned))
    whole = Setup(hosts=HOSTS, config=best.config)

    options = options_over(pricing, [course], [whole], find_study(tuned.storage, tuned.name))

    before, after = options.figures[0]
    assert options.num_trials == 5
    assert before[options.setups.index(whole)].step_time_s == pytest.approx(best.step_time_s, rel=0.02)
    at_best = best.step_time_s / predict_candidate(tuned.problem, best.config)["step_time_s"]
    for option, told in after.items():
        setup = options.setups[option]
        subject = tuned.problem.subject.on_cluster(pricing.base(setup.hosts))
        smaller = replace(tuned.problem, subject=subject)
        ratio = told.step_time_s / predict_candidate(smaller, setup.config)["step_time_s"]
        # nearer to what the trials found than to no correction
        assert abs(math.log(ratio / at_best)) < abs(math.log(at_best))


# The plan


def test_where_nothing_happens_the_fastest_runs(config):
    """Without an event the plan is the best configuration throughout, and gains nothing over staying."""
    plan = replan_trace(prepared_of(config), trace(), until_s=1000.0)

    (only,) = plan.best.stretches
    assert (only.from_s, only.to_s, only.switch_s) == (0.0, 1000.0, 0.0)
    assert only.steps == pytest.approx(1000.0 / only.step_time_s)
    # `best` prefers the plainest of predictions that agree to four digits
    assert plan.gain_over_staying == pytest.approx(0.0, abs=1e-3)


def test_a_loss_leads_to_a_configuration_of_what_is_left(config):
    """After the loss of a host the plan goes on on the others, and pays for the change and the lost work."""
    plan = replan_trace(prepared_of(config), trace(lost(3600.0)), until_s=36000.0)

    before, after = plan.best.stretches
    assert before.setup.hosts == HOSTS
    assert {*after.setup.hosts} < {0, 1, 2}
    assert after.setup.config.num_devices == 8 * len(after.setup.hosts) == 16
    assert after.lost_work_s == 900.0
    assert after.switch_s > 120.0
    lost_steps = after.lost_work_s / before.step_time_s + after.switch_s / after.step_time_s
    assert after.steps == pytest.approx(32400.0 / after.step_time_s - lost_steps)
    assert "h3 is lost" in after.reason
    assert plan.gain_over_staying >= 0


def test_nobody_leaves_a_host_before_a_loss_that_is_not_foreseen(config):
    """Soon before a loss, one who knows of it is already on the other hosts; one who does not pays for the change."""
    foreseen, unforeseen = (
        replan_trace(prepared_of(config), trace(lost(60.0)), until_s=7200.0, foresees=foresees)
        for foresees in (True, False)
    )

    assert setups(foreseen.best)[0].hosts != HOSTS == setups(unforeseen.best)[0].hosts
    assert unforeseen.best.stretches[1].switch_s > 120.0
    assert unforeseen.best.steps < foreseen.best.steps


def test_a_trace_may_begin_with_the_loss(tuned):
    """What to do once a host is gone: the trials correct the plan though no setup of all hosts can run."""
    plan = replan_trace(prepared_of(tuned), trace(lost(0.0)), until_s=3600.0)

    (only,) = plan.best.stretches
    (staying,) = plan.staying.stretches
    assert plan.num_trials == 5
    assert len(only.setup.hosts) == 2
    assert (only.switch_s, only.lost_work_s) == (0.0, 0.0)
    assert staying.setup.config.dp < only.setup.config.num_devices
    assert only.step_time_s <= staying.step_time_s


def test_a_returned_host_leads_back(config):
    """When the host returns, so does the configuration of all hosts; who stays waits for it, and everybody does where
    the loss is shorter than the change.
    """
    plan = replan_trace(prepared_of(config), trace(lost(3600.0), back(40000.0)), until_s=80000.0)

    first, middle, last = setups(plan.best)
    assert first.hosts == last.hosts == HOSTS
    assert first == last
    assert len(middle.hosts) == 2
    assert [one.setup is None for one in plan.staying.stretches] == [False, True, False]
    assert plan.staying.stretches[2].lost_work_s == 0.0
    assert plan.staying.stretches[1].lost_work_s == 900.0
    assert plan.gain_over_staying > 0.1
    short = replan_trace(prepared_of(config), trace(lost(3600.0), back(3660.0)), until_s=7200.0).best
    assert [setup is None for setup in setups(short)] == [False, True, False]
    assert short.stretches[1].lost_work_s == 900.0


@pytest.mark.parametrize(("restart_s", "changes"), [(0.0, True), (20000.0, False)])
def test_a_slow_network_is_left_only_if_that_pays(config, restart_s, changes):
    """With a network that slows everything down the plan changes where that is cheap, and goes on where it is dear."""
    events = trace(slow(3600.0, 0.01, link=(3,)), slow(9000.0, 1.0, link=(3,)))

    plan = replan_trace(prepared_of(config), events, until_s=12600.0, assumptions=replace(FREE, restart_s=restart_s))

    assert (len(set(setups(plan.best))) > 1) == changes
    assert plan.gain_over_staying >= -1e-3
    if changes:
        assert "more steps until" in plan.best.stretches[1].reason


def test_staying_after_a_loss_for_good_means_less_data_parallelism(config):
    """Where a host never returns, who stays keeps all degrees but dp, on hosts that this occupies."""
    pricing = Pricing(prepared_of(config))
    chosen = ParallelConfig(pp=2, tp=2, dp=8, zero_stage=1, sequence_parallel=True)
    for_good = Course(trace=trace(lost(10.0)), intervals=intervals(pricing.nominal, trace(lost(10.0)), 20.0))
    a_while = trace(lost(10.0), back(15.0))

    first, then = stays(pricing, for_good, chosen)
    waiting = stays(pricing, Course(trace=a_while, intervals=intervals(pricing.nominal, a_while, 20.0)), chosen)

    assert first == Setup(hosts=HOSTS, config=chosen)
    assert then == Setup(hosts=(0, 1), config=replace(chosen, dp=4))
    assert waiting == [first, None, first]


@pytest.mark.slow
@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_robust_choice_is_that_of_brute_force(config, statistic):
    """Among all configurations of all hosts none has a better statistic, each priced by itself on each trace."""
    traces = [trace(slow(100.0, 0.02)), trace(lost(100.0), back(500.0)), trace(slow(300.0, 0.3, link=(1,)))]
    pricing = Pricing(prepared_of(config))
    courses = [course_of(config.problem, one, 2000.0) for one in traces]

    choice = robust_choice(prepared_of(config), traces, statistic, until_s=2000.0)

    def time_per_token_s(one, course):
        steps, before = 0.0, None
        for interval in course.intervals:
            if interval.hosts != HOSTS:
                steps -= min(900.0, before[1]) / before[0]
                waited = True
                continue
            step_s = predict_candidate(study_at(config, course.trace, interval.from_s).problem, one)["step_time_s"]
            seconds = interval.to_s - interval.from_s
            steps += seconds / step_s
            if before and waited:
                told = figures[one]
                steps -= (120.0 + told.state_bytes / min(5e9 / 8, told.nic_bytes_per_s)) / step_s
            before, waited = (step_s, seconds), False
        return on_trace(steps, 2000.0, config.problem.setting.job.tokens_per_step).time_per_token_s

    grid = pricing.space_on(pricing.nominal).grid
    fits = config.problem.space().memory.fits(config.problem.options.memory_headroom)
    every = [grid.config(at) for at in np.flatnonzero(fits).tolist()]
    options = options_over(pricing, courses, [Setup(hosts=HOSTS, config=one) for one in every], None)
    figures = {options.setups[at].config: told for at, told in options.figures[1][0].items()}
    expected = {one: STATISTICS[statistic]([time_per_token_s(one, each) for each in courses]) for one in every}
    assert choice.figure_s == pytest.approx(min(expected.values()), rel=1e-9)
    assert expected[choice.config] == pytest.approx(choice.figure_s, rel=1e-9)


def test_a_statistic_of_times_counts_traces_that_never_end():
    """The 90th percentile is a time that nine traces of ten do not exceed; one of ten may be infinite."""
    times = [1.0] * 8 + [2.0, math.inf]

    assert STATISTICS["p90"](times) == math.inf
    assert STATISTICS["p90"]([*times[:-1], 2.0, 1.0]) == 2.0
    assert STATISTICS["mean"](times) == math.inf


def test_a_stored_study_that_means_something_else_is_refused(tuned):
    """Trials of another job correct nothing."""
    other = load_study(Path(tuned.file), storage=tuned.storage.url, overrides=["job.sequence_length=2048"])

    with pytest.raises(ConfigError, match="would no longer mean the same"):
        replan_trace(prepared_of(other), trace(), until_s=10.0)


# The command


def write_trace(*rows, name="trace.csv"):
    """A trace file of those rows, below the header; its name."""
    Path(name).write_text("\n".join(["time_s,link,share", *rows]) + "\n", encoding="utf-8")
    return name


def test_the_command_tells_programs_and_people(meshtune, tuned):
    """`replan --json` prints timeline, steps, gain and assumptions, and the parts of the timeline add up; without it
    there are a table, a sentence for each change, and what was assumed.
    """
    file = write_trace("3600,h3,lost", "40000,h3,back")
    asked = ("replan", tuned.file, "--trace", file, "--storage", tuned.storage.url)

    found = meshtune(*asked, "--until", 80000, "--switch-restart", 60, "--json").json
    shown = meshtune(*asked)

    assert found.keys() >= {"timeline", "gain_over_staying", "steps", "assumptions", "staying", "until_s", "trials"}
    keys = {"from_s", "to_s", "config", "hosts", "step_time_s", "steps", "reason", "switch_s", "lost_work_s"}
    assert all(one.keys() == keys for one in found["timeline"])
    assert sum(one["steps"] for one in found["timeline"]) == pytest.approx(found["steps"])
    assert [one["to_s"] for one in found["timeline"]] == [3600.0, 40000.0, 80000.0]
    assert found["steps"] / found["staying"]["steps"] - 1 == pytest.approx(found["gain_over_staying"])
    assert (found["assumptions"]["restart_s"], found["trials"]) == (60.0, 5)
    for words in (
        "3600 s: h3 is lost: the fastest on the 3 remaining hosts, 1 of them idle.",
        "40000 s: h3 is back: ",
        "predictions corrected by 5 trials",
        "over keeping the study's best",
        "Assumed: 120 s to restart, 5 GB/s",
    ):
        assert words in shown.out


def test_the_study_s_own_trace_is_taken(meshtune, tmp_path):
    """A study whose cluster names a trace needs no option."""
    write_trace("60,inter,0.5")
    path = write_study(tmp_path, cluster="{name: dgx-h100, hosts: 4, trace: trace.csv}")

    assert meshtune("replan", path, "--json").json["until_s"] == 3660.0


def test_the_robust_command_prints_figures_of_each_trace(meshtune, tmp_path):
    """`--robust` over two traces names one configuration and what it makes of each."""
    files = [write_trace("60,inter,0.5", name="a.csv"), write_trace("60,h1,0.01", name="b.csv")]
    asked = ("replan", write_study(tmp_path), "--robust", "p90", "--trace", files[0], "--trace", files[1])

    found, shown = meshtune(*asked, "--json").json, meshtune(*asked)

    assert [one["trace"] for one in found["traces"]] == files
    assert found["time_per_token_s"] == max(one["time_per_token_s"] for one in found["traces"])
    assert found["gain_over_staying"] >= 0
    assert shown.status == 0
    assert "Best over 2 traces: pp=" in shown.out


def test_nothing_works_without_a_configuration(meshtune, tmp_path):
    """Where no configuration fits at any time the command ends 1."""
    path = write_study(tmp_path, model="llama3-405b", cluster="{name: dgx-h100, hosts: 1}")

    done = meshtune("replan", path, "--trace", write_trace("60,intra,0.5"), "--json")

    assert done.status == 1
    assert all(one["config"] is None for one in done.json["timeline"])
    assert done.json["gain_over_staying"] is None


REPLAN = ("replan", "study.yaml", "--trace", "trace.csv")
SIMULATE = ("simulate", "study.yaml", "--config", "tp=8,dp=4")


@pytest.mark.parametrize(
    ("rows", "command", "words"),
    [
        (("9,inter,0.5", "3,inter,1"), REPLAN, ("trace.csv:3", "time_s = '3'", "ascend in time")),
        (("3,h9,lost",), REPLAN, ("trace.csv:2", "h9", "h0 to h3")),
        (("3,inter,0",), REPLAN, ("trace.csv:2", "share = '0'", "above 0")),
        (tuple(f"3,h{host},lost" for host in HOSTS), REPLAN, ("trace.csv:5", "none is left")),
        (SLOW, (*REPLAN, "--until", "9"), ("--until = '9'", "later than the last event", "above 9")),
        (SLOW, (*REPLAN, "--until", "soon"), ("--until = 'soon'", "must be a number above 0")),
        (SLOW, (*REPLAN, "--robust", "best"), ("--robust = 'best'", "mean, p90")),
        (SLOW, (*REPLAN, "--robust", "mean", "--unforeseen"), ("--unforeseen", "--robust, which plans no changes")),
        (SLOW, (*REPLAN, "--trace", "trace.csv"), ("--trace", "--robust mean")),
        (SLOW, (*REPLAN, "--switch-gb-per-s", "0"), ("--switch-gb-per-s = '0'", "above 0")),
        (SLOW, (*REPLAN, "--switch-restart", "-1"), ("--switch-restart = '-1'", "at least 0")),
        (SLOW, (*REPLAN, "--swich-restart", "1"), ("--switch-restart",)),
        (SLOW, REPLAN[:2], ("has none",)),
        (SLOW, (*SIMULATE, "--at", "60"), ("--at = '60'", "needs a trace")),
        (SLOW, (*SIMULATE, "--network", "trace.csv"), ("--network", "needs --at")),
        (SLOW, (*SIMULATE, "--at", "-1", "--network", "trace.csv"), ("--at = '-1'", "at least 0")),
    ],
)
def test_mistakes_end_in_one_message(meshtune, tmp_path, rows, command, words):
    """Bad traces and options end with status 2, one line on stderr, and nothing on stdout."""
    write_trace(*rows)
    write_study(tmp_path)

    assert_users_mistake(meshtune(*command), *words)


# One step at a time


@pytest.mark.parametrize("command", ["simulate", "predict"])
def test_a_step_on_a_slower_network_takes_longer(meshtune, tmp_path, command):
    """`--at` takes the cluster as the trace has it then; before the first event it is the nominal one."""
    path, file = write_study(tmp_path), write_trace("60,inter,0.02")

    plain, before, after = (
        meshtune(command, path, "--config", "tp=8,dp=4", "--json", *more).json["step_time_s"]
        for more in ((), ("--at", 59, "--network", file), ("--at", 60, "--network", file))
    )

    assert before == plain < after


def test_a_step_after_a_loss_needs_fewer_devices(meshtune, tmp_path):
    """A configuration of all devices cannot run after a loss, and the message says how many are left."""
    write_trace("60,h1,lost", "70,h2,lost")
    write_study(tmp_path, cluster="{name: dgx-h100, hosts: 4, trace: trace.csv}")

    refused = meshtune(*SIMULATE, "--at", 80)
    fits = meshtune(*SIMULATE[:3], "tp=8,dp=2", "--at", 80, "--json")

    assert_users_mistake(refused, "at 80 s h1, h2 are lost, and 16 of 32 devices are left", "dp=2")
    assert fits.status == 0, fits.err
