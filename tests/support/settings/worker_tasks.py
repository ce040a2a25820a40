"""Tasks of worker processes in the tests; they are functions of a module so that other processes can import them."""

import time


def squared(task, _):
    """Return the square of the task, and ignore the bound."""
    return task * task


def failing(task, _):
    """Fail on the number 2."""
    if task == 2:
        raise ValueError("two is one too many")
    return task


def bound_seen(_, bound):
    """Return the bound that is known when a task begins."""
    return bound.get()


def lowered(task, bound):
    """Offer the task's cost, and return the bound known afterwards."""
    bound.offer(task)
    return bound.get()


def offer_or_wait(task, bound):
    """Offer 7 in task 0; in all other tasks wait for this bound, up to 30 s, and return the bound seen."""
    if task == 0:
        bound.offer(7.0)
    deadline_s = time.monotonic() + 30.0
    while bound.get() > 7.0 and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return bound.get()
