"""What workers are asked to do in the tests: functions of a module, so that other processes find them."""

import time


def squared(task, _):
    """The task's square; the bound plays no part."""
    return task * task


def failing(task, _):
    """Fails on the number 2."""
    if task == 2:
        raise ValueError("two is one too many")
    return task


def bound_seen(_, bound):
    """The bound with which a task begins."""
    return bound.get()


def lowered(task, bound):
    """Offers the task's cost; what it knows of the bound then."""
    bound.offer(task)
    return bound.get()


def offer_or_wait(task, bound):
    """Task 0 offers 7; the others wait for it, up to 30 s, and return what they see."""
    if task == 0:
        bound.offer(7.0)
    deadline_s = time.monotonic() + 30.0
    while bound.get() > 7.0 and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return bound.get()
