"""Check of all values that a study keeps in its storage, before any of them is used.

A storage may have been changed by hand, damaged, or written by another version. So each attribute is held to its form
here, in one place, and everything else reads it without further checks. Attributes and fields that this version does
not know are left alone, and words that a newer version may add, such as a reason to stop, are any text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from optuna import Study
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from costmodels.blocks.operator import OpKind, Phase
from hardware.io.errors import ConfigError, quote_value
from trials.backend import MAX_LOG_TAIL, MAX_LOSSES, Observation, Status
from tuner.search.failures import LEARNED
from tuner.search.gain import GAIN
from tuner.search.observations import FAILS_ALIKE, OBSERVATION, STATUS
from tuner.search.parameters import ASSIGNMENT
from tuner.search.population import ENDED, P_STAR, POPULATION, POPULATION_AT_START
from tuner.search.proxy.extrapolation import EXTRAPOLATED
from tuner.search.proxy.proxy_trials import PROXY
from tuner.storage.record import BASELINE, HISTORY, MEANING, ORIGIN, PREDICTION, SPENT_S, STOP_REASON

LEAST, MOST = 1e-15, 10**18
"""Smallest time, and largest number of any kind, that a storage may hold: sums and ratios of these are finite."""

LEAST_COST = 1e-100
"""Smallest cost of a token other than 0, which no price and no step time of a study stays below."""

Finite = Annotated[float, Field(ge=-MOST, le=MOST)]
Value = int | bool | str | Finite | None
NotNegative = Annotated[float, Field(ge=0, le=MOST)]
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=MOST)]
_Loss = Annotated[tuple[Count, Finite], Field(strict=False)]  # JSON has lists only


class _Form(BaseModel):
    """Form of a JSON object; further fields are of other versions."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Sample(_Form):
    kind: Annotated[OpKind, Field(strict=False)]
    phase: Annotated[Phase, Field(strict=False)]
    shape: list[NotNegative]
    time_s: NotNegative
    count: Count
    name: str


class _Observation(_Form):
    status: Annotated[Status, Field(strict=False)]
    step_times_s: list[Positive]
    operator_samples: list[_Sample]
    expected_steps: Count | None = None
    elapsed_s: NotNegative | None = None
    measured_after_s: NotNegative | None = None
    lost_s: NotNegative = 0.0
    time_limit_s: NotNegative | None = None
    peak_memory_bytes: NotNegative | None = None
    log_tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = ""
    reason: str = ""
    killed_by: str = ""
    origin: str = ""
    clock: str = ""
    taken_from: str = ""
    conditions: dict[str, Finite] = Field(default_factory=dict)
    losses: Annotated[list[_Loss], Field(max_length=MAX_LOSSES)] = Field(default_factory=list)


class _Prediction(_Form):
    step_time_s: Positive
    breakdown_s: dict[str, Finite] = Field(default_factory=dict)
    peak_memory_bytes: NotNegative = 0
    memory_bytes: dict[str, Finite] = Field(default_factory=dict)
    memory_capacity_bytes: NotNegative = 0
    fits: bool = True
    mfu: Finite = 0.0
    tokens_per_s_per_device: Finite = 0.0


class _Population(_Form):
    dimensions: list[str]
    shares: list[list[Value]]
    rest_tried: Finite
    rest_untried: Finite

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        """Check that each share has a value for each dimension, its probability, and whether it was tried."""
        for *key, probability, tried in (share if len(share) > 1 else [None, None, None] for share in self.shares):
            is_share = (
                isinstance(probability, int | float) and not isinstance(probability, bool) and 0 <= probability <= 1
            )
            if len(key) != len(self.dimensions) or not is_share or not isinstance(tried, bool):
                raise ValueError("a share has a value for each dimension, its probability, and whether it was tried")
        return self


class _Proxy(_Form):
    hosts: Count
    layers: Count
    global_batch_size: Count
    config: dict[str, Value]


class _Space(_Form):
    opened: list[str] = Field(default_factory=list)


class _Meaning(_Form):
    space: _Space = _Space()


class _Claim(_Form):
    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: str
    renewed_s: Finite
    pid_namespace: str = ""


class _Conclusion(_Form):
    kind: str
    text: str


class _Extrapolated(_Form):
    config: dict[str, Value]
    step_time_s: Positive
    trials: Count
    devices: Count


class _Gain(_Form):
    best: dict[str, Value]
    reference: dict[str, Value]
    median: Positive
    low: Positive
    high: Positive
    trials: Count


class _Plans(_Form):
    changes: list[dict[str, Any]]
    plans: dict[str, dict[str, Any] | None]


class _OwnPlan(_Form):
    zero_stage: Count
    plan: str
    served: list[list[int]]


class _OwnPlans(_Form):
    rule: str
    reason: str
    candidates: list[_OwnPlan]


def _strict(form: Any) -> TypeAdapter[Any]:
    return (
        TypeAdapter(form) if isinstance(form, type) and issubclass(form, _Form) else TypeAdapter(form, config=_STRICT)
    )


_STRICT = ConfigDict(strict=True)
_OF_STUDY = {
    "driver": _strict(_Claim | None),
    MEANING: _strict(_Meaning),
    ORIGIN: _strict(str),
    STOP_REASON: _strict(str),
    HISTORY: _strict(str),
    SPENT_S: _strict(NotNegative),
    P_STAR: _strict(Share),
    POPULATION_AT_START: _strict(_Population),
    LEARNED: _strict(list[_Conclusion]),
    BASELINE: _strict(dict[str, Value]),
    EXTRAPOLATED: _strict(_Extrapolated | None),
    GAIN: _strict(_Gain | None),
    "layer_plans": _strict(_Plans),
    "own_plans": _strict(dict[str, _OwnPlans]),
}
"""Form of each attribute of a study; see record.py for their meaning."""

_OF_TRIAL = {
    OBSERVATION: _strict(_Observation),
    STATUS: TypeAdapter(Status),
    PREDICTION: _strict(_Prediction),
    PROXY: _strict(_Proxy),
    P_STAR: _strict(Share),
    POPULATION: _strict(_Population),
    ENDED: _strict(Count),
    ASSIGNMENT: _strict(str),
    FAILS_ALIKE: _strict(list[Count]),
}
"""Form of each attribute of a trial."""

_NUMBERED = {f"{P_STAR}:": _OF_TRIAL[P_STAR], f"{POPULATION}:": _OF_TRIAL[POPULATION]}
"""Form of attributes that earlier versions kept on the study, by their beginning before a trial's number."""


def check_values(study: Study) -> None:
    """Check the values of a study and its trials.

    Raises:
        ConfigError: One has another form; the rule names where it stands, and what it should be.
    """
    attributes = study.user_attrs
    _check(attributes, _OF_STUDY, "the study")
    for beginning, form in _NUMBERED.items():
        forms = {key: form for key in attributes if key.startswith(beginning) and key[len(beginning) :].isdigit()}
        _check(attributes, forms, "the study")
    for trial in study.get_trials(deepcopy=False):
        if not isinstance(trial.number, int) or trial.number < 0:  # SQLite keeps in a column what is put there
            raise _of_other_form("a trial", "number", trial.number, "trials are counted from 0")
        _check(trial.user_attrs, _OF_TRIAL, f"trial {trial.number}")
        _check_value(trial)


def _check(attributes: Mapping[str, Any], forms: Mapping[str, TypeAdapter[Any]], where: str) -> None:
    for name, form in forms.items():
        if name not in attributes:
            continue
        try:
            form.validate_python(attributes[name])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join([name, *(str(part) for part in first["loc"] if not str(part).startswith("_"))])
            raise _of_other_form(where, at, first.get("input"), first["msg"]) from None


def check_new_trial(attributes: Mapping[str, Any]) -> None:
    """Check the attributes of a trial before they are written, as they are when they are read.

    Raises:
        ConfigError: No version could read one of them.
    """
    _check_new(attributes, _OF_TRIAL, "a trial")


def check_new_attribute(name: str, value: Any) -> None:
    """Check an attribute of a study before it is written, as it is when it is read.

    Raises:
        ConfigError: No version could read it.
    """
    _check_new({name: value}, _OF_STUDY, "the study")


def storable(observation: Observation) -> Observation:
    """Return an observation that can be read again: the given one, or a failure that says what could not be kept.

    Operator times that are no times are left out.
    """
    observation = replace(observation, operator_samples=observation.timed_samples)
    attributes = {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
    try:
        _check_new(attributes, _OF_TRIAL, "a trial")
    except ConfigError as error:
        reason = f"what it has told cannot be kept: {error.rule}"
        return Observation(status=Status.CRASHED, reason=reason, origin=observation.origin)
    return observation


def _check_new(attributes: Mapping[str, Any], forms: Mapping[str, TypeAdapter[Any]], where: str) -> None:
    try:
        _check(json.loads(json.dumps(attributes)), forms, where)
    except ConfigError as error:
        raise ConfigError(
            error.rule.replace("cannot be used", "would hold what no version reads", 1),
            key=error.key,
            nearest="a number of the study, or of what it measures, is beyond all real ones",
        ) from None


def _check_value(trial: FrozenTrial) -> None:
    """Check that a completed trial has a step time, and measured steps."""
    where = f"trial {trial.number}"
    observation = trial.user_attrs.get(OBSERVATION)
    # the step time is that of the observation, beside which other objectives may be smaller, and a cost may be nothing
    least = LEAST if not observation else LEAST_COST
    if trial.state == TrialState.COMPLETE and not (
        trial.values and all(least <= value <= MOST or (observation and value == 0) for value in trial.values)
    ):
        raise _of_other_form(where, "value", trial.values, "a completed trial's is its step time in seconds")
    if observation and observation["status"] == Status.OK and not observation["step_times_s"]:
        raise _of_other_form(where, "observation.step_times_s", [], "a trial that ended well has measured a step")


def _of_other_form(where: str, at: str, seen: object, rule: str) -> ConfigError:
    return ConfigError(
        f"cannot be used (the value of {at} of {where} is {quote_value(seen)}; {rule})",
        key="storage",
        nearest="if a newer version of Meshtune wrote it, use that version; else restore a copy of the storage",
    )
