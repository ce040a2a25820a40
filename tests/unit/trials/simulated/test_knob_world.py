import numpy as np

from trials.knobs.knob import Knob
from trials.simulated.knob_world import hidden_effects, idle_knobs

KNOBS = (
    Knob(name="switch", values=(False, True), today=False),
    Knob(name="size", values=(1, 2, 4, 8), today=2, affects=("memory",)),
    Knob(name="kind", values=("a", "b", None), today="a"),
)
LOG_DEGREES = np.log2([[1, 2, 4, 1, 1, 1, 1, 1], [8, 1, 1, 1, 2, 1, 1, 4]])


def effects(seed, **values):
    """What some values do to two layouts."""
    return hidden_effects([(knob, values.get(knob.name, knob.today)) for knob in KNOBS], LOG_DEGREES, seed)


def test_today_changes_nothing():
    """Today's values have no effect in any world, since effects are relative to them."""
    for seed in range(20):
        assert not effects(seed).step.any()
        assert not effects(seed).memory.any()


def test_idle_knobs_do_nothing_and_others_do_something():
    """The knobs that a world names idle change neither steps nor memory, whatever their value; others change one."""
    some_idle, some_not = False, False
    for seed in range(20):
        idle = idle_knobs(KNOBS, seed)
        for knob in KNOBS:
            others = [effects(seed, **{knob.name: value}) for value in knob.values if value != knob.today]
            changes = any(each.step.any() or each.memory.any() for each in others)
            assert changes == (knob.name not in idle)
            some_idle |= knob.name in idle
            some_not |= knob.name not in idle
    assert some_idle
    assert some_not


def test_a_world_is_a_function_of_its_seed():
    """Equal seeds give equal effects, and others give others."""
    values = {"switch": True, "size": 8, "kind": None}
    steps = [effects(seed, **values).step.tolist() for seed in (1, 1, 2, 3, 4)]

    assert steps[0] == steps[1]
    assert len({tuple(each) for each in steps}) > 2
