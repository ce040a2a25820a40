"""Monte Carlo tree search for one player, over states that several orders of actions lead to (TOAST, 4.1 to 4.3).

A trajectory starts at the root and takes the most promising action in every state. It ends at a new state, or where
stopping promises more than any action. From a new state it goes on with committed actions that it has not taken yet, or
at random for a while. Its worth is the cost of the best of its states plus a little for each action, so that of
trajectories with equal costs the shortest wins. Nodes stand for states, however these were reached. Actions that change
nothing are closed in their node, and so are actions with nothing new behind them. Once the root has only closed
actions, the search is exhausted.

A round is a fixed number of trajectories. Afterwards the actions to the best state are committed, and the next round
begins there. After a round without an improvement, the next one begins after half of the committed actions; the other
half is kept until something better replaces it. A round without an improvement from the first state is the last one.

The promise of an action is the average of the mean and the best worth of the trajectories through it. Rarely taken
actions get a bonus (UCT, Kocsis and Szepesvári 2006), and costs are compared by their logarithms. An action that was
never taken in a state has the promise of its worth in other states (all moves as first, Gelly and Silver 2007).

Letters: a actions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tuner.planners.engine.outcome import ROUNDING, Limits, Progress, Stop

State = TypeVar("State", bound=Hashable)
"""State of a game; equal states are one node."""

LEAST_GAIN = 0.1
"""Least gain by which promises are scaled; the gain is the logarithm of the first state's cost over the best cost."""

TRIES = 3
"""Number of random actions of which a random step takes the most promising one."""


class AbstractGame(Protocol[State]):
    """Game to search: states, actions, and costs of states."""

    @property
    def num_actions(self) -> int:
        """Number of actions; each may be taken in every state, and may change nothing there."""

    @property
    def first(self) -> State:
        """State in which the search begins."""

    def after(self, state: State, action: int) -> State:
        """Return the state that an action leads to."""

    def cost(self, state: State) -> float:
        """Return the cost of a state, above zero; less is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """Options of a tree search.

    Attributes:
        trajectories: Number of trajectories of one round.
        depth: Most actions from the first state to any other.
        bonus: Weight of the bonus for rarely taken actions.
        per_action: Fraction of a trajectory's cost that each of its actions adds.
        going_on: Probability that a trajectory goes on with another random action.
        replay: Probability that it goes on with committed actions that it has not taken yet, instead of random ones.
    """

    trajectories: int = 100
    depth: int = 30
    bonus: float = 0.8
    per_action: float = 1e-4
    going_on: float = 0.7
    replay: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Node(Generic[State]):
    """A state that was seen.

    Attributes:
        state: State of the game.
        cost: Cost of the state.
        visits: Number of trajectories through the node.
    """

    state: State
    cost: float
    visits: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tree(Generic[State]):
    """Result of a search.

    Attributes:
        nodes: Every state that was seen, in the order of discovery; the search began in the first one.
        actions: All actions that were committed and not replaced, in their order.
        best: Number of the cheapest node.
        stop: Reason for the end; EXHAUSTED if everything reachable was seen or the last round found nothing better.
        seconds: Wall time [s].
        trace: Progress at the start, at every improvement and at the end.
    """

    nodes: tuple[Node[State], ...]
    actions: tuple[int, ...]
    best: int
    stop: Stop
    seconds: float
    trace: tuple[Progress, ...]


@dataclass(slots=True, eq=False)
class _Open(Generic[State]):
    """A node that grows; its arrays have an entry for each action and a last one for stopping [a + 1].

    Attributes:
        number: Number of the node.
        state: State of the game.
        cost: Cost of the state.
        visits: Number of trajectories that took each action.
        total: Sum of the worths of these trajectories.
        best: Best worth of these trajectories.
        closed: Whether each action is closed.
        children: Node that each action leads to.
        num_visits: Number of trajectories through the node.
        is_done: Whether all actions are closed.
    """

    number: int
    state: State
    cost: float
    visits: Any
    total: Any
    best: Any
    closed: Any
    children: dict[int, _Open[State]] = field(default_factory=dict)
    num_visits: int = 0
    is_done: bool = False

    def close(self, action: int) -> None:
        """Close an action, which is then never taken again."""
        self.closed[action] = True
        self.is_done = bool(self.closed.all())


def search(
    game: AbstractGame[State],
    options: SearchOptions,
    rng: np.random.Generator,
    *,
    limits: Limits | None = None,
    scripts: Sequence[Sequence[int]] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Tree[State]:
    """Grow a tree until a round finds nothing better, or a limit is reached.

    Args:
        game: Game to search.
        options: Options of the search.
        rng: Source of the random numbers.
        limits: Limits of seconds and of states that are seen; None for no limits.
        scripts: Trajectories that are made before all others, and count in the first round.
        clock: Clock in seconds, for time limits and the trace.
    """
    return _Search(game, options, rng, limits or Limits(), clock).run(scripts)


def edit_actions(
    game: AbstractGame[State], actions: Sequence[int], *, most: float = math.inf
) -> tuple[State, tuple[int, ...]]:
    """Improve a sequence of actions by small changes, which can take back committed actions.

    A change leaves out an action, inserts one, replaces one, or swaps two. The first change that costs less is made,
    until there is none.

    Args:
        game: Game of the actions.
        actions: Sequence to begin with.
        most: Most states that may be seen.
    """
    known: dict[State, float] = {}

    def reach(sequence: Sequence[int]) -> tuple[float, State]:
        state = game.first
        for action in sequence:
            state = game.after(state, action)
        if state not in known:
            known[state] = game.cost(state)
        return known[state], state

    now = tuple(actions)
    cost, state = reach(now)
    while True:
        # Changes are tried from the beginning again after each improvement.
        for other in _changes(now, game.num_actions):
            other_cost, other_state = reach(other)
            if other_cost < cost * (1 - ROUNDING):
                now, cost, state = other, other_cost, other_state
                break
            if len(known) >= most:
                return state, now
        else:
            return state, now


def _changes(sequence: tuple[int, ...], num_actions: int) -> Iterator[tuple[int, ...]]:
    """Yield all sequences after one change: an action left out, two swapped, one inserted or one replaced."""
    for at in range(len(sequence)):
        yield (*sequence[:at], *sequence[at + 1 :])
    for at in range(len(sequence)):
        for later in range(at + 1, len(sequence)):
            between = sequence[at + 1 : later]
            yield (*sequence[:at], sequence[later], *between, sequence[at], *sequence[later + 1 :])
    # Insertions and replacements come last, because there are most of them.
    for at in range(len(sequence) + 1):
        for action in range(num_actions):
            yield (*sequence[:at], action, *sequence[at:])
            if at < len(sequence):
                yield (*sequence[:at], action, *sequence[at + 1 :])


_Path = list[tuple[_Open[State], int, _Open[State]]]
"""States of a trajectory, each with the action that was taken there and the state that followed."""


@dataclass(slots=True)
class _Best(Generic[State]):
    """Best state that the trajectories of a round have found.

    Attributes:
        worth: Cost of the state, with the addition for each action.
        node: Node of the state.
        actions: Actions to it from the root of the round.
    """

    worth: float
    node: _Open[State]
    actions: tuple[int, ...] = ()


class _Search(Generic[State]):
    """A search in progress."""

    def __init__(
        self,
        game: AbstractGame[State],
        options: SearchOptions,
        rng: np.random.Generator,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.game, self.options, self.rng, self.limits, self.clock = game, options, rng, limits, clock
        self.began_s = clock()
        self.known: dict[State, _Open[State]] = {}
        self.nodes: list[_Open[State]] = []
        self.trace: list[Progress] = []
        self.all_visits, self.all_ratios = np.zeros(game.num_actions + 1), np.zeros(game.num_actions + 1)
        self.root = self.best = self.node_of(game.first)
        self.found = _Best(worth=self.root.cost, node=self.root)
        self.committed: _Path[State] = []

    def run(self, scripts: Sequence[Sequence[int]]) -> Tree[State]:
        begin = 0
        actions: tuple[int, ...] = ()
        stop = None
        for script in scripts:
            self.follow(script)
        while stop is None:
            root = self.committed[begin - 1][2] if begin else self.root
            count = 0
            while count < self.options.trajectories and not root.is_done and stop is None:
                self.trajectory(root, self.committed[:begin])
                count += 1
                stop = self.reason()
            found = self.found
            least = self.committed[-1][2].cost if self.committed else self.root.cost
            # Only an improvement on everything committed so far is committed.
            is_better = found.node.cost < least * (1 - ROUNDING)
            if is_better:
                self.commit(begin, found.actions)
                actions = (*actions[:begin], *found.actions) if found.actions else actions
                begin = len(self.committed)
            elif begin:
                # Go back to the middle of the committed actions, and look for something better from there.
                begin //= 2
            else:
                stop = stop or Stop.EXHAUSTED
            root = self.committed[begin - 1][2] if begin else self.root
            self.found = _Best(worth=root.cost, node=root)
        self.note()
        return Tree(
            nodes=tuple(Node(state=node.state, cost=node.cost, visits=node.num_visits) for node in self.nodes),
            actions=actions,
            best=self.best.number,
            stop=stop,
            seconds=self.clock() - self.began_s,
            trace=tuple(self.trace),
        )

    def commit(self, begin: int, actions: Sequence[int]) -> None:
        """Replace the committed actions from a place on."""
        del self.committed[begin:]
        node = self.committed[-1][2] if begin else self.root
        for action in actions:
            node = self.advance(node, action, self.committed)

    def reason(self) -> Stop | None:
        """Return the limit that is reached; None if there is none."""
        if len(self.nodes) >= self.limits.nodes:
            return Stop.NODES
        return Stop.TIME if self.clock() - self.began_s > self.limits.time_s else None

    def follow(self, script: Sequence[int]) -> None:
        """Make a trajectory of given actions, leaving out those that change nothing."""
        node = self.root
        path: _Path[State] = []
        for action in script[: self.options.depth]:
            node = self.advance(node, action, path)
        self.learn(path)

    def trajectory(self, begin: _Open[State], before: _Path[State]) -> None:
        """Make one trajectory: by promise while states are known, then by replay of committed actions or at random."""
        node, most = begin, self.options.depth - len(before)
        path: _Path[State] = []
        num_seen = len(self.nodes)
        while len(path) < most and len(self.nodes) == num_seen and not node.is_done:
            # The last entry stands for stopping, which is tried once per node.
            action = self.choose_action(node)
            if action == self.game.num_actions:
                node.close(action)
                break
            node = self.advance(node, action, path)
        is_new = len(self.nodes) > num_seen
        if is_new and self.rng.random() < self.options.replay:
            self.learn(path, *self.replay(node, {action for _, action, _ in (*before, *path)}, most - len(path)))
            return
        while is_new and len(path) < most and self.rng.random() < self.options.going_on:
            node = self.advance(node, self.at_random(), path)
        self.learn(path)
        begin.num_visits += not path

    def replay(self, node: _Open[State], done: Container[int], most: int) -> tuple[_Open[State], tuple[int, ...]]:
        """Take the committed actions that were not taken yet; return the last state and the effective actions.

        Actions that change nothing are left out. The states in between are not priced.
        """
        state = node.state
        actions: list[int] = []
        for _, action, _ in self.committed:
            if action not in done and len(actions) < most:
                other = self.game.after(state, action)
                if other != state:
                    state = other
                    actions.append(action)
        return self.node_of(state), tuple(actions)

    def choose_action(self, node: _Open[State]) -> int:
        """Return the most promising action, or the number of actions for stopping."""
        # The promise is 0.5 * (mean + best) of the own trajectories. Without any, it is the mean ratio of worth to cost
        # in other states, times the cost of this one.
        seen = node.visits > 0
        visits = np.maximum(node.visits, 1.0)
        own = 0.5 * (node.total / visits + np.where(seen, node.best, 0.0))
        promised = np.where(seen, own, node.cost * self.ratios_elsewhere())
        promised[-1] = node.cost
        # Scores are logarithms of costs, scaled by the whole gain so far, so that the bonus has the same weight in all
        # games. Tiny random numbers break ties.
        gained = max(math.log(self.root.cost / self.best.cost), LEAST_GAIN)
        bonus = self.options.bonus * np.sqrt(math.log(node.num_visits + 2) / (node.visits + 1))
        score = bonus - np.log(promised) / gained + 1e-9 * self.rng.random(len(bonus))
        score[node.closed] = -math.inf
        return int(score.argmax())

    def at_random(self) -> int:
        """Return the most promising of a few random actions, by their worth in other states."""
        # A few random draws are enough to prefer good actions without always taking the same.
        some = self.rng.integers(0, self.game.num_actions, size=TRIES)
        return int(some[self.ratios_elsewhere()[some].argmin()])

    def ratios_elsewhere(self) -> Any:
        """Return the mean ratio of worth to cost of each action over all states; 1 where it was never taken [a + 1]."""
        return np.where(self.all_visits > 0, self.all_ratios / np.maximum(self.all_visits, 1.0), 1.0)

    def advance(self, node: _Open[State], action: int, path: _Path[State]) -> _Open[State]:
        """Return the node that an action leads to, and append the action to the path.

        Where it changes nothing, or everything behind it was seen, the action is closed and the node stays.
        """
        child = node.children.get(action)
        if child is None and not node.closed[action]:
            # Orders of actions that lead to the same state share a node.
            state = self.game.after(node.state, action)
            if state == node.state:
                node.close(action)
            else:
                child = node.children[action] = self.node_of(state)
        if child is None:
            return node
        path.append((node, action, child))
        return child

    def learn(self, path: _Path[State], end: _Open[State] | None = None, further: tuple[int, ...] = ()) -> None:
        """Update the statistics of all nodes of a trajectory, and close actions with nothing new behind them.

        Args:
            path: Trajectory from the root of the round.
            end: Last state of a replay behind the trajectory; None without a replay.
            further: Actions of that replay.
        """
        taken = tuple(action for _, action, _ in path)
        worth = math.inf if end is None else self.worth(end, (*taken, *further))
        # From the end to the root, the worth is the best cost behind each action.
        for length in range(len(path), 0, -1):
            node, action, child = path[length - 1]
            worth = min(worth, self.worth(child, taken[:length]))
            node.num_visits += 1
            node.visits[action] += 1
            node.total[action] += worth
            node.best[action] = min(node.best[action], worth)
            self.all_visits[action] += 1
            self.all_ratios[action] += worth / node.cost if node.cost > 0 else 1.0
            if child.is_done:
                node.close(action)

    def worth(self, node: _Open[State], actions: tuple[int, ...]) -> float:
        """Return the worth of reaching a node by actions from the root of the round, and keep it if it is the best."""
        own = node.cost * (1 + self.options.per_action * len(actions))
        if own < self.found.worth:
            self.found = _Best(worth=own, node=node, actions=actions)
        return own

    def node_of(self, state: State) -> _Open[State]:
        """Return the node of a state, which is new if the state was not seen before."""
        if state in self.known:
            return self.known[state]
        # The last entry of each array stands for stopping.
        entries = self.game.num_actions + 1
        node = self.known[state] = _Open(
            number=len(self.nodes),
            state=state,
            cost=self.game.cost(state),
            visits=np.zeros(entries),
            total=np.zeros(entries),
            best=np.full(entries, math.inf),
            closed=np.zeros(entries, dtype=bool),
        )
        self.nodes.append(node)
        if node.number == 0 or node.cost < self.best.cost * (1 - ROUNDING):
            self.best = node
            self.note()
        return node

    def note(self) -> None:
        self.trace.append(
            Progress(seconds=self.clock() - self.began_s, nodes=len(self.nodes), cost=self.best.cost, bound=-math.inf)
        )
