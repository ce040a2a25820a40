from dataclasses import replace

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import PLANS, concatenate
from costmodels.job.runtime import find_prior
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.hypotheses import FEWEST_PAST, TRUST
from tests.support.graphs.layer_changes import change_for
from tests.support.settings.small_spaces import setting_of
from tests.support.settings.synthetic_runs import small_model
from trials.backend import Status
from trials.simulated.backend import SimulatedBackend
from tuner.search.earlier_runs import Past, PastRun, PastSample
from tuner.search.observations import observations_of
from tuner.search.prior import MOST_GROUPS, MOST_RUNS, initial_posterior, learn, nearest_groups, under
from tuner.search.sampler import ThompsonSampler
from tuner.space.enumeration import enumerate_space

optuna.logging.set_verbosity(optuna.logging.ERROR)


def problem_of(model=None, **changes):
    """A setting of one host, and the candidates that surely fit; nobody has fitted the profile yet."""
    setting, options = setting_of("megatron", batch=32, **changes)
    job = replace(setting.job, model=model) if model else setting.job
    grid, _ = enumerate_space(replace(setting, job=job), options)
    runtime = find_prior("megatron-core")
    setting = Setting(job=job, cluster=setting.cluster, runtime=runtime)
    measured = MeasuredSetting(setting=setting, memory="reserved", stage="fullest")
    memory = estimate_memory(setting, grid)
    return measured, grid.take(np.flatnonzero(memory.needed_bytes < 0.7 * memory.capacity_bytes))


@pytest.fixture(scope="module")
def problem():
    """Llama 3 8B on eight devices."""
    return problem_of()


@pytest.fixture(scope="module")
def small():
    """A smaller model on the same devices: what was run before."""
    return problem_of(small_model(2048))


@pytest.fixture(scope="module")
def truth(problem):
    """The runtime as it really is: its network has 70% of the speed that the profile says."""
    runtime = problem[0].setting.runtime
    return runtime.with_constants({"network_efficiency": 0.7 * runtime.network_efficiency})


def log_steps(setting, runtime, grid):
    """Logarithm of the step times under that runtime [n]."""
    memory = estimate_memory(replace(setting, runtime=runtime), grid)
    return np.log(estimate_step(replace(setting, runtime=runtime), grid, memory=memory).step_time_s)


def world_of(setting, seed):
    """A simulated world of the setting, whose operators err by 30%."""
    return SimulatedBackend(job=setting.job, cluster=setting.cluster, runtime=setting.runtime, seed=seed)


def run_of(setting, config, step_time_s, **changes):
    """A run that ended well."""
    run = PastRun(
        group="before",
        job=setting.job,
        cluster=setting.cluster,
        runtime=setting.runtime.name,
        facts=(),
        config=config,
        status=Status.OK,
        step_time_s=step_time_s,
        log_spread=0.01,
        num_steps=5,
        peak_memory_bytes=None,
        origin="measured",
    )
    return replace(run, **changes)


def past_of(problem, log_step_s, count, **changes):
    """Every so many candidates of a problem, as `count` runs that took so long."""
    measured, grid = problem
    at = np.linspace(0, len(grid) - 1, count).astype(int)
    return Past(
        runs=tuple(
            run_of(measured.setting, grid.config(int(one)), float(np.exp(log_step_s[one])), **changes) for one in at
        )
    )


@pytest.fixture(scope="module")
def past(small, truth):
    """Twelve runs of the smaller model on the true runtime, with a noise of 1%."""
    measured, grid = small
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(grid))
    return past_of(small, log_steps(measured.setting, truth, grid) + noise, 12)


def belief_after(problem, past):
    """What is believed of a problem's candidates."""
    measured, grid = problem
    return initial_posterior([(measured, np.arange(len(grid)))], grid, past, other_profiles=())


@pytest.fixture(scope="module")
def informed(problem, past):
    """The posterior with those runs."""
    return belief_after(problem, past)


# What is learned


@pytest.mark.slow
def test_a_wrong_constant_is_learned_from_runs_of_another_model(problem, past, truth, informed):
    """The network's speed is fitted to runs of a smaller model: predictions of the study's own err by less than
    half of what they did, and the constant is nearer to the truth. Whoever waits hears once what is learned from.
    """
    measured, grid = problem
    true = log_steps(measured.setting, truth, grid)
    cold, _, warm = informed.steps
    heard = []
    learned = learn(past, measured.setting, on_progress=heard.append)

    assert heard == ["learning from 12 earlier runs of 1 job"]
    assert np.abs(warm.log_predicted - true).mean() < 0.5 * np.abs(cold.log_predicted - true).mean()
    told = measured.setting.runtime.network_efficiency
    assert truth.network_efficiency < learned.runtime.network_efficiency < 0.9 * told
    assert [len(group.step_time_s) for group in learned.groups] == [12]
    assert learned.operators == ()
    assert warm.chance == TRUST


def test_without_a_past_nothing_is_learned(problem):
    """No history, or an empty one, leaves one hypothesis, of the profile as it is."""
    setting, grid = problem[0].setting, problem[1]

    for nothing in (None, Past()):
        cold, _ = belief_after(problem, nothing).steps
        assert np.allclose(cold.log_predicted, log_steps(setting, setting.runtime, grid))


@pytest.mark.slow
def test_only_sound_runs_of_the_runtime_are_used(problem, past):
    """Runs of another runtime teach nothing, alone or beside others; those that crashed, were pruned, or that their
    source calls outliers are left out of fit and groups.
    """
    setting = problem[0].setting
    foreign = tuple(replace(run, runtime="nanotron", group="elsewhere", step_time_s=1e3) for run in past.runs)
    bad = (
        replace(past.runs[0], status=Status.PRUNED, step_time_s=None),
        replace(past.runs[1], status=Status.OUT_OF_MEMORY, step_time_s=None, peak_memory_bytes=2**40),
        replace(past.runs[2], is_clean=False, step_time_s=99.0),
    )

    learned = learn(Past(runs=foreign + past.runs[3:] + bad), setting)

    assert learn(Past(runs=foreign), setting) is None
    assert [len(group.step_time_s) for group in learned.groups] == [9]
    assert learned.runtime == learn(Past(runs=past.runs[3:]), setting).runtime


@pytest.mark.slow
@pytest.mark.parametrize(("count", "is_told"), [(FEWEST_PAST - 1, False), (FEWEST_PAST, True)])
def test_whoever_learns_has_a_hypothesis_of_it(problem, past, count, is_told):
    """A past is used as a whole or not at all: too few runs fit no profile either, whose operators nobody would own."""
    posterior = belief_after(problem, Past(runs=past.runs[:count]))

    assert (learn(Past(runs=past.runs[:count]), problem[0].setting) is not None) == is_told
    assert len(posterior.steps) == 2 + is_told


@pytest.mark.slow
def test_facts_of_a_run_stay_its_own(problem, small, past):
    """Runs that are known to have been without an overlap are predicted so, and form a group of their own."""
    facts = (("overlaps_gradients", not problem[0].setting.runtime.overlaps_gradients),)
    unlike = tuple(replace(run, facts=facts) for run in past.runs[::2])

    learned = learn(Past(runs=past.runs[1::2] + unlike), problem[0].setting)

    assert sorted(len(group.step_time_s) for group in learned.groups) == [6, 6]
    measured, grid = small
    with_fact = replace(learned.runtime, **dict(facts))
    expected = log_steps(measured.setting, with_fact, grid.take(np.linspace(0, len(grid) - 1, 12).astype(int)[::2]))
    assert np.log(learned.groups[1].predicted.step_time_s) == pytest.approx(expected)


@pytest.mark.slow
def test_peaks_of_memory_are_learned_too(problem, past):
    """Runs whose peaks were a fifth above the prediction make the candidates' memory larger."""
    before = learn(past, problem[0].setting).groups[0].predicted.peak_bytes
    runs = tuple(replace(run, peak_memory_bytes=int(1.2 * peak)) for run, peak in zip(past.runs, before, strict=True))

    *_, warm = belief_after(problem, Past(runs=runs)).memory

    assert warm.chance == TRUST
    assert warm.past.values == pytest.approx(np.log(1.2), abs=1e-6)


# Which runs are looked at


def test_the_nearest_jobs_come_first_and_are_thinned(problem, small):
    """Jobs on other devices, of other sizes or on other numbers of devices come later; of many jobs and runs the
    nearest MOST_GROUPS are kept, with MOST_RUNS runs each, from the first to the last.
    """
    measured, grid = problem
    other, _ = setting_of("megatron", batch=32, hosts=4)
    smaller, _ = small
    (group,) = measured.setting.cluster.groups
    a100 = replace(measured.setting.cluster, groups=(replace(group, device=replace(group.device, name="A100-SXM-80")),))

    def run(group, time_s=1.0, **changes):
        return run_of(replace(measured.setting, **changes), grid.config(0), time_s, group=group)

    runs = [run("same", 1.0 + at) for at in range(40)]
    runs += [run("four hosts", cluster=other.cluster), run("small", job=smaller.setting.job)]
    runs += [run("old device", cluster=a100)]
    many = [run(f"job {at}", cluster=a100) for at in range(30)]

    nearest = nearest_groups([*reversed(runs), *many], measured.setting)

    assert len(nearest) == MOST_GROUPS
    assert nearest[0][0].group == "same"
    assert [len(nearest[0]), nearest[0][0].step_time_s, nearest[0][-1].step_time_s] == [MOST_RUNS, 40.0, 1.0]
    assert {group[0].group for group in nearest[1:3]} == {"four hosts", "small"}
    assert nearest[3][0].group == "old device"


def test_runs_of_another_studys_plans_teach_nothing(problem):
    """What a plan of another study did to the layers is not known here, so that its runs would be mispriced."""
    measured, grid = problem
    planned = replace(grid.config(0), plan="descent")

    (kept,) = nearest_groups(
        [run_of(measured.setting, one, 1.0) for one in (grid.config(0), planned)], measured.setting
    )

    assert [run.config.plan for run in kept] == ["hand"]


@pytest.mark.parametrize("has_past", [False, True])
def test_a_trial_of_a_plan_teaches_of_plans_in_other_layouts(problem, past, has_past):
    """Where a plan gains more than predicted in one layout, it is expected to gain more in another, beside its twin."""
    measured, grid = problem
    tp = [int(np.flatnonzero((grid.tp == degree) & (grid.cp * grid.up == 1))[0]) for degree in (2, 4)]
    twins = grid.take(np.array(tp))
    changes = tuple(replace(change_for(config), plan="descent") for config in map(twins.config, range(2)))
    runtime = replace(measured.setting.runtime, layer_changes=changes)
    of_plans = replace(measured, setting=replace(measured.setting, runtime=runtime))
    planned = concatenate([twins, replace(twins, plan=np.full(2, PLANS.index("descent")))])
    posterior = initial_posterior([(of_plans, np.arange(4))], planned, past if has_past else None, other_profiles=())

    def gap_after(gain):
        """How much longer the second layout's planned step is expected to be than its twin's, as a logarithm."""
        times_s = np.exp(log_steps(of_plans.setting, runtime, planned))[[0, 2]] * [1.0, 1 - gain]
        trials = [completed(position, time_s) for position, time_s in zip((0, 2), times_s.tolist(), strict=True)]
        seen = observations_of(trials, lambda params: params["tp"])
        expected = posterior.expected(seen, np.arange(4)).log_step_s
        return expected[3] - expected[1]

    assert gap_after(0.1) < gap_after(0.0) - 0.02


def completed(position, time_s):
    """A trial that has completed, whose parameter is its candidate's position."""
    space = {"tp": IntDistribution(0, 9)}
    made = create_trial(state=TrialState.COMPLETE, value=time_s, params={"tp": position}, distributions=space)
    made.number = position
    return made, made.state, made.values


def test_a_fact_outlives_the_fitted_constants(problem):
    """A constant that is zero because the runtime does no such thing stays zero under a fitted profile, the others are
    the fitted ones, and what the runtime does stays as it is.
    """
    measured, _ = problem
    runtime = measured.setting.runtime
    without = replace(measured, setting=replace(measured.setting, runtime=replace(runtime, hop_launch_s=0.0)))
    fitted = runtime.with_constants({"network_efficiency": 0.123})
    fitted = replace(fitted, overlaps_gradients=not fitted.overlaps_gradients, step_error=0.321)

    found = under(without, fitted).setting.runtime

    assert (found.hop_launch_s, found.network_efficiency, found.step_error) == (0.0, 0.123, 0.321)
    assert found.overlaps_gradients == runtime.overlaps_gradients


# Operators


@pytest.mark.slow
def test_operator_times_of_the_past_are_the_operators_of_the_belief(problem, small, past):
    """Samples of the runs' job come beside their predictions; those of jobs that were not looked at don't."""
    measured, _ = small
    world = world_of(measured.setting, seed=4)
    samples = tuple(
        PastSample(
            group=group,
            device="H100-SXM-80",
            runtime=measured.setting.runtime.name,
            precision="bf16",
            origin="measured",
            **{name: getattr(one, name) for name in ("kind", "phase", "shape", "time_s", "count", "name")},
        )
        for group in ("before", "of nobody")
        for one in world.measure(past.runs[0].config, trial_number=0).operator_samples
    )

    posterior = belief_after(problem, replace(past, samples=samples))

    assert sum(len(errors.log_error) for errors in posterior.operators.past) == len(samples) // 2
    assert 0.05 < np.std(np.concatenate([errors.log_error for errors in posterior.operators.past])) < 1.0


def test_several_settings_share_a_belief_without_operators(problem):
    """Candidates of two settings are predicted each under its own, and their operators are not looked at."""
    measured, grid = problem
    slow_runtime = measured.setting.runtime.with_constants({"matmul_efficiency": 0.3})
    slow = replace(measured, setting=replace(measured.setting, runtime=slow_runtime))
    even, odd = np.arange(0, len(grid), 2), np.arange(1, len(grid), 2)

    posterior = initial_posterior([(measured, even), (slow, odd)], grid)

    assert posterior.operators is None
    for at, setting in ((even, measured.setting), (odd, slow.setting)):
        expected_s = np.exp(log_steps(setting, setting.runtime, grid.take(at)))
        assert posterior.predicted.step_time_s[at] == pytest.approx(expected_s)


# What it is worth


def trials_until_found(posterior, grid, true_s, seed, within=1.02):
    """Trials until a candidate within 2% of the fastest has been measured; 21 if it is none of the first 20."""
    sampler = ThompsonSampler(grid, posterior, seed=seed, draws=50)
    study = optuna.create_study(sampler=sampler)
    rng = np.random.default_rng(seed)
    for number in range(1, 21):
        trial = study.ask(fixed_distributions=sampler.search_space)
        at = sampler.position_of(trial.params)
        study.tell(trial, float(true_s[at] * np.exp(0.01 * rng.standard_normal())))
        if true_s[at] <= within * true_s.min():
            return number
    return 21


@pytest.mark.slow
def test_a_past_that_misleads_costs_three_trials_at_most(problem, small):
    """Runs of a world where the network is five times as slow and matrix products a quarter faster than in the study's
    cost three more trials at most, in the mean of six studies, than no history.
    """
    measured, grid = problem
    runtime = measured.setting.runtime
    factors = {"network_efficiency": 0.2, "matmul_efficiency": 1.25}
    runtime = runtime.with_constants({name: factor * getattr(runtime, name) for name, factor in factors.items()})
    misled = belief_after(problem, past_of(small, log_steps(small[0].setting, runtime, small[1]), 12))
    cold = belief_after(problem, None)
    assert len(misled.steps) == 3

    worse = []
    for seed in range(6):
        true_s = world_of(measured.setting, seed).hidden_step(grid).step_time_s
        misled_for, cold_for = (trials_until_found(one, grid, true_s, seed) for one in (misled, cold))
        worse.append(misled_for - cold_for)

    assert np.mean(worse) <= 3


@pytest.mark.slow
def test_a_past_that_is_right_saves_trials(problem, truth, informed):
    """After runs of the study's own true runtime, six studies need fewer trials than without them."""
    measured, grid = problem
    true_s = np.exp(log_steps(measured.setting, truth, grid))
    cold = belief_after(problem, None)

    with_past, without = (
        np.mean([trials_until_found(one, grid, true_s, seed) for seed in range(6)]) for one in (informed, cold)
    )

    assert with_past < without
