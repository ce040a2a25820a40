"""Monte Carlo tree search for one player, over states that several orders of actions lead to (TOAST, 4.1 to 4.3).

A trajectory goes from the root to a state that was never seen, by the action that promises most in every state, or to
where stopping promises more than going on; from a new state it goes on by what was committed and is not done yet, or at
random for a while. It is worth what the best of its states costs, a little more for each action, so that short
trajectories win where several cost the same. States are nodes by what they are, not by how one came there. Actions that
change nothing, and those behind which everything has been seen, are taken out of their node; where the root has none
left, the search is exhausted.

A round is so many trajectories. Then the actions to the best state are committed, and the next round begins there.
After one that finds nothing better than the best of all, the next begins half as deep in what was committed, which
stays until something better takes its place; from the first state such a round is the last.

What an action promises is between the mean and the best of what the trajectories through it were worth, and there is a
bonus where it was taken seldom (UCT, Kocsis and Szepesvári 2006); costs are compared by their logarithms. An action
that was never taken in a state promises what it was worth in others (all moves as first, Gelly and Silver 2007).

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

LEAST_GAIN = 0.1
"""What promises are measured by while less is gained: the logarithm of the first state's cost over the best."""

TRIES = 3
"""Actions among which a random step takes the one that promises most."""


class AbstractGame(Protocol[State]):
    """What is searched."""

    @property
    def num_actions(self) -> int:
        """How many actions there are; each may be taken in every state, and may change nothing there."""

    @property
    def first(self) -> State:
        """Where the search begins."""

    def after(self, state: State, action: int) -> State:
        """The state that an action leads to."""

    def cost(self, state: State) -> float:
        """What a state costs, more than nothing; less is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How a tree grows.

    Attributes:
        trajectories: Of one round.
        depth: The most actions from the first state to any.
        bonus: How much is made of seldom taken actions.
        per_action: The share of its cost that each action adds to a trajectory.
        going_on: The chance that a trajectory goes on by another random action.
        replay: The chance that it goes on instead by what led to the best state and was not done yet.
    """

    trajectories: int = 100
    depth: int = 30
    bonus: float = 0.8
    per_action: float = 1e-4
    going_on: float = 0.7
    replay: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """An action that was taken.

    Attributes:
        action: Its number.
        node: Where it leads.
        visits: Trajectories that took it.
        mean: What these were worth, as cost.
        best: What the best of these was worth.
    """

    action: int
    node: int
    visits: int
    mean: float
    best: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Node(Generic[State]):
    """A state that was seen.

    Attributes:
        state: Which.
        cost: What it costs.
        visits: Trajectories that came by.
        edges: Actions taken from here, the most visited first.
    """

    state: State
    cost: float
    visits: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What was committed.

    Attributes:
        begin: Actions that were committed before and stay.
        trajectories: How many were made.
        actions: Those from the round's root to the best state that it found; none where nothing was better than the
            best of all.
        cost: What the best state costs.
    """

    begin: int
    trajectories: int
    actions: tuple[int, ...]
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tree(Generic[State]):
    """A search that has ended.

    Attributes:
        nodes: Every state that was seen, in the order of discovery; the first one is where it began.
        rounds: In their order.
        best: The number of the cheapest node.
        stop: Why it ended; EXHAUSTED says that all that can be reached was seen, or that a round found nothing better.
        is_complete: Whether every state that actions lead to was seen.
        seconds: Wall time.
        trace: The cost at the start, at every improvement and at the end.
    """

    nodes: tuple[Node[State], ...]
    rounds: tuple[Round, ...]
    best: int
    stop: Stop
    is_complete: bool
    seconds: float
    trace: tuple[Progress, ...]

    @property
    def actions(self) -> tuple[int, ...]:
        """All that were committed and not taken back, in their order."""
        found: tuple[int, ...] = ()
        for each in self.rounds:
            if each.actions:
                found = (*found[: each.begin], *each.actions)
        return found

    def as_json(self) -> dict[str, Any]:
        """The tree as it can be stored and compared: no state, no time."""
        return {
            "best": self.best,
            "rounds": [
                {
                    "begin": each.begin,
                    "trajectories": each.trajectories,
                    "actions": list(each.actions),
                    "cost": each.cost,
                }
                for each in self.rounds
            ],
            "nodes": [
                {
                    "cost": node.cost,
                    "visits": node.visits,
                    "edges": [[edge.action, edge.node, edge.visits, edge.mean, edge.best] for edge in node.edges],
                }
                for node in self.nodes
            ],
        }

    def in_lines(self, called: Callable[[int], str] = str, *, most: int = 5, depth: int = 2) -> list[str]:
        """The most visited part, for people.

        Args:
            called: What an action is called.
            most: Edges of a node that are shown.
            depth: How far from the first state.
        """
        lines = [f"{self.nodes[0].cost:.4f} at the begin, {len(self.nodes):,} states"]

        def show(number: int, level: int) -> None:
            for edge in self.nodes[number].edges[:most]:
                lines.append(f"{'  ' * level}{edge.best:.4f} best of {edge.visits}: {called(edge.action)}")
                if level < depth:
                    show(edge.node, level + 1)

        show(0, 1)
        return lines


@dataclass(slots=True, eq=False)
class _Open(Generic[State]):
    """A node that grows; its arrays have an entry for each action and a last one for stopping [a + 1].

    Attributes:
        number: Of the node.
        state: Which.
        cost: What it costs.
        visits: Trajectories that took each action.
        total: What they were worth together.
        best: What the best of them was worth.
        closed: Whether an action is out.
        children: Where actions lead.
        num_visits: Trajectories that came by.
        is_done: Whether all actions are out.
    """

    number: int
    state: State
    cost: float
    visits: Any = None
    total: Any = None
    best: Any = None
    closed: Any = None
    children: dict[int, _Open[State]] = field(default_factory=dict)
    num_visits: int = 0
    is_done: bool = False

    def open(self, num_actions: int) -> None:
        """Makes room for statistics."""
        if self.visits is None:
            self.visits, self.total = np.zeros(num_actions + 1), np.zeros(num_actions + 1)
            self.best = np.full(num_actions + 1, math.inf)
            self.closed = np.zeros(num_actions + 1, dtype=bool)

    def close(self, action: int) -> None:
        """Takes an action out."""
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
    """Grows a tree until a round finds nothing better, or a limit holds.

    Args:
        game: What is searched.
        options: How.
        rng: Of the random parts.
        limits: Seconds, and states that are seen.
        scripts: Trajectories that are made before all others, and count in the first round.
        clock: Seconds, for time limits and the record.
    """
    return _Search(game, options, rng, limits or Limits(), clock).run(scripts)


def edited(
    game: AbstractGame[State], actions: Sequence[int], *, most: float = math.inf
) -> tuple[State, tuple[int, ...]]:
    """The best that small changes make of a sequence of actions: a search commits, and this takes back.

    One action is left out, put in anywhere, replaced, or two change places; the first change that costs less is made,
    until there is none.

    Args:
        game: Whose actions.
        actions: Where it begins.
        most: States that it may see.
    """
    known: dict[State, float] = {}

    def reached(sequence: Sequence[int]) -> tuple[float, State]:
        state = game.first
        for action in sequence:
            state = game.after(state, action)
        if state not in known:
            known[state] = game.cost(state)
        return known[state], state

    now = tuple(actions)
    cost, state = reached(now)
    while True:
        for other in _changes(now, game.num_actions):
            other_cost, other_state = reached(other)
            if other_cost < cost * (1 - ROUNDING):
                now, cost, state = other, other_cost, other_state
                break
            if len(known) >= most:
                return state, now
        else:
            return state, now


def _changes(sequence: tuple[int, ...], num_actions: int) -> Iterator[tuple[int, ...]]:
    for at in range(len(sequence)):
        yield (*sequence[:at], *sequence[at + 1 :])
    for at in range(len(sequence)):
        for later in range(at + 1, len(sequence)):
            between = sequence[at + 1 : later]
            yield (*sequence[:at], sequence[later], *between, sequence[at], *sequence[later + 1 :])
    for at in range(len(sequence) + 1):
        for action in range(num_actions):
            yield (*sequence[:at], action, *sequence[at:])
            if at < len(sequence):
                yield (*sequence[:at], action, *sequence[at + 1 :])


_Path = Sequence[tuple[_Open[State], int, _Open[State]]]
"""Of a trajectory each state, the action that was taken there, and where it led."""


@dataclass(slots=True)
class _Best(Generic[State]):
    """The best that trajectories of a round have found.

    Attributes:
        worth: What it costs, with what its actions add.
        node: The state.
        actions: To it from the root of the round.
    """

    worth: float
    node: _Open[State]
    actions: tuple[int, ...] = ()


class _Search(Generic[State]):
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
        self.root = self.best = self.seen(game.first)[0]
        self.found = _Best(worth=self.root.cost, node=self.root)
        self.committed: list[tuple[_Open[State], int, _Open[State]]] = []

    def run(self, scripts: Sequence[Sequence[int]]) -> Tree[State]:
        """All rounds."""
        rounds: list[Round] = []
        begin = 0
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
            is_better = found.node.cost < least * (1 - ROUNDING)
            actions = found.actions if is_better else ()
            cost = found.node.cost if is_better else least
            rounds.append(Round(begin=begin, trajectories=count, actions=actions, cost=cost))
            if is_better:
                self.commit(begin, actions)
                begin = len(self.committed)
            elif begin:
                begin //= 2
            else:
                stop = stop or Stop.EXHAUSTED
            root = self.committed[begin - 1][2] if begin else self.root
            self.found = _Best(worth=root.cost, node=root)
        self.note()
        return Tree(
            nodes=tuple(self.ended(node) for node in self.nodes),
            rounds=tuple(rounds),
            best=self.best.number,
            stop=stop,
            is_complete=self.root.is_done,
            seconds=self.clock() - self.began_s,
            trace=tuple(self.trace),
        )

    def commit(self, begin: int, actions: Sequence[int]) -> None:
        """Replaces what was committed from a place on."""
        del self.committed[begin:]
        node = self.committed[-1][2] if begin else self.root
        for action in actions:
            child = self.taken(node, action)
            assert child is not None, "actions of a trajectory change something"
            self.committed.append((node, action, child))
            node = child

    def reason(self) -> Stop | None:
        """The limit that holds."""
        if len(self.nodes) >= self.limits.nodes:
            return Stop.NODES
        return Stop.TIME if self.clock() - self.began_s > self.limits.time_s else None

    def follow(self, script: Sequence[int]) -> None:
        """A trajectory by given actions; those that change nothing are left out."""
        node = self.root
        path: list[tuple[_Open[State], int, _Open[State]]] = []
        for action in script[: self.options.depth]:
            child = self.taken(node, action)
            if child is not None:
                path.append((node, action, child))
                node = child
        self.learn(path)

    def trajectory(self, begin: _Open[State], before: _Path[State]) -> None:
        """One trajectory: by promise as long as states are known, then as the best one went on, or at random."""
        node, most = begin, self.options.depth - len(before)
        path: list[tuple[_Open[State], int, _Open[State]]] = []
        num_seen = len(self.nodes)
        while len(path) < most and len(self.nodes) == num_seen and not node.is_done:
            action = self.chosen(node)
            if action == self.game.num_actions:
                node.close(action)
                break
            child = self.taken(node, action)
            if child is not None:
                path.append((node, action, child))
                node = child
        is_new = len(self.nodes) > num_seen
        if is_new and self.rng.random() < self.options.replay:
            self.learn(path, *self.replayed(node, {action for _, action, _ in (*before, *path)}, most - len(path)))
            return
        while is_new and len(path) < most and self.rng.random() < self.options.going_on:
            action = self.at_random()
            child = self.taken(node, action)
            if child is not None:
                path.append((node, action, child))
                node = child
        self.learn(path)
        begin.num_visits += not path

    def replayed(self, node: _Open[State], done: Container[int], most: int) -> tuple[_Open[State], tuple[int, ...]]:
        """Where all leads from a state that was committed and was not done yet, and what of that changed something.

        The states between are not looked at.
        """
        state = node.state
        actions: list[int] = []
        for _, action, _ in self.committed:
            if action not in done and len(actions) < most:
                other = self.game.after(state, action)
                if other != state:
                    state = other
                    actions.append(action)
        return self.seen(state)[0], tuple(actions)

    def chosen(self, node: _Open[State]) -> int:
        """The action that promises most, or stopping."""
        seen = node.visits > 0
        visits = np.maximum(node.visits, 1.0)
        own = 0.5 * (node.total / visits + np.where(seen, node.best, 0.0))
        promised = np.where(seen, own, node.cost * self.elsewhere())
        promised[-1] = node.cost
        gained = max(math.log(self.root.cost / self.best.cost), LEAST_GAIN)
        bonus = self.options.bonus * np.sqrt(math.log(node.num_visits + 2) / (node.visits + 1))
        score = bonus - np.log(promised) / gained + 1e-9 * self.rng.random(len(bonus))
        score[node.closed] = -math.inf
        return int(score.argmax())

    def at_random(self) -> int:
        """Of a few random actions the one that promises most elsewhere."""
        some = self.rng.integers(0, self.game.num_actions, size=TRIES)
        return int(some[self.elsewhere()[some].argmin()])

    def elsewhere(self) -> Any:
        """What actions were worth in all states, over the costs of these; 1 where they were never taken."""
        return np.where(self.all_visits > 0, self.all_ratios / np.maximum(self.all_visits, 1.0), 1.0)

    def taken(self, node: _Open[State], action: int) -> _Open[State] | None:
        """Where an action leads; None, and it is out, where it changes nothing or all behind it was seen."""
        node.open(self.game.num_actions)
        child = node.children.get(action)
        if child is None and not node.closed[action]:
            state = self.game.after(node.state, action)
            if state == node.state:
                node.close(action)
            else:
                child = node.children[action] = self.seen(state)[0]
        return child

    def learn(self, path: _Path[State], end: _Open[State] | None = None, further: tuple[int, ...] = ()) -> None:
        """Tells the nodes of a trajectory what it was worth from each of them on, and what is done.

        Args:
            path: The trajectory.
            end: Where it went on to; None for nowhere.
            further: By which actions.
        """
        taken = tuple(action for _, action, _ in path)
        worth = math.inf
        if end is not None:
            worth = self.worth(end, (*taken, *further))
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
        """What it is worth to come to a node by actions from the root of the round."""
        own = node.cost * (1 + self.options.per_action * len(actions))
        if own < self.found.worth:
            self.found = _Best(worth=own, node=node, actions=actions)
        return own

    def seen(self, state: State) -> tuple[_Open[State], bool]:
        """The node of a state, and whether it is new."""
        node = self.known.get(state)
        if node is not None:
            return node, False
        node = _Open(number=len(self.nodes), state=state, cost=self.game.cost(state))
        node.open(self.game.num_actions)
        self.known[state] = node
        self.nodes.append(node)
        if node.number == 0 or node.cost < self.best.cost * (1 - ROUNDING):
            self.best = node
            self.note()
        return node, True

    def note(self) -> None:
        """Writes down where the search stands."""
        self.trace.append(
            Progress(seconds=self.clock() - self.began_s, nodes=len(self.nodes), cost=self.best.cost, bound=-math.inf)
        )

    def ended(self, node: _Open[State]) -> Node[State]:
        """A node as it stays."""
        edges = [
            Edge(
                action=action,
                node=child.number,
                visits=int(node.visits[action]),
                mean=float(node.total[action] / max(node.visits[action], 1)),
                best=float(node.best[action]),
            )
            for action, child in node.children.items()
        ]
        edges.sort(key=lambda edge: (-edge.visits, edge.action))
        return Node(state=node.state, cost=node.cost, visits=node.num_visits, edges=tuple(edges))
