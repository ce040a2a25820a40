"""Studies whose simulated cluster loses hosts and gets them back."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.support.studies.in_process_executor import InProcessExecutor
from trials.on_ray.placement import no_room
from tuner.answers.fewer_hosts import phases_of
from tuner.report.data import collect
from tuner.report.page import render_report
from tuner.run import driver
from tuner.run.following import run_following
from tuner.search.stopping import StopReason
from tuner.storage.history import past_of
from tuner.storage.opening import find_study
from tuner.storage.record import HISTORY, SPENT_S, read_records
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study, name_on
from tuner.study_file.request import HistoryOptions
from tuner.study_file.storage_address import StorageAddress

STUDY = """
name: small
model: llama-7b
cluster: {{name: dgx-a100, hosts: 4, trace: trace.csv}}
job: {{sequence_length: 4096, global_batch_size: 64}}
space: {{pp: [1, 2, 4], cp: [1], up: [1], vpp: [1], mbs: [1]}}
search: {{draws: 10, confidence: 1.0, max_trials: {trials}}}
trial: {{backend: simulated}}
"""


class Clocked:
    """Study whose clock advances by ten seconds with each trial."""

    def __init__(self, folder, rows, trials=9):
        self.storage = f"sqlite:///{folder / 'study.db'}"
        self.file = folder / "study.yaml"
        self.file.write_text(STUDY.format(trials=trials), encoding="utf-8")
        (folder / "trace.csv").write_text(f"time_s,link,share\n{rows}", encoding="utf-8")
        self.now_s = 0.0
        self.ran = []
        self.limit = None

    def load(self, hosts=None):
        """The study, or that on some hosts."""
        return load_study(self.file, storage=self.storage, hosts=hosts)

    def stored(self):
        """Its storage, opened anew."""
        return StoredStudies(StorageAddress.parse(self.storage))

    def executor(self, prepared):
        """An executor whose trials take ten seconds; after the limit the run is interrupted."""
        outer = self

        class Executor(InProcessExecutor):
            def poll(self, timeout_s):
                if outer.limit is not None and len(outer.ran) >= outer.limit:
                    raise KeyboardInterrupt
                outer.now_s += 10.0
                outer.ran += [prepared.request.name] * bool(self.waiting)
                return super().poll(timeout_s)

        return Executor(prepared.backend)

    def run(self):
        """Run it as `meshtune run` does."""
        return run_following(
            self.load(), self.load, executor_of=self.executor, clock=lambda: self.now_s, on_progress=lambda _: None
        )

    def records(self, name="small"):
        """The trials of one of its studies."""
        return read_records(find_study(StorageAddress.parse(self.storage), name))


@pytest.mark.slow
def test_a_study_goes_on_with_the_hosts_that_are_left(tmp_path):
    """It tries candidates of two hosts while two are lost, and goes on with its own grid when they are back."""
    study = Clocked(tmp_path, "25,h1,lost\n25,h3,lost\n55,h1,back\n55,h3,back\n")
    done = study.run()
    whole, fewer = study.records(), study.records("small.on-2-hosts")

    assert [name for name, _ in itertools.groupby(study.ran)] == ["small", "small.on-2-hosts", "small"]
    assert study.ran.count("small.on-2-hosts") == 3
    assert len(whole) + len(fewer) == 9 == len(study.ran)
    assert {record.params["pp"] * record.params["tp"] * record.params["dp"] for record in fewer} == {16}
    assert {record.params["pp"] * record.params["tp"] * record.params["dp"] for record in whole} == {32}
    assert all(record.finished for record in (*whole, *fewer))
    assert done.hosts == (0, 1, 2, 3)
    assert done.result.stop_reason == StopReason.TRIALS
    assert done.result.warnings[-1].startswith("3 trials on 2 of 4 hosts (h0, h2)")
    assert [(one.study_name, one.hosts, len(one.records)) for one in phases_of(study.load(), study.stored())] == [
        ("small.on-2-hosts", (0, 2), 3)
    ]


@pytest.mark.slow
def test_the_trials_of_other_hosts_are_history(tmp_path):
    """What a phase measured corrects the predictions of the whole study, and the other way round."""
    study = Clocked(tmp_path, "25,h3,lost\n25,h2,lost\n55,h3,back\n55,h2,back\n")
    told = []
    run_following(
        study.load(), study.load, executor_of=study.executor, clock=lambda: study.now_s, on_progress=told.append
    )
    whole = past_of(replace(study.load(), history=HistoryOptions(kin=("small.on-2-hosts",)))).runs
    fewer = past_of(replace(study.load((0, 1)), history=HistoryOptions(kin=("small",)))).runs
    notes = " ".join(progress.note for progress in told)

    assert {run.cluster.num_hosts for run in whole} == {2}
    assert {run.cluster.num_hosts for run in fewer} == {4}
    assert past_of(study.load()).runs == ()
    assert (
        find_study(StorageAddress.parse(study.storage), "small.on-2-hosts")
        .user_attrs[HISTORY]
        .startswith("history: 3 ")
    )
    assert "goes on with 2 of 4 hosts" in notes


@pytest.mark.slow
def test_a_killed_study_goes_on_where_it_was(tmp_path):
    """An interrupted study resumes in the phase of the time that it has run; a third host stays idle."""
    study = Clocked(tmp_path, "25,h3,lost\n75,h3,back\n")
    study.limit = 5
    first = study.run()
    study.limit = None
    second = study.run()

    assert first.result.stop_reason == StopReason.INTERRUPTED
    assert first.hosts == (0, 1)
    assert second.result.stop_reason == StopReason.TRIALS
    assert second.hosts == (0, 1, 2, 3)
    assert [name for name, _ in itertools.groupby(study.ran)] == ["small", "small.on-2-hosts", "small"]
    assert len(study.records()) + len(study.records("small.on-2-hosts")) == 9


@pytest.mark.slow
def test_the_budget_of_trials_is_one(tmp_path):
    """If the budget is spent while hosts are lost, the answer is that on the hosts that are left."""
    study = Clocked(tmp_path, "25,h0,lost\n25,h1,lost\n", trials=6)
    done = study.run()

    assert len(study.ran) == 6
    assert done.hosts == (2, 3)
    assert done.prepared.request.name == "small.on-2-hosts"
    assert done.result.best is not None
    assert find_study(StorageAddress.parse(study.storage), "small").user_attrs[SPENT_S] >= 25


def test_hosts_lost_from_the_start(tmp_path):
    """A study that begins without a host begins with a phase, which the whole study names."""
    study = Clocked(tmp_path, "0,h2,lost\n", trials=2)
    done = study.run()

    assert done.hosts == (0, 1)
    assert [one.study_name for one in phases_of(study.load(), study.stored())] == ["small.on-2-hosts"]


def test_a_cluster_without_room_is_a_mistake_before_the_first_trial(tmp_path):
    """A study that never ran on all its hosts is refused, where their number is described wrongly."""
    study = Clocked(tmp_path, "")
    refusal = no_room(study.load().trials.backend.hosts, ())

    def refuse(_config):
        raise refusal

    with pytest.raises(type(refusal)):
        run_following(study.load(), study.load, executor_of=refuse)


def test_names_of_phases(tmp_path):
    """Equal hosts share a phase, unlike ones have their own, and a long name is cut to one that fits."""
    study = Clocked(tmp_path, "")
    cluster = study.load().problem.setting.cluster
    unlike = tmp_path / "unlike.yaml"
    unlike.write_text(
        STUDY.format(trials=1).replace(
            "{name: dgx-a100, hosts: 4, trace: trace.csv}",
            "{groups: [{name: dgx-a100, hosts: 1}, {name: dgx-h100, hosts: 2}]}",
        ),
        encoding="utf-8",
    )
    other = load_study(unlike).problem.setting.cluster

    assert name_on("a", cluster, (1, 3)) == name_on("a", cluster, (0, 1)) == "a.on-2-hosts"
    assert name_on("a", other, (0, 1)) == name_on("a", other, (0, 2)) == "a.on-2-hosts"
    assert name_on("a", other, (1, 2)) == "a.on-h1-h2"
    assert len(name_on("a" * 128, cluster, (1,))) == 128
    assert name_on("a" * 128, cluster, (1,)) != name_on("a" * 128, cluster, (1, 2))


@pytest.mark.slow
def test_status_and_report_say_where_trials_ran(tmp_path, meshtune):
    """Status, its JSON and the report name the hosts of trials that ran while others were lost."""
    study = Clocked(tmp_path, "25,h1,lost\n25,h3,lost\n55,h1,back\n55,h3,back\n", trials=6)
    study.run()
    words, data = (meshtune("status", study.file, "--storage", study.storage, *more) for more in ((), ("--json",)))
    page = render_report(collect(study.load()))
    fewer = data.json["fewer_hosts"]

    assert "Ran besides: 3 trials on 2 of 4 hosts (h0, h2)" in words.out
    assert [(one["study_name"], one["hosts"], one["trials"]) for one in fewer] == [("small.on-2-hosts", [0, 2], 3)]
    assert "On 2 of 4 hosts (h0, h2)" in page


@pytest.mark.slow
def test_status_of_a_phase_that_runs(tmp_path, meshtune):
    """While a process drives the study on fewer hosts, status says so, and gives no reason for a stop."""
    study = Clocked(tmp_path, "25,h1,lost\n25,h3,lost\n", trials=4)
    study.run()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        held = {**driver._own_claim(time.time()), "pid": other.pid, "started": driver._start_of(other.pid)}
        find_study(StorageAddress.parse(study.storage), "small.on-2-hosts").set_user_attr(driver.DRIVER, held)
        words, data = (meshtune("status", study.file, "--storage", study.storage, *more) for more in ((), ("--json",)))
        other.kill()

    assert "running on 2 of 4 hosts (h0, h2)" in words.out
    assert data.json["stop_reason"] is None
