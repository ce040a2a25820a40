"""Plans that are kept between studies: who finds them, and what becomes of files that are damaged."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.planned_studies import NUM_SHAPES, planned_study_text
from tuner.forecast.planned_candidates import as_stored, grid_to_plan, plan_problem
from tuner.plans import layer_plans
from tuner.plans.layer_tasks import layer_tasks
from tuner.plans.plan_cache import OFF, SIZE_VARIABLE, VARIABLE, PlanCache, cache_folder, key_of, most_kept_bytes
from tuner.study_file.config import load_study

KEYS = """
import sys
from tests.unit.tuner.plans.test_plan_cache import tasks_of
from tuner.plans.plan_cache import key_of
print(*(key_of(task) for task in tasks_of(sys.argv[1])))
"""


@pytest.fixture
def file(tmp_path):
    """Return the file of a study with three shapes."""
    (tmp_path / "study.yaml").write_text(planned_study_text(), encoding="utf-8")
    return tmp_path / "study.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of kept plans, which is empty."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def tasks_of(file, **changes):
    """Return the shapes of a study to plan, with another job."""
    problem = load_study(file).problem
    job = replace(problem.setting.job, **changes)
    return layer_tasks(job, problem.cluster, problem.space().grid, problem.planning)


def planned(file, monkeypatch):
    """Return the plans of a study as it stores them, the shapes that were planned for it, and the notes."""
    shapes, notes = [], []
    plan_layer = layer_plans.plan_layer
    problem = load_study(file).problem
    with monkeypatch.context() as patch:
        patch.setattr(layer_plans, "plan_layer", lambda task: shapes.append(task) or plan_layer(task))
        found = plan_problem(problem, grid_to_plan(problem, None), on_note=notes.append)
    return json.loads(json.dumps(as_stored(found))), shapes, notes


def test_a_second_study_plans_nothing(file, folder, monkeypatch):
    """It takes the plans that the first one made, and these are the same."""
    first, made, _ = planned(file, monkeypatch)
    second, made_again, notes = planned(file, monkeypatch)

    assert len(made) == len(list(folder.iterdir())) == NUM_SHAPES
    assert (made_again, notes) == ([], [])
    assert second == first


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"found": {}}', b"\xff", None])
def test_a_damaged_file_is_named_and_planned_anew(file, folder, monkeypatch, damage):
    """Neither a cut file nor one with another content is taken, and the next study finds a whole one."""
    first, _, _ = planned(file, monkeypatch)
    broken = sorted(folder.iterdir())[0]
    whole = broken.read_bytes()
    other = json.loads(whole)
    other["found"]["summary"]["step_time_s"] *= 2
    broken.write_bytes(json.dumps(other).encode() if damage is None else damage)

    second, made, notes = planned(file, monkeypatch)

    assert second == first
    assert len(made) == 1
    assert notes == [f"{broken}: the kept plan is damaged; its shape is planned anew"]
    assert broken.read_bytes() == whole


def test_a_folder_that_takes_nothing_is_named_once(file, folder, monkeypatch):
    """A study is planned all the same where a file stands in the place of the folder."""
    folder.parent.write_text("", encoding="utf-8")
    _, made, notes = planned(file, monkeypatch)

    assert len(made) == NUM_SHAPES
    assert len(notes) == 1
    assert "plans cannot be kept there" in notes[0]


def test_what_is_no_file_is_named(file, folder, monkeypatch):
    """A pipe in a file's place is not waited for, and the study is planned."""
    planned(file, monkeypatch)
    broken = sorted(folder.iterdir())[0]
    broken.unlink()
    os.mkfifo(broken)
    _, made, notes = planned(file, monkeypatch)

    assert len(made) == 1
    assert notes[0].startswith(f"{broken}: the kept plan ")


def test_the_key_is_of_all_that_a_plan_rests_on(file):
    """Another model, precision, number of micro-batches or planner has other plans; the name of the study has not."""
    (task, *others) = tasks_of(file)
    changed = [
        replace(task, job=replace(task.job, sequence_length=2 * task.job.sequence_length)),
        replace(task, job=replace(task.job, precision="fp8")),
        replace(
            task,
            job=replace(task.job, model=replace(task.job.model, tied_embeddings=not task.job.model.tied_embeddings)),
        ),
        replace(task, cluster=task.cluster.with_hosts(1)),
        replace(task, num_micro_batches=task.num_micro_batches + 1),
        replace(task, planning=replace(task.planning, name="recursive")),
    ]

    keys = [key_of(each) for each in (task, *others, *changed)]

    assert len(set(keys)) == len(keys)
    assert key_of(replace(task, job=replace(task.job, global_batch_size=1024))) == key_of(task)


def test_processes_agree_on_keys(file):
    """A key rests on no order that changes from process to process, such as that of sets."""
    own = [key_of(task) for task in tasks_of(file)]
    command = [sys.executable, "-c", KEYS, str(file)]

    for seed in ("1", "2"):
        told = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert told.stdout.split() == own


def test_the_variable_names_the_folder(tmp_path):
    """Without it the folder is that of the platform; `off` keeps nothing."""
    assert cache_folder({VARIABLE: OFF}) is None
    assert cache_folder({VARIABLE: str(tmp_path)}) == tmp_path / "plans"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "meshtune" / "plans"


def test_without_a_folder_nothing_is_kept(file):
    """The cache then finds nothing and writes nothing."""
    (task, *_) = tasks_of(file)
    cache = PlanCache(None)
    cache.keep(task, {"change": None})

    assert cache.find(task) is None
    assert cache.notes == []


FILL = """
import sys
from pathlib import Path
from tests.unit.tuner.plans.test_plan_cache import tasks_of
from tuner.plans.plan_cache import PlanCache
cache = PlanCache(Path(sys.argv[2]), most_bytes=2000)
for round in range(50):
    for task in tasks_of(sys.argv[1], sequence_length=1024 * (1 + round)):
        cache.keep(task, {"change": None, "round": round})
        assert cache.find(task) in (None, {"change": None, "round": round})
    cache.trim()
print(*cache.notes)
"""


def test_the_folder_keeps_to_its_size(file, folder, monkeypatch):
    """What was not used for the longest time goes first, and a plan that a study took counts as used."""
    planned(file, monkeypatch)
    oldest, second, *others = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for age, path in enumerate((oldest, second, *others)):
        os.utime(path, (1000 + age, 1000 + age))
    used = next(task for task in tasks_of(file) if key_of(task) == oldest.stem)
    cache = PlanCache(folder, most_bytes=sum(path.stat().st_size for path in folder.iterdir()) - 1)

    assert cache.find(used) is not None
    cache.trim()

    assert set(folder.iterdir()) == {oldest, *others}


def test_nothing_is_removed_within_the_size(file, folder, monkeypatch):
    """Also where the files take exactly as much."""
    planned(file, monkeypatch)
    before = set(folder.iterdir())
    PlanCache(folder, most_bytes=sum(path.stat().st_size for path in before)).trim()

    assert set(folder.iterdir()) == before


def test_a_study_trims_the_folder(file, folder, monkeypatch):
    """Whatever stood in it before; without room nothing stays."""
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    _, made, notes = planned(file, monkeypatch)

    assert (len(made), notes, list(folder.iterdir())) == (NUM_SHAPES, [], [])


def test_processes_trim_one_folder_side_by_side(file, tmp_path):
    """None fails or reads half a file, and the folder keeps to its size."""
    command = [sys.executable, "-c", FILL, str(file), str(tmp_path / "shared")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    assert [process.communicate()[0].strip() for process in running] == [""] * 3
    assert [process.returncode for process in running] == [0] * 3
    assert sum(path.stat().st_size for path in (tmp_path / "shared").iterdir()) <= 2000


@pytest.mark.parametrize("named", ["", "0", "1.5"])
def test_the_variable_names_the_size(named):
    """In MiB, and 256 without it."""
    assert most_kept_bytes({SIZE_VARIABLE: named}) == float(named or 256) * 2**20


@pytest.mark.parametrize("named", ["-1", "nan", "inf", "much"])
def test_a_wrong_size_is_named(named):
    """The message names the variable."""
    with pytest.raises(ConfigError, match=SIZE_VARIABLE):
        most_kept_bytes({SIZE_VARIABLE: named})
