"""ThompsonSampler: Optuna sampler that chooses the next candidate of a study (FlexParallel 3.2 and 3.3).

The sampler holds the candidates and their posterior. M joint draws of all step times each name their fastest candidate,
and an acquisition function chooses the next trial from them: by default the candidate after whose trial the search is
expected to lose least against these. p_star, the share of draws whose candidate has been tried (equation 6), says when
to stop.

The driver in tuner/run/loop.py calls the same hooks as Optuna does in anybody's own loop:

    candidates = ConfigGrid.from_configs([ParallelConfig(pp=1, tp=8, dp=4), ParallelConfig(pp=4, tp=2, dp=4), ...])
    posterior = posterior_of(Predicted.of_times(predicted_s, features), candidates)
    sampler = ThompsonSampler(candidates, posterior, stop_when_confident=True)
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: measure(sampler.suggest(trial)), n_trials=40)

In place of `sampler.suggest`, an objective may suggest each dimension itself, by any kind of Optuna distribution that
holds the candidates' values: `trial.suggest_categorical("pp", [1, 2, 4, 8])` or `trial.suggest_int("pp", 1, 8)`. It may
leave out dimensions in which all candidates agree. Several threads may ask at once (`n_jobs=2`): no two get the same
candidate. Between processes, a trial is known to others once its parameters are stored.

A trial that fails removes its candidate and counts as a crash of its kind, unless its attribute `status` or its Optuna
constraint `memory` says otherwise: see trials.backend.Status and constraints.py. The attribute `observation` tells more
than a trial's value does: see observations.py.

The study holds all state. The sampler remembers the candidates of trials that are being asked for, and results that can
be computed again. The random stream of a decision depends on the seed and the number of the decision, so that a resumed
study goes on as an undisturbed one. Where MANY trials have ended, draws serve several decisions; a sampler that takes
up such a study makes new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value
from costmodels.surrogates.gaussian_process import one_thread
from hardware.arrays import IntArray
from trials.backend import Observation
from tuner.search.acquisition import AbstractAcquisition, ExpectedLoss
from tuner.search.choices import AbstractChoices, LayoutChoices
from tuner.search.failures import LEARNED
from tuner.search.gain import GAIN_DRAWS, KnownGain, known_gain, with_shared_noise
from tuner.search.knobs.knob_choices import KnobChoices
from tuner.search.knobs.knob_space import KnobSpace
from tuner.search.objectives import Objective
from tuner.search.observations import Ending, ObservationLog, Observations
from tuner.search.optuna_inside import storage_of, trial_id_of
from tuner.search.parameters import ASSIGNMENT, parameter_of, params_of
from tuner.search.population import ENDED, P_STAR, POPULATION, POPULATION_AT_START, Population, as_json, shares
from tuner.search.posterior import Posterior
from tuner.search.prospect import Prospect, prospect_of
from tuner.search.proxy.extrapolation import EXTRAPOLATED, Extrapolated
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.proxy.proxy_trials import Proxy
from tuner.search.rehearsed import Told, after_trials
from tuner.search.standing import KnowsStanding, Standing
from tuner.search.stopping import NO_BUDGETS, Budgets, StopDecision, StopReason, StopRule, decide
from tuner.search.subset import MAX_OBSERVATIONS
from tuner.search.waiting import Wait

CONFIRMATIONS = 2
"""Multiple of M further draws that must agree before a study is confident: with so many looks at M draws, one look will
find more than `confidence` of them by chance."""


MANY = MAX_OBSERVATIONS
"""Number of ended trials from which on the draws serve several decisions."""

RENEWED_BY = 32
"""Share of new trials, 1 in so many, after which draws are renewed: one more trial changes little among many."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Drawn:
    """Draws of one population, with the observations that they were made from.

    Attributes:
        key: Key that is equal for equal observations.
        observations: Observations at the time of the draws.
        population: Population that was drawn.
    """

    key: tuple[object, ...]
    observations: Observations
    population: Population


class ThompsonSampler(BaseSampler):
    """Grey-box Thompson sampling over a finite set of parallelism configurations.

    Args:
        candidates: Configurations to choose from [n].
        posterior: Posterior of the candidates, before any trial of the study; see posterior.py.
        knobs: Knobs that are searched beside the candidates; None without any. See knobs/knob_space.py.
        acquisition: Acquisition function that chooses among the draws.
        draws: Number M of joint draws per decision.
        confidence: Confidence eta; a study may end once p_star exceeds it.
        tolerance: Head start of explored candidates in every draw. A draw names an explored candidate in place of one
            that is faster by less, since nobody pays trials for that. With 0, p_star is exactly equation 6.
        seed: Seed of every decision.
        first: Configuration of the first trial, usually the current one.
        stop_when_confident: Whether to end `study.optimize` at confidence or when every candidate has been tried.
        proxies: Plan of the trials that run a proxy job in place of their candidate; see proxy/proxy_plan.py. A caller
            that runs proxies asks `proxy_for`, and keeps the answer as the trial's attribute `proxy`.
        repeats: Number of further trials of each of the fastest candidates, where their step times are too close to
            tell apart and nothing else is left to try; see replication.py.
        objective: Values that the study minimizes in place of the step time; see objectives.py. With two of them the
            study is one of Optuna's multi-objective studies, and each draw names a candidate of the front.
        first_in_use: Whether `first` is in use today, so that it runs whatever rehearsals say of it.
    """

    def __init__(
        self,
        candidates: ConfigGrid,
        posterior: Posterior,
        *,
        knobs: KnobSpace | None = None,
        acquisition: AbstractAcquisition | None = None,
        draws: int = 100,
        confidence: float = 0.9,
        tolerance: float = 0.01,
        seed: int = 0,
        first: ParallelConfig | None = None,
        stop_when_confident: bool = False,
        proxies: ProxyPlan | None = None,
        repeats: int = 0,
        objective: Objective | None = None,
        first_in_use: bool = False,
    ) -> None:
        if not len(candidates):
            raise ValueError("`candidates` must hold at least one configuration, but got none.")
        if len(posterior.predicted) != len(candidates):
            raise ValueError(
                f"`posterior` must be that of the {len(candidates)} candidates, but got one of "
                f"{len(posterior.predicted)}."
            )
        self._choices: AbstractChoices = (
            LayoutChoices(candidates, posterior) if knobs is None else KnobChoices(candidates, posterior, knobs)
        )
        self._acquisition = acquisition or ExpectedLoss()
        self._draws = draws
        self._tolerance = tolerance
        self._seed = seed
        self._stop_when_confident = stop_when_confident
        self._proxies = proxies
        self._objective = objective
        self._stop_rule = StopRule(
            num_candidates=self._choices.num_candidates,
            confidence=confidence,
            tolerance=tolerance,
            repeats=repeats,
            proxies=proxies,
        )
        self._first = (
            None
            if first is None
            else self.position_of(params_of(first.values(candidates.dimensions)) | dict(first.knobs))
        )
        if first is not None and self._first is None:
            raise ValueError(f"`first` must be a candidate, but got {first}.")
        self._first_in_use = first_in_use
        self._told = Told()
        self._independent = RandomSampler(seed=seed)
        self._log = ObservationLog(self.position_of, self._step_time_of if objective else None)
        self._latest: _Drawn | None = None
        self._conclusions: tuple[_Drawn, list[dict[str, Any]]] | None = None
        self._chosen: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without its lock, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a pickled state, with a lock of this process."""
        self.__dict__.update(state)
        self._lock = threading.RLock()

    @property
    def candidates(self) -> ConfigGrid:
        """Configurations that the sampler chooses from."""
        return self._choices.layouts

    @property
    def choices(self) -> AbstractChoices:
        """Candidates by their positions."""
        return self._choices

    @property
    def proxies(self) -> ProxyPlan | None:
        """Plan of the trials that run a proxy job in place of their candidate."""
        return self._proxies

    @property
    def metric_names(self) -> list[str]:
        """Names of the values that the study minimizes, with their units."""
        return self._objective.labels if self._objective else ["step time [s]"]

    def learn_rehearsals(self, told: Told) -> None:
        """Take what rehearsals told so far; all observations from now on contain it."""
        with self._lock:
            self._told = told

    def _with_conclusions(self, observations: Observations) -> Observations:
        """Return observations with the results of rehearsals, and with the candidates that failures rule out."""
        if observations.misfits:
            observations = replace(observations, implied=self._choices.implied(observations))
        told = self._told
        if not told.refused and not told.accepted:
            return observations
        predicted, layout_of = self._choices.predicted, self._choices.layout_of
        capacity = {at: float(predicted.capacity_bytes[layout_of(at)]) for at in told.needed_bytes}
        measured = {
            at: peak * float(predicted.needed_bytes[layout_of(at)] / predicted.peak_bytes[layout_of(at)])
            for at, peak in observations.peaks_bytes.items()
        }
        # one that ran out of memory needs more than there is, whatever its rehearsal says
        short = {
            at: capacity[at] for at in observations.misfits & capacity.keys() if capacity[at] > told.needed_bytes[at]
        }
        rehearsed = after_trials(
            told,
            ran=observations.explored,
            measured_bytes=measured | short,
            capacity_bytes=capacity,
            num_candidates=self._choices.num_candidates,
        )
        return replace(observations, rehearsed=rehearsed)

    def values_of(self, position: int, observation: Observation) -> list[float]:
        """Return the values of a completed trial of a candidate at full size."""
        assert observation.step_time_s is not None, "the trial completed"
        if self._objective is None:
            return [observation.step_time_s]
        return self._objective.measured(self._choices.layout_of(position), observation)

    def _step_time_of(self, position: int, values: Sequence[float]) -> float:
        """Return the step time of a candidate with such values of its trial [s]."""
        assert self._objective is not None, "without an objective the value is the step time"
        return self._objective.step_time_s(self._choices.layout_of(position), values)

    @property
    def search_space(self) -> dict[str, BaseDistribution]:
        """Optuna distributions of a trial's parameters: one per dimension that identifies a candidate."""
        return dict(self._choices.search_space)

    def suggest(self, trial: Trial) -> ParallelConfig:
        """Return the configuration of `trial`; its parameters are the candidate's dimensions under their own names."""
        suggested: dict[str, Value] = {}
        for name, distribution in self.search_space.items():
            if isinstance(distribution, IntDistribution):
                suggested[name] = trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
            elif isinstance(distribution, CategoricalDistribution):
                suggested[name] = trial.suggest_categorical(name, distribution.choices)  # type: ignore[assignment] # the choices are text or bool
        config = self.config_of(suggested)
        if config.assignment:
            trial.set_user_attr(ASSIGNMENT, str(config.assignment))
        return config

    def config_of(self, params: Mapping[str, Any]) -> ParallelConfig:
        """Return the candidate that a trial's parameters name.

        Raises:
            ValueError: The parameters name no candidate.
        """
        position = self.position_of(params)
        if position is None:
            raise ValueError(f"`params` must name a candidate, but got {params}.")
        return self._choices.config(position)

    def position_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the position of the candidate that a trial's parameters name; None if they name none.

        Dimensions in which all candidates agree may be missing.
        """
        return self._choices.position_of(params)

    # What Optuna calls

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Refuse a study of another kind before its objective is called, and keep the population before any trial.

        Raises:
            ValueError: The study does not minimize one value, or as many as the objective has.
        """
        names = self.metric_names
        if study.directions != [StudyDirection.MINIMIZE] * len(names):
            storage_of(study).set_trial_state_values(trial_id_of(trial), TrialState.FAIL)  # it would stay running
            asked = ", ".join(direction.name.lower() for direction in study.directions)
            raise ValueError(
                f"ThompsonSampler must minimize {'one value' if len(names) == 1 else 'two values'}, "
                f"the {' and the '.join(names)}, but the study's directions are: {asked}."
            )
        if POPULATION_AT_START in study.user_attrs:
            return
        with self._lock:
            observations = self._read_besides(study, trial)
            if not observations.num_decisions:
                study.set_user_attr(POPULATION_AT_START, self._describe_population(observations))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002 # Optuna's signature
        """Return no parameters: an objective may suggest a dimension by a distribution of any kind.

        Optuna refuses a suggestion of another kind than the one named here. `sample_independent` hands out the
        dimensions of one candidate all the same.
        """
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next candidate's values of the dimensions in `search_space`."""
        if not search_space:
            return {}
        params = params_of(self._choices.values(self._candidate_for(study, trial)))
        return {name: params[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the value of a dimension in the trial's candidate; draw other parameters at random.

        Raises:
            ValueError: The distribution does not hold the candidate's value.
        """
        if param_name not in self._choices.search_space:
            return self._independent.sample_independent(study, trial, param_name, param_distribution)
        params = params_of(self._choices.values(self._candidate_for(study, trial)))
        return parameter_of(param_name, params[param_name], param_distribution)

    def reseed_rng(self) -> None:
        """Reseed the draws of foreign parameters; decisions depend on the seed and their number alone."""
        self._independent.reseed_rng()

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Keep what the study knows with the trial, and end `study.optimize` if asked to.

        The trial keeps p_star, the population and the number of trials that ended before it. The study keeps p_star,
        the sentences on its failures, and the answer that proxies suggest.
        """
        known = study.user_attrs
        with self._lock:
            self._chosen.pop((study.study_name, trial.number), None)
            observations = self._read_besides(study, trial, ending=(trial, state, values))
            p_star, population = self.population(observations).p_star, self._describe_population(observations)
            found: dict[str, Any] = {P_STAR: p_star}
            if (conclusions := self._conclude_failures(observations)) or LEARNED in known:
                found[LEARNED] = conclusions
            if (extrapolated := self._extrapolate(observations)) is not None:
                found[EXTRAPOLATED] = extrapolated.as_json()
            stops = self._stop_when_confident and self.decide(observations).reason is not None
        if isinstance(study, KnowsStanding):
            num_ended = len(study.standing.ended)
        else:
            others = (each for each in study.get_trials(deepcopy=False) if each.number != trial.number)
            num_ended = sum(each.state.is_finished() for each in others)
        # written after all is computed: no lock of a database is held in the meantime
        for key, value in {ENDED: num_ended, P_STAR: p_star, POPULATION: population}.items():
            storage_of(study).set_trial_user_attr(trial_id_of(trial), key, value)
        for key, value in found.items():
            if key not in known or known[key] != value:
                study.set_user_attr(key, value)
        if stops:
            study.stop()

    def _candidate_for(self, study: Study, trial: FrozenTrial) -> int:
        """Return the position of the trial's candidate, chosen when its first parameter is asked for.

        The choice is remembered until the trial ends. So threads that ask at the same time see each other's choices
        before their parameters are stored. A trial that has no number yet is not remembered.
        """
        key = (study.study_name, trial.number)
        with self._lock:
            if key in self._chosen:
                return self._chosen[key]
            position = self.choose(self._read_besides(study, trial))
            if trial.number >= 0:
                self._chosen[key] = position
            return position

    def _read_besides(self, study: Study, trial: FrozenTrial, *, ending: Ending | None = None) -> Observations:
        """Return the observations of all trials of a study but one, or with the end of that one.

        Args:
            study: Study of the trials.
            trial: Trial that is left out as the storage holds it.
            ending: The same trial with its state and values, which the storage does not hold yet.
        """
        chosen = {number: position for (name, number), position in self._chosen.items() if name == study.study_name}
        if isinstance(study, KnowsStanding):
            return self._with_conclusions(
                self._log.observations_of(study.standing, but=trial.number, finishing=ending, chosen=chosen)
            )
        others = [each for each in study.get_trials(deepcopy=False) if each.number != trial.number]
        return self._with_conclusions(self._log.observations(others, ending, chosen))

    def _describe_population(self, observations: Observations) -> dict[str, Any]:
        return as_json(shares(self.population(observations).fastest, self._choices.values, observations.explored))

    # What it decides

    def observations(self, trials: Sequence[FrozenTrial]) -> Observations:
        """Return the observations of `trials`, which are all trials of a study or some."""
        return self._with_conclusions(self._log.observations(trials))

    def observations_of(self, standing: Standing, *, but: int | None = None) -> Observations:
        """Return the observations of all trials of a study but one, of which only new ones are read."""
        return self._with_conclusions(self._log.observations_of(standing, but=but))

    def population(self, observations: Observations) -> Population:
        """Return M joint draws of all step times and the fastest candidate of each.

        They are drawn once per state of the study. With MANY ended trials the latest draws serve until RENEWED_BY asks
        for new ones, or until they exceed the confidence: only draws that know every trial end a study.
        """
        latest = self._latest
        if latest is not None and _is_recent(latest.observations, observations):
            p_star = _p_star(latest.population.fastest, observations.explored)
            if p_star <= self._stop_rule.confidence:
                return replace(latest.population, p_star=p_star)
        # equal observations give equal draws, whatever is pending
        key = (
            observations.measured.tobytes(),
            observations.log_step_s.tobytes(),
            observations.explored,
            observations.misfits,
            observations.crashed,
            len(observations.samples),
            observations.proxies,
            observations.rehearsed.key,
        )
        if latest is None or latest.key != key:
            # the stream depends on what is known alone, so that a resumed study draws the same
            rng = np.random.default_rng([self._seed, 0, observations.num_ended, len(observations.measured)])
            drawn, fastest = self._draw_population(observations, self._draws, rng)
            if _p_star(fastest, observations.explored) > self._stop_rule.confidence:
                # confidence by chance is unlikely to survive as many further draws
                fastest = np.append(fastest, self._draw_population(observations, CONFIRMATIONS * self._draws, rng)[1])
            p_star = _p_star(fastest, observations.explored)
            self._latest = latest = _Drawn(
                key=key,
                observations=observations,
                population=Population(fastest=fastest, p_star=p_star, log_step_s=drawn),
            )
        return latest.population

    def _conclude_failures(self, observations: Observations) -> list[dict[str, Any]]:
        """Return the sentences on failures at the time of the latest draws, as JSON."""
        self.population(observations)
        assert self._latest is not None, "a population was drawn"
        if self._conclusions is None or self._conclusions[0] is not self._latest:
            with one_thread():
                found = self._choices.conclusions(self._latest.observations)
            conclusions = [conclusion.as_json() for conclusion in found]
            self._conclusions = self._latest, conclusions
        return self._conclusions[1]

    def _draw_population(
        self, observations: Observations, num_draws: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], IntArray]:
        """Draw joint log step times [num_draws, n], and name the fastest candidate of each draw in which one runs."""
        with one_thread():
            drawn = self._choices.draw(observations, num_draws, rng)
        if self._objective is not None:
            layouts = self._choices.shared_layouts(drawn.shape[1])
            drawn = self._objective.scalarized(drawn, observations.peaks_bytes, rng, layouts=layouts)
        # the head start keeps draws from naming a candidate that is faster by less than the tolerance
        drawn[:, sorted(observations.explored)] -= np.float32(np.log1p(self._tolerance))
        fastest = np.argmin(drawn, axis=1).astype(np.int64)
        return drawn, fastest[np.isfinite(drawn[np.arange(len(drawn)), fastest])]

    def gain(
        self, observations: Observations, best: Mapping[str, Any], reference: Mapping[str, Any]
    ) -> KnownGain | None:
        """Return how many times as fast the best is as the reference, given all observations.

        None where one of them is no candidate, or the reference cannot run.

        Args:
            observations: Observations of the study.
            best: Values that identify the best.
            reference: Values that identify the configuration to compare with.
        """
        positions = [self.position_of(params_of(values)) for values in (reference, best)]
        if any(position is None or position in observations.impossible for position in positions):
            return None
        rng = np.random.default_rng([self._seed, 2, observations.num_ended, len(observations.measured)])
        drawn = self._choices.draw_steps(
            with_shared_noise(observations), np.array(positions, dtype=np.int64), GAIN_DRAWS, rng
        )
        return known_gain(best, reference, drawn[:, 0] - drawn[:, 1], trials=observations.num_decisions)

    def prospect(self, observations: Observations, position: int) -> Prospect:
        """Return what the draws say of a candidate before its trial."""
        population = self.population(observations)
        return prospect_of(position, self._choices, observations, population, is_timed=self._objective is None)

    def decide(self, observations: Observations, budgets: Budgets = NO_BUDGETS) -> StopDecision:
        """Return whether the search ends; see stopping.py."""
        return decide(observations, self.population(observations), self._stop_rule, budgets)

    def waits(self, observations: Observations) -> Wait | None:
        """Return why the next trial depends on a pending one; None where it does not.

        A search that may end with what is pending waits for it, since a further trial would put off its end. One that
        goes on in any case takes the runners-up of the draws.
        """
        if not observations.pending or not observations.num_decisions:
            return None
        decision = self.decide(observations)
        if decision.settled is not None:
            # pending replicates leave the others due; anything else may change who is measured again
            if not observations.pending <= observations.explored:
                return Wait.EXHAUSTED if decision.settled is StopReason.EXHAUSTED else Wait.SETTLED
            return Wait.REPLICATES if decision.replicate in observations.pending else None
        if self._waits_for_proxies(observations):
            return Wait.PROXIES
        if self._goes_on(observations) or self._has_unexplored_draw(observations):
            return None
        return Wait.NOTHING_NAMED

    def _goes_on(self, observations: Observations) -> bool:
        """Return whether the search goes on whatever the pending trials tell."""
        if self._proxies is not None and self._proxies.goes_on(observations, self.population(observations).fastest):
            return False
        # draws that serve several decisions run out of candidates before the search does
        return self._stop_rule.confidence >= 1 or observations.num_ended >= MANY

    def _waits_for_proxies(self, observations: Observations) -> bool:
        """Return whether full size waits for what pending proxies tell."""
        if self._proxies is None or not observations.proxies_pending:
            return False
        return not self._proxies.goes_on(observations, self.population(observations).fastest)

    def _has_unexplored_draw(self, observations: Observations) -> bool:
        """Return whether some draw names a candidate whose trial may tell something that no pending trial will."""
        # while proxies go on, only those that could tell something new count
        fastest = self.population(observations).fastest
        if self._proxies and self._proxies.goes_on(observations, fastest):
            fastest = fastest[~self._proxies.is_settled(observations, fastest)]
        closed = observations.explored | observations.pending
        return any(int(position) not in closed for position in fastest)

    def proxy_for(self, observations: Observations, position: int) -> Proxy | None:
        """Return the proxy that the next trial runs in place of its candidate; None for the candidate itself."""
        if self._proxies is None or not self._proxies.goes_on(observations, self.population(observations).fastest):
            return None
        return self._proxies.of(position)

    def choose(self, observations: Observations) -> int:
        """Return the position of the next candidate, pending ones excluded while another is left.

        The first trial runs the current configuration, or else the candidate that loses least in expectation, since
        nothing has been learned yet that a draw could explore around. The acquisition function chooses all others, and
        replication the last ones. With proxies, trials at full size run the candidates with the
        shortest step in the median of the draws.
        """
        if (position := self.decide(observations).replicate) is not None:
            return position
        if self._proxies is not None:
            return self._choose_with_proxies(self._proxies, observations)
        if not observations.num_decisions and (first := self._first_of(observations)) is not None:
            return first
        return self._acquire(observations, observations.closed)

    def likely_next(self, observations: Observations, count: int) -> list[int]:
        """Return the candidates that would be chosen one after the other if no trial told anything [at most count].

        A candidate that rehearsals rule out is none of them, and neither is one that was tried or is pending.
        """
        closed, found = set(observations.closed), []
        if not observations.num_decisions and (first := self._first_of(observations)) is not None:
            found.append(first)
        while len(found) < count and len(closed | set(found)) < self._choices.num_candidates:
            position = self._acquire(observations, closed | set(found))
            if position in found or position in closed:
                break
            found.append(position)
        return found[:count]

    @property
    def in_use(self) -> int | None:
        """Candidate that is in use today, which runs whatever a rehearsal says; None without one."""
        return self._first if self._first_in_use else None

    def _first_of(self, observations: Observations) -> int | None:
        """Return the configuration of the first trial, unless rehearsals rule out one that is not in use."""
        return None if self._first in observations.dropped and not self._first_in_use else self._first

    def _acquire(self, observations: Observations, but: Collection[int]) -> int:
        """Return the choice of the acquisition function, which is none of `but` while another is left."""
        drawn = self.population(observations).log_step_s
        closed = np.zeros(drawn.shape[1], dtype=np.bool_)
        closed[[position for position in but if position < len(closed)]] = True
        if closed.all():  # the fastest ones are measured again
            closed[sorted(observations.explored)] = False
        # before any result there is nothing that a draw could explore around
        acquisition = self._acquisition if observations.num_decisions else ExpectedLoss()
        return acquisition.choose(
            drawn,
            closed=closed,
            best_s=observations.best_s,
            trial_s=self._choices.trial_s()[: len(closed)],
            layout=self._choices.shared_layouts(len(closed)),
            rng=np.random.default_rng([self._seed, 1, observations.num_decisions]),
        )

    def _choose_with_proxies(self, plan: ProxyPlan, observations: Observations) -> int:
        """Return the next candidate of a study with proxies, whether the candidate or its proxy will run."""
        fastest = self.population(observations).fastest
        if not plan.goes_on(observations, fastest):
            position = self._find_shortest(observations, observations.closed)
            return self._acquire(observations, observations.closed) if position is None else position
        if not observations.num_decisions:
            if (first := self._first_of(observations)) is not None and plan.of(first):
                return first
            # the candidate that most draws name, of those whose proxy could tell something
            return int(np.argmax(np.bincount(fastest[~plan.is_settled(observations, fastest)])))
        # a settled candidate's proxy could tell nothing new, whether or not the candidate itself is closed
        closed = set(observations.closed)
        closed.update(fastest[plan.is_settled(observations, fastest)].tolist())
        while len(closed) < len(self._choices):
            position = self._acquire(observations, closed)
            if not plan.is_settled(observations, np.array([position]))[0]:
                return position
            closed.add(position)
        # only pending ones can be proxied, and nobody should ask now
        return self._acquire(observations, observations.closed)

    def _find_shortest(self, observations: Observations, but: Collection[int]) -> int | None:
        """Return the candidate, none of `but`, with the shortest step in the median of the draws; None if none runs.

        A candidate must run in half of the draws. Few trials are left at full size, so these exploit: a candidate that
        many draws name may be one that varies most.
        """
        # closed candidates are infinite, and so never the shortest
        median = np.median(self.population(observations).log_step_s, axis=0)
        median[sorted(but)] = np.inf
        position = int(np.argmin(median))
        return position if np.isfinite(median[position]) else None

    def _extrapolate(self, observations: Observations) -> Extrapolated | None:
        """Return the candidate that full size would try first; None before a proxy measured a step."""
        timed = [seen.proxy for seen in observations.proxies if seen.log_step_s is not None]
        position = self._find_shortest(observations, ()) if timed else None
        if position is None:
            return None
        # draws in which it cannot run say nothing of its step time
        drawn = self.population(observations).log_step_s[:, position]
        return Extrapolated(
            config=self._choices.values(position),
            step_time_s=float(np.exp(np.median(drawn[np.isfinite(drawn)]))),
            trials=len(timed),
            devices=max(proxy.config.num_devices for proxy in timed),
        )


def _is_recent(before: Observations, now: Observations) -> bool:
    """Return whether draws made from `before` still serve for the observations `now`."""
    num_new = now.num_ended - before.num_ended
    return before.num_ended >= MANY and 0 <= num_new * RENEWED_BY < now.num_ended


def _p_star(fastest: IntArray, explored: Collection[int]) -> float:
    """Return the share of the draws that name an explored candidate (FlexParallel equation 6)."""
    # one look-up for each candidate that draws name: explored ones may be many
    named, counts = np.unique(fastest, return_counts=True)
    return float(sum(count for at, count in zip(named.tolist(), counts.tolist(), strict=True) if at in explored)) / max(
        len(fastest), 1
    )
