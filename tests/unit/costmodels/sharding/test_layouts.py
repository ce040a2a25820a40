"""What moves a tensor from one layout to another, by hand and against simulated devices.

The simulation holds every element on every device: a mask of what each device has, and values, of which partial sums
are random addends. Collectives act on the groups of ranks as hardware/collectives.py defines them.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind
from costmodels.sharding.layouts import PARTIAL, REPLICATED, local_share, moves
from tests.support.graphs.random_graphs import mesh_of

R, P = REPLICATED, PARTIAL
SIZES = (2, 4)
ELEMENT_BYTES = 4


class Devices:
    """All devices of a mesh, and what each has of one tensor; devices d, elements n.

    Attributes:
        digits: Of each element in each dim the digit of each axis [dims][axes][n].
        place: Of each device its number along each axis [axes][d].
        has: What each device holds [d, n].
        values: Its values, or addends [d, n].
    """

    def __init__(self, layout, sizes, num_dims, rng):
        self.sizes = sizes
        devices = math.prod(sizes)
        elements = devices**num_dims
        self.place = np.array(np.unravel_index(np.arange(devices), sizes)).reshape(len(sizes), devices)
        index = np.array(np.unravel_index(np.arange(elements), (devices,) * num_dims)).reshape(num_dims, elements)
        self.digits = [np.array(np.unravel_index(of_dim, sizes)).reshape(len(sizes), elements) for of_dim in index]
        self.whole = rng.standard_normal(elements)
        self.has = self.mask(layout)
        self.values = np.broadcast_to(self.whole, self.has.shape).copy()
        partial = [axis for axis, dim in enumerate(layout) if dim == P]
        for group in self.groups(partial):
            addends = rng.standard_normal((len(group), elements))
            self.values[group] = addends + (self.whole - addends.sum(axis=0)) / len(group)

    @property
    def held_bytes(self):
        """What each device holds."""
        return self.has.sum(axis=1) * ELEMENT_BYTES

    def mask(self, layout):
        """What each device holds in a layout [d, n]."""
        found = np.ones((self.place.shape[1], len(self.whole)), dtype=bool)
        for axis, dim in enumerate(layout):
            if dim >= 0:
                found &= self.place[axis][:, None] == self.digits[dim][axis][None, :]
        return found

    def groups(self, axes):
        """The devices of each group along some axes."""
        others = [axis for axis in range(len(self.sizes)) if axis not in axes]
        keys = [tuple(self.place[others, device]) for device in range(self.place.shape[1])]
        return [[device for device, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]

    def slice(self, layout):
        """Every device forgets what it need not hold."""
        self.has &= self.mask(layout)

    def run(self, move, before, after):
        """One collective, of the message that it says, on the way from one layout to another."""
        here = tuple(
            new if axis in move.axes else old for axis, (old, new) in enumerate(zip(before, after, strict=True))
        )
        act = self._reduce if move.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER) else self._pass_on
        had, keeps = self.held_bytes, self.mask(here)
        for group in self.groups(move.axes):
            act(group, keeps[group], move)
        has = self.held_bytes
        assert (has if move.kind is OpKind.ALL_GATHER else had) == pytest.approx(move.message_bytes)
        return here

    def _reduce(self, group, keeps, move):
        """Members add up what all of them have, and keep all of it, or a part each."""
        assert (self.has[group] == self.has[group[0]]).all(), "members have addends of the same sums"
        self.values[group] = self.values[group].sum(axis=0)
        self.has[group] &= keeps
        kept = self.has[group].sum(axis=0)
        if move.kind is OpKind.REDUCE_SCATTER:
            assert kept.max() == 1, "each sum is kept once"

    def _pass_on(self, group, keeps, move):
        """Members hand parts of the tensor, of which each has its own, to whoever wants them."""
        owners = self.has[group]
        assert (owners.sum(axis=0) <= 1).all(), "members have parts that differ"
        assert (keeps <= owners.any(axis=0)).all(), "some member has what another one lacks"
        if move.kind is OpKind.ALL_TO_ALL:
            sent_bytes = [(owner & kept).sum() * ELEMENT_BYTES for owner in owners for kept in keeps]
            assert np.array(sent_bytes) == pytest.approx(move.message_bytes / len(group)), "as much for each"
        self.values[group] = self.values[group][owners.argmax(axis=0), np.arange(owners.shape[1])]
        self.has[group] = keeps


@st.composite
def changes(draw):
    """Mesh sizes, the dims of a tensor, and two of its layouts; only the first may have partial sums."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)]))
    num_dims = draw(st.integers(1, 3 if math.prod(sizes) <= 6 else 2))
    dims = st.integers(0, num_dims - 1)
    before = tuple(draw(st.one_of(st.just(R), st.just(P), dims)) for _ in sizes)
    after = tuple(draw(st.one_of(st.just(R), dims)) for _ in sizes)
    return sizes, num_dims, before, after


@given(change=changes(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_moves_deliver_what_is_wanted(change, seed):
    """On simulated devices the collectives send the bytes they say, and each device ends with its part of the sums.

    No message is empty or exceeds the tensor. An axis takes part in one at most, and in none if it stays or slices.
    """
    sizes, num_dims, before, after = change
    devices = Devices(before, sizes, num_dims, np.random.default_rng(seed))
    num_bytes = len(devices.whole) * ELEMENT_BYTES
    found = moves(before, after, num_bytes, sizes)

    pairs = list(zip(before, after, strict=True))
    here = tuple(new if old == R else old for old, new in pairs)
    devices.slice(here)
    for move in found:
        assert 0 < move.message_bytes <= num_bytes
        here = devices.run(move, here, after)

    assert here == after
    assert (devices.has == devices.mask(after)).all()
    assert np.allclose(np.where(devices.has, devices.values, devices.whole), devices.whole)
    assert sorted(axis for move in found for axis in move.axes) == [
        axis for axis, (old, new) in enumerate(pairs) if old not in (new, R)
    ]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((R, R), (0, 1), []),
        ((0, R), (0, R), []),
        ((0, R), (R, R), [(OpKind.ALL_GATHER, (0,), 800)]),
        ((0, 0), (R, R), [(OpKind.ALL_GATHER, (0, 1), 800)]),
        ((0, 1), (0, R), [(OpKind.ALL_GATHER, (1,), 400)]),
        ((0, R), (1, R), [(OpKind.ALL_TO_ALL, (0,), 400)]),
        ((0, 1), (1, 0), [(OpKind.ALL_TO_ALL, (0, 1), 100)]),
        ((P, R), (R, R), [(OpKind.ALL_REDUCE, (0,), 800)]),
        ((P, P), (R, R), [(OpKind.ALL_REDUCE, (0, 1), 800)]),
        ((P, R), (R, 0), [(OpKind.ALL_REDUCE, (0,), 200)]),
        ((P, R), (1, R), [(OpKind.REDUCE_SCATTER, (0,), 800)]),
        ((P, 0), (0, 0), [(OpKind.REDUCE_SCATTER, (0,), 200)]),
        ((P, 0), (R, R), [(OpKind.ALL_REDUCE, (0,), 200), (OpKind.ALL_GATHER, (1,), 800)]),
        ((P, 0), (1, R), [(OpKind.REDUCE_SCATTER, (0,), 200), (OpKind.ALL_GATHER, (1,), 400)]),
        ((P, 0), (0, 1), [(OpKind.REDUCE_SCATTER, (0,), 200), (OpKind.ALL_TO_ALL, (1,), 100)]),
        ((0, R), (R, 0), [(OpKind.ALL_GATHER, (0,), 200)]),
    ],
)
def test_moves_by_hand(before, after, expected):
    """On 2 by 4 devices, a tensor of 800 bytes moves in messages of these bytes."""
    assert [(move.kind, move.axes, move.message_bytes) for move in moves(before, after, 800, SIZES)] == expected


def layouts(num_dims, axes):
    """All layouts without partial sums."""
    return itertools.product((R, *range(num_dims)), repeat=axes)


def test_exchanges_take_the_same_there_and_back():
    """What cuts as many ways before as after moves in the same messages there and back."""
    for before, after in itertools.product(layouts(2, 2), repeat=2):
        if R not in before and R not in after:
            assert moves(before, after, 800, SIZES) == moves(after, before, 800, SIZES)


def test_scattering_sums_takes_what_gathering_them_takes():
    """A reduce-scatter to a layout takes as long as the gather of what lies so."""
    mesh = mesh_of(*SIZES)
    for layout in layouts(2, 2):
        sums = tuple(P if dim >= 0 else R for dim in layout)
        there, back = moves(sums, layout, 8e8, SIZES), moves(layout, (R, R), 8e8, SIZES)

        assert sum(move.seconds(mesh) for move in there) == sum(move.seconds(mesh) for move in back)


def test_shares_by_hand():
    """A device holds one part of each cut, and all of partial sums."""
    assert local_share((0, 1), SIZES) == 1 / 8
    assert local_share((R, 0), SIZES) == 1 / 4
    assert local_share((P, R), SIZES) == 1.0
