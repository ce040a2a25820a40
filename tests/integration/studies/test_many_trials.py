"""What does not grow with the trials of a study: reads of the storage, draws, and what its driver remembers."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import optuna
import pytest
from sqlalchemy import Engine, event

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import Predicted
from tests.unit.tuner.run.test_loop import SMALL, run
from tuner.run.studies import stored_study
from tuner.search.posterior import Posterior, posterior_of
from tuner.search.sampler import MANY, RENEWED_BY, ThompsonSampler
from tuner.search.stopping import StopReason
from tuner.storage.record import best_record, read_records
from tuner.study_file.config import load_study

NUM_TRIALS = 24
SLOTS = 3


@contextmanager
def noted_statements(noted):
    """Every SQL statement that this process executes, in the list."""

    def note(_connection, _cursor, statement, *_):
        noted.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture(scope="module")
def study_run(tmp_path_factory):
    """A study that has run with several slots: its config, its result, and its statements up to each end of a trial."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "study.yaml").write_text(SMALL.replace("space: {pp: [1, 2], ", "space: {"))
    overrides = [f"search.max_trials={NUM_TRIALS}", f"search.parallel_trials={SLOTS}"]
    config = load_study(folder / "study.yaml", overrides=overrides, storage=f"sqlite:///{folder / 'study.db'}")
    noted, counts = [], []

    class Counting:
        """The study's own backend, which notes how many statements came before."""

        def measure(self, chosen, *, trial_number):
            counts.append(len(noted))
            return config.trials.backend.measure(chosen, trial_number=trial_number)

    with noted_statements(noted):
        result, _ = run(config, backend=Counting(), slots=SLOTS)
    return config, result, noted, counts


def test_a_late_trial_takes_no_more_statements_than_an_early_one(study_run):
    """From the first trial to the last each takes as many SQL statements, whatever ended before."""
    _, _, _, counts = study_run

    per_trial = np.diff(counts)[2 : NUM_TRIALS - SLOTS]

    assert max(per_trial[-5:]) <= max(per_trial[:5])


def test_trials_are_read_once(study_run):
    """Between the first measurement and the last a driver reads no attribute of a trial: it knows what it wrote."""
    _, _, noted, counts = study_run

    during = noted[counts[0] : counts[-1]]

    assert not [statement for statement in during if "FROM trial_user_attributes" in statement]


def test_what_a_driver_remembers_is_what_it_wrote(study_run):
    """Its records are those of the storage, but for clocks, operator times and predictions, and so is its best."""
    config, result, _, _ = study_run
    stored = read_records(stored_study(config))

    def compared(record):
        slim = record.observation and replace(record.observation, operator_samples=())
        return replace(record, observation=slim, prediction={}, end_order=None, started_at=None, ended_at=None)

    assert [compared(record) for record in result.records] == [compared(record) for record in stored]
    assert compared(result.best) == compared(best_record(stored))
    assert any(record.observation.operator_samples for record in stored if record.observation)


class Drawing:
    """A study with random draws in place of those of a surrogate; `fastest`, if there is one, wins them all.

    Attributes:
        num_drawn: How often draws were made.
    """

    def __init__(self, monkeypatch, fastest=None):
        self.num_drawn = 0

        def draw(posterior, _observations, num_draws, rng):
            self.num_drawn += 1
            drawn = rng.standard_normal((num_draws, len(posterior.predicted)), dtype=np.float32)
            if fastest is not None:
                drawn[:, fastest] = -10.0
            return drawn

        monkeypatch.setattr(Posterior, "draw", draw)
        grid = ConfigGrid.from_configs([ParallelConfig(pp=1, tp=1, dp=dp) for dp in range(1, 2 * MANY)])
        predicted = Predicted.of_times(np.linspace(1.0, 2.0, len(grid)), np.log2(grid.dp)[:, None])
        self.sampler = ThompsonSampler(grid, posterior_of(predicted, grid), draws=10, confidence=1.0)
        self.study = optuna.create_study(sampler=self.sampler)

    def ask(self):
        """The next trial."""
        return self.study.ask(fixed_distributions=self.sampler.search_space)

    def try_some(self, count):
        """So many trials, each told before the next."""
        for _ in range(count):
            self.study.tell(self.ask(), 1.0)

    @property
    def observations(self):
        """What is known."""
        return self.sampler.observations(self.study.get_trials(deepcopy=False))


def test_draws_of_a_small_study_know_every_trial(monkeypatch):
    """Up to MANY trials each that ends is followed by draws of its own."""
    drawing = Drawing(monkeypatch)
    drawing.try_some(20)

    assert drawing.num_drawn == 1 + 20


def test_draws_of_a_large_study_serve_several_decisions(monkeypatch):
    """Of MANY trials one in RENEWED_BY is followed by new draws."""
    drawing = Drawing(monkeypatch)
    drawing.try_some(MANY)
    before = drawing.num_drawn

    drawing.try_some(4 * MANY // RENEWED_BY)

    assert drawing.num_drawn - before in (3, 4)


def test_no_candidate_of_a_large_study_is_asked_for_twice(monkeypatch):
    """Draws that serve several decisions name a candidate once, and then runners-up."""
    drawing = Drawing(monkeypatch, fastest=0)
    drawing.try_some(MANY)

    asked = [tuple(drawing.ask().params.values()) for _ in range(64)]

    assert len(set(asked)) == 64
    assert not set(asked) & {tuple(trial.params.values()) for trial in drawing.study.trials[:MANY]}


def test_slots_are_kept_busy_where_only_budgets_end_a_search(monkeypatch):
    """Where all draws name what was tried, and no confidence can end it, a study waits for nothing, small or large."""
    drawing = Drawing(monkeypatch, fastest=0)
    drawing.try_some(10)
    drawing.ask()
    waits_when_small = drawing.sampler.waits(drawing.observations)

    drawing.try_some(MANY)

    assert waits_when_small is None
    assert drawing.sampler.waits(drawing.observations) is None


def test_a_large_study_ends_by_draws_that_know_every_trial(monkeypatch):
    """Confidence is told from draws made of all that is known, however few trials are new."""
    drawing = Drawing(monkeypatch, fastest=0)
    drawing.try_some(MANY)
    drawing.sampler._stop_rule = replace(drawing.sampler._stop_rule, confidence=0.9)
    before = drawing.num_drawn

    drawing.try_some(1)

    assert drawing.sampler.decide(drawing.observations).reason is StopReason.CONFIDENT
    assert drawing.num_drawn > before
