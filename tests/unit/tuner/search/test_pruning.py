import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial

from tuner.search.pruning import MARGIN, ClearlySlowerPruner, is_clearly_slower

BEST_STEPS_S = (1.00, 1.02, 0.98, 1.01, 0.99)


def noisy_steps(rng, median_s, spread, num_steps):
    """Step times around a median, log-normal [num_steps]."""
    return (median_s * np.exp(spread * rng.standard_normal(num_steps))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.02, 0.3])
@pytest.mark.parametrize(("num_steps", "num_best"), [(2, 1), (2, 5), (3, 3), (5, 10)])
def test_an_equal_trial_is_hardly_ever_slower(spread, num_steps, num_best):
    """Without any margin, steps of the same candidate are called slower less often than the risk that is promised."""
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(1500):
        best = noisy_steps(rng, 1.0, spread, num_best)
        steps = noisy_steps(rng, 1.0, spread, num_steps)
        wrong += is_clearly_slower(steps, float(np.median(best)), best, margin=0.0, risk=0.02)

    assert wrong / 1500 <= 0.02 + 3 * np.sqrt(0.02 * 0.98 / 1500)


@pytest.mark.parametrize(
    ("steps_s", "best_s"),
    [([9.0, 1.0], BEST_STEPS_S), ([1.01, 9.0, 0.99], BEST_STEPS_S), ([100.0], (1.0,)), ([100.0], ())],
    ids=["one of two", "one of three", "one beside one", "one beside none"],
)
def test_one_slow_step_is_no_evidence(steps_s, best_s):
    """A hiccup in one of a few steps, or one step where nothing tells of the noise, is not slow."""
    assert not is_clearly_slower(steps_s, 1.0, best_s)


def test_a_trial_within_the_margin_goes_on():
    """However exact its steps are, a trial that is slower by less than the margin goes on; beyond it, it does not."""
    for slower, expected in ((MARGIN - 0.01, False), (MARGIN + 0.01, True)):
        assert is_clearly_slower([1 + slower] * 5, 1.0, (1.0,) * 5) is expected


def test_noise_demands_more_steps():
    """A slowness that two steps show with a spread of 2% is not clear with one of 20%, and is again after 40 steps."""
    rng = np.random.default_rng(11)
    quiet, loud, longer = (
        noisy_steps(rng, 1.6, spread, num_steps) for spread, num_steps in ((0.02, 2), (0.2, 2), (0.2, 40))
    )
    loud_best = noisy_steps(rng, 1.0, 0.2, 5)

    assert is_clearly_slower(quiet, 1.0, BEST_STEPS_S)
    assert all(is_clearly_slower(noisy_steps(rng, 2.0, 0.02, 2), 1.0, BEST_STEPS_S) for _ in range(200))
    assert not is_clearly_slower(loud, 1.0, loud_best)
    assert is_clearly_slower(longer, 1.0, loud_best)


# In anybody's own study


def study_with(*completed, pruner=None, direction="minimize"):
    """A study in memory with completed trials, each given by its steps."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=pruner or ClearlySlowerPruner(), direction=direction)
    for steps_s in completed:
        study.add_trial(
            create_trial(value=float(np.median(steps_s)), intermediate_values=dict(enumerate(steps_s, start=1)))
        )
    return study


def test_it_prunes_in_an_optimize_loop():
    """In `study.optimize`, slow trials end as pruned after their first steps with what they reported; fast ones and the
    first one complete, and no candidate that could be the best is lost.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng = np.random.default_rng(0)
    medians_s = [3.0, 1.5, 1.0, 1.05, 2.0, 0.9, 4.0, 0.95]
    study = optuna.create_study(pruner=ClearlySlowerPruner())

    def objective(trial):
        steps_s = noisy_steps(rng, medians_s[trial.number], 0.02, 10)
        for step, step_s in enumerate(steps_s, start=1):
            trial.report(step_s, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(np.median(steps_s))

    study.optimize(objective, n_trials=len(medians_s))

    pruned = [trial.number for trial in study.trials if trial.state == TrialState.PRUNED]
    assert pruned == [4, 6]
    assert all(len(study.trials[number].intermediate_values) == 2 for number in pruned)
    assert study.best_trial.number == 5


def test_it_waits_for_the_least_number_of_steps():
    """No trial is pruned before `min_steps` steps, and none before a first trial has completed."""
    study = study_with(BEST_STEPS_S, pruner=ClearlySlowerPruner(min_steps=4))
    trial = study.ask()
    pruned_after = []
    for step in range(1, 6):
        trial.report(5.0, step)
        pruned_after.append(trial.should_prune())

    assert pruned_after == [False, False, False, True, True]
    lonely = study_with().ask()
    for step in range(1, 6):
        lonely.report(5.0, step)
    assert not lonely.should_prune()


def test_the_first_and_the_experts_trial_are_never_pruned():
    """The first trial and the current configuration are measured in full, however slow they are."""
    study = study_with(pruner=ClearlySlowerPruner(current={"tp": 8}))
    first = study.ask()
    study.add_trial(create_trial(value=1.0, intermediate_values=dict(enumerate(BEST_STEPS_S, start=1))))
    experts, other = study.ask(), study.ask()
    asked = (first, 4), (experts, 8), (other, 4)
    for trial, tp in asked:
        trial.suggest_int("tp", tp, tp)
        for step in (1, 2, 3):
            trial.report(5.0, step)

    assert [trial.should_prune() for trial, _ in asked] == [False, False, True]


def test_what_is_no_step_time_is_refused():
    """Values that cannot be step times, and studies that look for the largest value, are named in the error."""
    trial = study_with(BEST_STEPS_S).ask()
    trial.report(-1.0, 1)
    with pytest.raises(ValueError, match="must report step times above 0"):
        trial.should_prune()

    trial = study_with(BEST_STEPS_S, direction="maximize").ask()
    trial.report(1.0, 1)
    with pytest.raises(ValueError, match="must minimize one value"):
        trial.should_prune()


@pytest.mark.parametrize("field", [{"margin": -0.1}, {"risk": 0.0}, {"risk": 1.0}, {"min_steps": 0}])
def test_senseless_options_are_refused(field):
    """An option out of its range is named in the message."""
    with pytest.raises(ValueError, match=next(iter(field))):
        ClearlySlowerPruner(**field)
