"""Shares of links from measured rates: held against noise, and put down to the right host or path."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hardware.trace_file import LEAST_SHARE
from trials.link_probe.rounds import pairs_of_ring
from tuner.watch.link_shares import Links, LinkShare, Steps, judge, learn, link_shares, shares_of_hosts

STEPS = st.builds(Steps, step=st.sampled_from([0.1, 0.25, 0.5]), repeats=st.integers(1, 4))
SHARES = st.floats(LEAST_SHARE, 1.0)
MOST_PAIRS = 100


def judged(shares, steps):
    """The present share after each of these was found."""
    link, present = LinkShare(link=("a",)), []
    for share in shares:
        link = judge(link, share, steps)
        present.append(link.share)
    return present


def judged_by_definition(shares, steps):
    """The same by the words of the rule: look back over the last probes since the last change."""
    present, since, found = 1.0, 0, []
    for at in range(len(shares)):
        last = shares[max(at - steps.repeats + 1, since) : at + 1]
        if len(last) == steps.repeats:
            if all(one < (1 - steps.step) * present for one in last):
                present, since = max(last), at + 1
            elif all(present < (1 - steps.step) * one for one in last):
                present, since = min(last), at + 1
        found.append(present)
    return found


@given(shares=st.lists(SHARES, max_size=30), steps=STEPS)
def test_a_share_changes_by_the_words_of_the_rule(shares, steps):
    """A share changes exactly when the last probes all differ from it by more than the step in one direction."""
    assert judged(shares, steps) == judged_by_definition(shares, steps)


@given(shares=st.lists(st.floats(0.751, 1.0), max_size=30), outliers=st.lists(SHARES, max_size=5))
def test_noise_changes_nothing(shares, outliers):
    """Shares within the step of 1 change nothing, nor do outliers that no second one follows."""
    mixed = [one for share, outlier in zip(shares, outliers, strict=False) for one in (outlier, share)]

    assert {*judged([*shares, *mixed], Steps())} <= {1.0}


@given(share=st.floats(0.01, 0.74), before=st.lists(SHARES, max_size=10), steps=STEPS)
def test_a_lasting_share_is_taken_and_stays(share, before, steps):
    """A share that lasts is the present one, or within the step of it, after twice as many probes as have to agree; it
    then changes no more. Without others before, it is the present one at once when they agree.
    """
    found = judged([*before, *[share] * (3 * steps.repeats)], steps)[-steps.repeats - 1 :]
    alone = judged([share] * steps.repeats, steps)

    assert len({*found}) == 1
    assert not steps.differ(found[0], share)
    assert alone[-1] == (share if steps.differ(share, 1.0) else 1.0)
    assert {*alone[:-1]} <= {1.0}


@given(rates=st.lists(st.floats(1.0, 1e10), min_size=1, max_size=20), steps=STEPS)
def test_the_reference_is_what_successive_probes_have_reached(rates, steps):
    """The reference is the largest over all windows of successive probes of the smallest rate in the window."""
    links = Links()
    for rate in rates:
        links = learn(links, {("a", "b"): rate}, steps, most_pairs=MOST_PAIRS)
    windows = [rates[at : at + steps.repeats] for at in range(len(rates) - steps.repeats + 1)]

    assert links.pairs[0].reference_bytes_per_s == max(map(min, windows), default=0.0)


def measured(hosts, sends, receives, paths):
    """Shares of the pairs of a ring whose hosts and paths have these shares."""
    return {
        (one, other): min(sends.get(one, 1.0), receives.get(other, 1.0)) * paths.get(frozenset((one, other)), 1.0)
        for one, other in pairs_of_ring(hosts)
    }


@given(
    count=st.integers(3, 9),
    slow=st.integers(0, 8),
    share=st.floats(0.01, 0.74),
    ways=st.sampled_from(["sends", "receives", "both"]),
)
def test_a_slow_host_is_told_from_a_slow_path(count, slow, share, ways):
    """One host that sends or receives slowly, or one slow path, is named alone and with its share."""
    hosts = [f"n{number}" for number in range(count)]
    host, other = hosts[slow % count], hosts[(slow + 1) % count]
    of_host = measured(hosts, {host: share} if ways != "receives" else {}, {host: share} if ways != "sends" else {}, {})
    of_path = measured(hosts, {}, {}, {frozenset((host, other)): share})
    by_host = {link: one for link, one in link_shares(of_host, {}, Steps()).items() if one < 1}
    by_path = {link: one for link, one in link_shares(of_path, {}, Steps()).items() if one < 1}

    assert by_host == {(host,): pytest.approx(share)}
    assert by_path == {tuple(sorted((host, other))): pytest.approx(share)}


@given(count=st.integers(2, 7), data=st.data(), steps=STEPS)
def test_the_shares_explain_what_was_measured(count, data, steps):
    """Whatever pairs have, the share of the slower host times that of the path is the pair's, but for the step."""
    hosts = [f"n{number}" for number in range(count)]
    pairs = {pair: data.draw(SHARES) for pair in pairs_of_ring(hosts) if data.draw(st.booleans())}
    found = link_shares(pairs, {}, steps)

    for one, other in {tuple(sorted(pair)) for pair in pairs}:
        share = min(pairs[way] for way in ((one, other), (other, one)) if way in pairs)
        assert not steps.differ(min(found[one,], found[other,]) * found[one, other], share * (1 + 1e-9))


@given(share=st.floats(0.01, 0.7), steps=STEPS)
def test_a_host_with_one_peer_is_not_called_slow_but_may_recover(share, steps):
    """With two hosts the path is slow; a host that was slow before is no longer, once one pair is fast."""
    assume(steps.differ(share, 1.0))
    slow, fast = {("a", "b"): share, ("b", "a"): share}, {("a", "b"): 1.0, ("b", "a"): 1.0}

    assert link_shares(slow, {}, steps) == {("a",): 1.0, ("b",): 1.0, ("a", "b"): share}
    assert link_shares(slow, {("a",): share}, steps) == {("a",): share, ("b",): 1.0, ("a", "b"): 1.0}
    assert link_shares(fast, {("a",): share}, steps) == {("a",): 1.0, ("b",): 1.0, ("a", "b"): 1.0}


def test_what_is_not_measured_is_not_guessed():
    """A link keeps its share while nobody measures it, and one without a reference has none."""
    rates = dict.fromkeys(pairs_of_ring(["a", "b", "c"]), 100.0)
    slow = {pair: rate / 10 if "b" in pair else rate for pair, rate in rates.items()}
    steps, links = Steps(), Links()
    first = learn(links, rates, steps, most_pairs=MOST_PAIRS)
    for measured_rates in (rates, slow, slow):
        first = learn(first, measured_rates, steps, most_pairs=MOST_PAIRS)
    alone = learn(first, {}, steps, most_pairs=MOST_PAIRS)
    others = learn(first, {("a", "c"): 100.0, ("c", "a"): 100.0}, steps, most_pairs=MOST_PAIRS)
    anew = learn(links, slow, steps, most_pairs=MOST_PAIRS)

    for one in (first, alone, others):
        assert shares_of_hosts(one, ["a", "b", "c"]) == {(1,): 0.1}
    assert shares_of_hosts(first, ["c", "x", ""]) == {}
    assert shares_of_hosts(first, ["b", "a"]) == {(0,): 0.1}
    assert anew.shares == ()


@given(names=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60))
def test_the_pairs_that_were_measured_last_are_kept(names):
    """No more pairs are kept than asked for, and those are the ones measured last; shares of others are dropped."""
    links = Links()
    for pair in pairwise(names):
        if pair[0] != pair[1]:
            links = learn(links, {pair: 1.0}, Steps(), most_pairs=5)
            assert (links.pairs[-1].sender, links.pairs[-1].receiver) == pair
        assert len(links.pairs) <= 5
        kept = {name for one in links.pairs for name in (one.sender, one.receiver)}
        assert all({*one.link} <= kept for one in links.shares)
