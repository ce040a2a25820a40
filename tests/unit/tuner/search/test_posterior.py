import re
from dataclasses import replace

import numpy as np
import pytest

from tuner.search.observations import Observations, observations_of
from tuner.search.rehearsed import Rehearsed

NUM_DRAWS = 300


def observations(measured=(), log_step_s=(), **known) -> Observations:
    """What trials told: exact step times of the measured ones, and whatever else."""
    count = len(measured)
    found = replace(
        observations_of([], lambda _: None),
        measured=np.array(measured, dtype=np.int64),
        log_step_s=np.array(log_step_s, dtype=float),
        variance=np.full(count, 0.005**2),
    )
    explored = frozenset({int(position) for position in measured} | set(known.pop("explored", ())))
    return replace(found, explored=explored, **known)


def drawn(posterior, found, seed=0):
    """The draws after that observations."""
    return posterior.draw(found, NUM_DRAWS, np.random.default_rng(seed))


def fits_share(posterior, found):
    """Share of the draws in which each candidate can run [n]."""
    return np.isfinite(drawn(posterior, found)).mean(axis=0)


def share_of_memory(posterior):
    """Memory that each is predicted to need over what it has [n]."""
    return posterior.predicted.needed_bytes / posterior.predicted.capacity_bytes


def test_before_any_trial_draws_are_about_the_predictions(posterior):
    """The median draw of a candidate that surely fits is its prediction or, as now and then something slows a run down,
    up to a factor of 1.4 above; what needs all that there is runs in half of the draws, and what needs half again as
    much hardly ever.
    """
    fresh = drawn(posterior, observations())
    share = share_of_memory(posterior)

    error = np.median(fresh, axis=0) - np.log(posterior.predicted.step_time_s)
    assert error[share < 0.6].max() < np.log(1.4)
    assert error[share < 0.6].min() > -np.log(1.1)
    assert (np.isfinite(fresh[:, share < 0.6]).mean(axis=0) > 0.9).all()
    assert 0.3 < np.isfinite(fresh[:, (share > 0.97) & (share < 1.03)]).mean() < 0.7
    assert np.isfinite(fresh[:, share > 1.5]).mean() < 0.2


def test_measured_candidates_run_as_measured(posterior):
    """What was measured is drawn within its noise, even where it was predicted not to fit."""
    tight = int(np.argmax(share_of_memory(posterior)))
    log_step_s = np.log(posterior.predicted.step_time_s[[0, tight]]) + 0.2

    found = drawn(posterior, observations([0, tight], log_step_s))[:, [0, tight]]

    assert np.abs(found - log_step_s).max() < 5 * 0.005


def test_running_out_of_memory_speaks_against_those_like_it(posterior):
    """After a candidate that should have fit ran out of memory, candidates as tight run in 75% as many draws at most;
    those that need a fifth of what there is still run in three of four, since one failure may be no lack of memory.
    """
    share = share_of_memory(posterior)
    tight = np.flatnonzero((share > 0.7) & (share < 0.9))
    failed, others = int(tight[0]), tight[1:]

    before, after = (fits_share(posterior, observations(misfits=frozenset(misfits))) for misfits in ((), (failed,)))

    assert after[others].mean() < 0.75 * before[others].mean()
    assert after[share < 0.2].mean() > 0.75


def test_running_out_of_memory_speaks_most_against_the_same_parts(posterior):
    """Of candidates that are equally tight, those whose memory has the same parts as the failed one's lose most."""
    share, parts = share_of_memory(posterior), posterior.predicted.memory_shares
    tight = np.flatnonzero((share > 0.65) & (share < 0.85))
    failed = int(tight[np.argmin(np.abs(share[tight] - 0.75))])
    others = tight[tight != failed]
    unlike = np.abs(parts[others] - parts[failed]).sum(axis=1)

    lost = fits_share(posterior, observations()) - fits_share(posterior, observations(misfits=frozenset({failed})))

    order = np.argsort(unlike)
    quarter = len(order) // 4
    assert lost[others[order[:quarter]]].mean() > lost[others[order[-quarter:]]].mean() + 0.05


def test_failures_that_memory_does_not_explain_teach_what_they_share(posterior, grid):
    """Where every candidate needs a hundredth of what there is, and those with large micro-batches run out of memory
    all the same, untried ones like them run in less than half as many draws as others.
    """
    capacity = np.full(len(grid), 100 * posterior.predicted.needed_bytes.max())
    roomy = replace(posterior, predicted=replace(posterior.predicted, capacity_bytes=capacity))
    large, small = (np.flatnonzero(which) for which in (grid.mbs >= 4, grid.mbs == 1))
    failed, ran = large[:: len(large) // 8][:8], small[:: len(small) // 8][:8]

    runs = fits_share(roomy, observations(ran, np.zeros(8), misfits=frozenset(failed.tolist())))

    assert fits_share(roomy, observations()).min() > 0.95
    assert runs[np.setdiff1d(large, failed)].mean() < 0.5 * runs[np.setdiff1d(small, ran)].mean()


def test_the_rate_of_mishaps_is_the_clusters(posterior):
    """Failures of candidates that surely fit raise the rate of mishaps from 2%; those that hardly fit do not."""
    share = share_of_memory(posterior)
    spare, tight = (frozenset(np.argsort(order)[:5].tolist()) for order in (share, -share))

    before, surprised, expected = (
        posterior.mishap_rate(observations(misfits=misfits)) for misfits in (frozenset(), spare, tight)
    )

    assert before == pytest.approx(0.02)
    assert surprised > 4 * before
    assert expected < 1.2 * before


def test_a_rehearsed_need_is_believed(posterior):
    """What a candidate's own program needs decides whether it fits, whatever failed that resembles it."""
    share = share_of_memory(posterior)
    tight = np.flatnonzero((share > 0.7) & (share < 0.9))
    known, misfits = int(tight[0]), frozenset(tight[1:6].tolist())
    log_needed = {known: float(np.log(0.7 * posterior.predicted.capacity_bytes[known]))}
    rehearsed = Rehearsed(accepted=frozenset({known}), log_needed=log_needed, deviation=0.02)

    runs = fits_share(posterior, observations(misfits=misfits, rehearsed=rehearsed))

    assert runs[known] > 0.95
    assert runs[tight[6:]].mean() < 0.75


def test_what_ran_speaks_for_those_like_it(posterior):
    """Tight candidates that ran, with a peak or without, make others as tight more likely to."""
    share = share_of_memory(posterior)
    tight = np.flatnonzero((share > 0.9) & (share < 1.1))
    ran, others = tight[::8], np.setdiff1d(tight, tight[::8])
    log_step_s = np.log(posterior.predicted.step_time_s[ran])
    peaks_bytes = {int(at): int(0.8 * posterior.predicted.peak_bytes[at]) for at in ran}

    before = fits_share(posterior, observations())[others].mean()
    without = fits_share(posterior, observations(ran, log_step_s))[others].mean()
    with_peaks = fits_share(posterior, observations(ran, log_step_s, peaks_bytes=peaks_bytes))[others].mean()

    assert without > before + 0.1
    assert with_peaks > before + 0.2


def test_a_time_out_is_never_drawn_below_its_limit(posterior):
    """A candidate that was cut off is at least as slow as its limit in every draw, and those like it are slower too."""
    cut_off = int(np.argmin(posterior.predicted.step_time_s))
    limit_s = 3 * posterior.predicted.step_time_s[cut_off]

    found = drawn(posterior, observations(limits_s={cut_off: limit_s}, explored=(cut_off,)))

    assert found[:, cut_off].min() >= np.float32(np.log(limit_s))
    assert np.isfinite(found[:, cut_off]).all()
    before = np.median(drawn(posterior, observations()), axis=0)
    features = posterior.predicted.features
    distance = np.linalg.norm(features - features[cut_off], axis=1)
    near = np.argsort(np.where(share_of_memory(posterior) < 0.6, distance, np.inf))[1:6]
    assert (np.median(found, axis=0)[near] > before[near]).all()


def test_a_time_out_exonerates_nobody(posterior, grid):
    """A trial that hung until its limit, with no step, has not shown that its kind runs or that its memory suffices."""
    kind = np.flatnonzero(grid.vpp == 2)
    crashed, hung = frozenset(kind[:2].tolist()), tuple(kind[5:8].tolist())

    without = fits_share(posterior, observations(crashed=crashed))
    beside = fits_share(posterior, observations(crashed=crashed, explored=hung))

    assert beside[kind[8:]] == pytest.approx(without[kind[8:]])


def kinds_of(posterior, grid):
    """Candidates with memory to spare, with vpp above 1 and without."""
    return (np.flatnonzero(mask & (share_of_memory(posterior) < 0.5)) for mask in (grid.vpp > 1, grid.vpp == 1))


def test_crashes_of_one_kind_make_it_rare(posterior, grid):
    """Three crashes with vpp above 1, beside two without that ran: the others of the kind run in under half as many
    draws as before, those without in over seven tenths of what they did.
    """
    broken, sound = kinds_of(posterior, grid)
    crashed = frozenset(broken[:: len(broken) // 3][:3].tolist())
    ran = sound[:: len(sound) // 2][:2]
    log_step_s = np.log(posterior.predicted.step_time_s[ran])

    before = fits_share(posterior, observations(ran, log_step_s))
    after = fits_share(posterior, observations(ran, log_step_s, crashed=crashed))

    others = np.setdiff1d(broken, sorted(crashed))
    assert after[others].mean() < 0.5 * before[others].mean()
    assert after[sound].mean() > 0.7 * before[sound].mean()


def test_the_same_evidence_and_stream_give_the_same_draws(posterior):
    """Draws are a function of the observations and the generator; what failed is infinitely slow in every one."""
    found = observations([0, 4], [1.0, 2.0], misfits=frozenset({3}), crashed=frozenset({5}))
    once = drawn(posterior, found)

    assert np.isinf(once[:, [3, 5]]).all()
    assert np.array_equal(once, drawn(posterior, found))
    assert not np.array_equal(once, drawn(posterior, found, seed=1))


# Conclusions


def sentences(posterior, found):
    """The conclusions by kind."""
    return {conclusion.kind: conclusion.text for conclusion in posterior.conclusions(found)}


def test_without_a_pattern_there_is_no_conclusion(posterior):
    """Trials that ran allow no conclusion on failures, and one crash blames no kind, since all are equally suspect."""
    assert posterior.conclusions(observations()) == ()
    assert posterior.conclusions(observations([0], [1.0])) == ()
    assert "crash" not in sentences(posterior, observations(crashed=frozenset({5})))


def test_the_lesson_of_memory_counts_those_that_no_longer_fit(posterior):
    """It says how many ran out, by what factor those need more memory than predicted, and how many untried candidates
    probably won't fit that would have before.
    """
    share = share_of_memory(posterior)
    misfits = frozenset(np.flatnonzero((share > 0.6) & (share < 0.8))[:3].tolist())

    text = sentences(posterior, observations(misfits=misfits))["memory"]

    before, after = fits_share(posterior, observations()), fits_share(posterior, observations(misfits=misfits))
    newly = int(np.sum((after < 0.5) & (before >= 0.5))) - len(misfits)
    words = text.split()
    assert text.startswith("3 trials ran out of memory; what was tried needs ")
    assert 1.1 < float(words[words.index("needs") + 1]) < 3.0
    assert int(words[words.index("more") - 1].replace(",", "")) == pytest.approx(newly, rel=0.2)


def test_the_factor_of_memory_is_that_of_those_tried(posterior):
    """Candidates that were never tried have no part in it: it stays within what measured peaks and misfits allow."""
    share, needed = share_of_memory(posterior), posterior.predicted.needed_bytes
    ran = np.flatnonzero((share > 0.3) & (share < 0.5))[:4]
    misfit = int(np.flatnonzero((share > 0.92) & (share < 0.99))[0])
    peaks = {int(at): int(factor * needed[at]) for at, factor in zip(ran, (0.7, 0.8, 0.9, 1.0), strict=True)}
    found = observations(ran, np.log(posterior.predicted.step_time_s[ran]), peaks_bytes=peaks)

    text = sentences(posterior, replace(found, misfits=frozenset({misfit})))["memory"]

    factor, low, high = (float(number) for number in re.findall(r"[0-9]+\.[0-9]{2}", text))
    assert low == pytest.approx(0.75, abs=0.1)
    assert low < factor < high
    assert 0.75 < factor < 1.0
    assert 1 / share[misfit] * 0.9 < high < 2.0


def test_a_misfit_is_no_more_candidate(posterior):
    """A candidate that ran out of memory is not counted among those that more probably won't fit."""
    alone, predicted = int(np.argmax(share_of_memory(posterior) < 0.3)), posterior.predicted
    room = np.where(np.arange(len(predicted)) == alone, 1.01, 50.0)
    small = replace(posterior, predicted=replace(predicted, capacity_bytes=room * predicted.needed_bytes))

    assert "0 more candidates" in sentences(small, observations(misfits=frozenset({alone})))["memory"]


def test_the_lesson_of_crashes_names_the_kind(posterior, grid):
    """It names the kind, its crashes among its trials, its probability, and how many candidates it holds."""
    broken, sound = kinds_of(posterior, grid)
    crashed = frozenset(broken[:: len(broken) // 4][:4].tolist())
    ran = sound[:: len(sound) // 4][:4]

    text = sentences(posterior, observations(ran, np.zeros(len(ran)), crashed=crashed))["crash"]

    assert text.startswith("vpp above 1 crashed in 4 of 4 trials: with probability ")
    assert f"{int((grid.vpp > 1).sum())} candidates are unlikely to run." in text


def test_the_lesson_of_time_outs_says_the_limit(posterior):
    """It says how many trials were cut off before a step ended, and the largest bound."""
    text = sentences(posterior, observations(limits_s={3: 12.0, 4: 45.5}, explored=(3, 4)))["timeout"]

    assert text.startswith("2 trials reached the limit of time")
    assert "45.5 s" in text
