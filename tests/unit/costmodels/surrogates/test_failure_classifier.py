import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessClassifier

from costmodels.surrogates import failure_classifier
from costmodels.surrogates.failure_classifier import SCALE, failure_chances

MISHAP = 0.02


def chances(before, features, ran=(), failed=(), mishap=MISHAP):
    """The chances after trials at these positions."""
    positions = (np.array(which, dtype=np.int64) for which in (ran, failed))
    return failure_chances(
        np.asarray(before, dtype=float), np.asarray(features, dtype=float), *positions, mishap=mishap
    )


def test_without_trials_the_order_is_that_of_the_belief():
    """Before any trial, candidates alike in features are ordered as believed, up to the chance of a mishap: an even
    chance stays even, and a belief of one in ten or nine in ten moves by less than 0.15.
    """
    before = np.linspace(0.02, 0.98, 97)

    found = chances(before, np.zeros((97, 3)))

    assert (np.diff(found) > 0).all()
    assert found[48] == pytest.approx(0.5, abs=1e-6)
    assert found[[8, 88]] == pytest.approx([0.1, 0.9], abs=0.15)


def test_few_trials_decide_little_and_many_decide_much():
    """Where all were believed to run, and those with a large value of one feature fail, their chance to fail rises with
    the trials, past a half at last, and that of the others stays low.
    """
    value = np.tile([-0.5, 0.5], 40)
    features = np.stack([value, np.zeros(80)], axis=1)

    after = [
        chances(np.full(80, 0.05), features, ran=np.arange(0, 2 * count, 2), failed=np.arange(1, 2 * count, 2))[-2:]
        for count in (1, 4, 16)
    ]

    large = [found[1] for found in after]
    assert large == sorted(large)
    assert large[0] < 0.5 < large[2]
    assert max(found[0] for found in after) < 0.2


def test_the_log_odds_are_those_of_the_posterior():
    """With one feature and no belief, the chance after trials is the average of the logistic function over the
    posterior of the weight, here by a sum over a fine grid (Laplace's approximation is within 0.03).
    """
    features = np.linspace(-1, 1, 21)[:, None]
    ran, failed = [0, 3, 5, 12], [15, 18, 20]
    weight = np.linspace(-8, 8, 4001)[:, None]
    log_odds = weight * SCALE * features[:, 0]
    log_posterior = -(weight[:, 0] ** 2) / 2
    log_posterior += -np.log1p(np.exp(log_odds[:, ran])).sum(axis=1) - np.log1p(np.exp(-log_odds[:, failed])).sum(
        axis=1
    )
    density = np.exp(log_posterior - log_posterior.max())
    exact = (density[:, None] / (1 + np.exp(-log_odds))).sum(axis=0) / density.sum()

    found = chances(np.full(21, 0.5), features, ran=ran, failed=failed)

    assert found == pytest.approx(exact, abs=0.03)


def test_mishaps_weaken_the_belief():
    """Where a third of the trials are mishaps, a belief counts for less than where hardly any is; an even chance stays
    even.
    """
    before, features = [0.02, 0.5, 0.98], np.zeros((3, 1))

    rare, common = (chances(before, features, mishap=mishap) for mishap in (0.001, 0.3))

    assert [rare[1], common[1]] == pytest.approx([0.5, 0.5])
    assert rare[0] < common[0] < 0.5 < common[2] < rare[2]


def test_weights_give_the_chances_that_pairs_with_trials_give(monkeypatch):
    """The quick way to scikit-learn's mean and variance of log odds leaves its chances as they are."""
    rng = np.random.default_rng(0)
    before, features = rng.uniform(size=400), rng.normal(size=(400, 7))
    tried = rng.choice(400, 60, replace=False)
    quick = failure_chances(before, features, tried[:40], tried[40:], mishap=0.01)
    of_two = type(GaussianProcessClassifier().fit(np.eye(2), [0, 1]).base_estimator_)
    monkeypatch.setattr(failure_classifier, "_latent_by_weights", of_two.latent_mean_and_variance)

    assert np.ptp(quick) > 0.5
    np.testing.assert_allclose(
        quick, failure_chances(before, features, tried[:40], tried[40:], mishap=0.01), rtol=1e-9, atol=1e-9
    )
