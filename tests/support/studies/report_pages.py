"""Small studies with trials, and parsers for the pages of their reports."""

import json
import re
from html.parser import HTMLParser

import optuna

from trials.backend import Observation, Status
from tuner.forecast.candidates import prediction_json
from tuner.report import write_report
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.search.observations import OBSERVATION, STATUS
from tuner.storage.record import PREDICTION, STOP_REASON
from tuner.study_file.config import load_study

CURRENT = "current: {pp: 1, tp: 8, dp: 1, cp: 1, up: 1, vpp: 1, ep: 1, mbs: 1}\n"
STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {recompute: [none, full]}
search: {draws: 20}
trial: {backend: simulated}
"""
SCRIPT_OR_STYLE = re.compile(r"<(script|style)\b[^>]*>.*?</\1>", re.DOTALL)
CRASH = Observation(status=Status.CRASHED, reason="exited with status 1", log_tail="Traceback", origin="synthetic")
OUT_OF_MEMORY = Observation(status=Status.OUT_OF_MEMORY, peak_memory_bytes=90 * 2**30, origin="synthetic")


def study_of(folder, *, text=STUDY + CURRENT):
    """Load the study of a file in `folder`, with its storage beside it."""
    file = folder / "study.yaml"
    file.write_text(text)
    return load_study(file, storage=f"sqlite:///{folder / 'study.db'}")


def run(asked, num_trials, failures=None, *, stop_reason="max_trials"):
    """Run trials as the ask/tell loop stores them; `failures` by trial number replace results of the backend."""
    prepared = prepared_of(asked)
    candidates, sampler = prepared.candidates, make_sampler(prepared)
    study = open_study(prepared, sampler)

    for number in range(num_trials):
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        prediction = prediction_json(prepared.problem, candidates.estimate, candidates.space.memory, position)
        trial.set_user_attr(PREDICTION, prediction)
        observation = (failures or {}).get(number) or prepared.backend.measure(
            sampler.config_of(trial.params), trial_number=number
        )
        trial.set_user_attr(STATUS, observation.status.value)
        trial.set_user_attr(OBSERVATION, observation.as_json())
        if observation.step_time_s is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, observation.step_time_s)
    study.set_user_attr(STOP_REASON, stop_reason)
    return study


def page_of(config, folder):
    """Return the text of the written report."""
    return write_report(config, folder / "report.html").read_text(encoding="utf-8")


def visible(page):
    """Return the page without scripts and styles, which contain only the data of the pictures."""
    return SCRIPT_OR_STYLE.sub("", page)


class Balance(HTMLParser):
    """Parser that collects all elements and attributes, and elements that are closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.elements, self.attributes = [], [], set(), set()

    def handle_starttag(self, tag, attrs):
        """Record an element that opens."""
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Record an element that closes."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def structure_of(page):
    """Parse the elements of a page as a browser does."""
    parser = Balance()
    parser.feed(page)
    parser.close()
    return parser


def figure_of(page, identity):
    """Return the traces and the layout of one picture, as the page passes them to plotly."""
    drawn = re.search(rf'id="figure-{identity}"[^>]*></div><script class="figure"[^>]*>(.*?)</script>', page, re.DOTALL)
    figure = json.loads(drawn[1])
    return figure["data"], figure["layout"]


def section_of(page, identity):
    """Return one section of the page."""
    return re.search(rf'<section id="{identity}">.*?</section>', page, re.DOTALL)[0]
