import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from trials.backend import MAX_LOSSES
from trials.command.training_folder import KEPT, NoProgressError, TrainingFolder, losses_of_training, step_in


@pytest.fixture
def folder(tmp_path):
    """The folder of a training that begins with new weights."""
    return TrainingFolder(study="mine", folder=tmp_path / "checkpoints")


def tried(folder, trial, *, saved=None, steps=7):
    """The state of the training after a trial that leaves a checkpoint of a step, or none."""
    folder.check()
    progress, saves = folder.progress(), folder.place_of(trial)
    folder.clean(progress)
    folder.begin(progress, saves)
    assert progress.checkpoint.is_dir()
    if saved is not None:
        (saves / f"step-{saved}").mkdir()
    return folder.advance(progress, saves, steps=steps, trial=trial, layout=f"tp={trial}")


def test_each_trial_begins_where_the_last_has_ended(folder):
    """The first loads an empty folder; each of the others loads what the one before saved, also after a restart."""
    assert folder.progress().step == 0
    assert tried(folder, 0, saved=7).step == 7
    after = tried(folder, 1, saved=14)

    assert after == folder.progress()
    assert (after.step, after.checkpoint.name) == (14, "trial-0001")
    assert [(each.first_step, each.last_step, each.layout) for each in after.trials] == [
        (0, 7, "tp=0"),
        (7, 14, "tp=1"),
    ]
    assert after.in_words.startswith("The training has done 14 steps, 14 of them in 2 trials")
    values = folder.values(after, folder.place_of(2), 7)
    assert values["checkpoint"] == str(after.checkpoint)
    assert (values["first_step"], values["last_step"]) == ("14", "21")


@pytest.mark.parametrize(("saved", "why"), [(None, "left no checkpoint"), (7, "is of step 7"), (3, "is of step 3")])
def test_a_trial_that_does_not_go_on_changes_nothing(folder, saved, why):
    """Steps do not count without a checkpoint, or with one of no later step, as of a program that loads nothing."""
    before = tried(folder, 0, saved=7)

    with pytest.raises(NoProgressError, match=why):
        tried(folder, 1, saved=saved)

    assert folder.progress() == before
    assert tried(folder, 2, saved=14).step == 14


def test_a_checkpoint_that_says_no_step_has_those_that_were_asked_for(folder):
    """A program with another convention is taken at its word."""
    folder.check()
    saves = folder.place_of(0)
    folder.begin(folder.progress(), saves)
    (saves / "model.pt").write_bytes(b"weights")

    assert folder.advance(folder.progress(), saves, steps=7, trial=0, layout="").step == 7


def test_only_the_latest_checkpoints_and_what_others_made_stay(folder):
    """Old checkpoints and those of failed trials go when the next trial begins; other folders and files are left."""
    for trial in range(4):
        tried(folder, trial, saved=7 * (trial + 1))
    (folder.folder / "trial-best").mkdir()
    (folder.folder / "notes").write_text("mine", encoding="utf-8")
    with pytest.raises(NoProgressError):
        tried(folder, 4)

    folder.clean(folder.progress())

    latest = {f"trial-{trial:04}" for trial in range(4 - KEPT, 4)}
    assert {place.name for place in folder.folder.iterdir()} == latest | {"new", "notes", "progress.json", "trial-best"}


def test_a_trial_never_saves_where_something_lies(folder):
    """A trial that is tried again under its number gets another folder, and the training's checkpoint stays."""
    tried(folder, 0, saved=7)

    assert tried(folder, 0, saved=14).checkpoint.name == "trial-0000-2"
    assert (folder.folder / "trial-0000" / "step-7").is_dir()


def test_a_training_belongs_to_one_study(folder):
    """Another study in the same folder is refused, with the nearest choice."""
    tried(folder, 0, saved=7)

    with pytest.raises(ConfigError, match="holds the training of the study mine"):
        TrainingFolder(study="other", folder=folder.folder).check()


def test_a_checkpoint_that_is_gone_is_told_before_the_next_trial(folder):
    """The training cannot go on from nothing: it would begin anew without a word."""
    (tried(folder, 0, saved=7).checkpoint / "step-7").rmdir()
    folder.progress().checkpoint.rmdir()

    with pytest.raises(ConfigError, match="is not there"):
        folder.check()


@given(text=st.one_of(st.text(max_size=20), st.sampled_from(["{}", "[]", '{"study": "mine", "trials": []}', "null"])))
def test_a_broken_state_is_refused_by_name(text, tmp_path_factory):
    """Whatever stands in the file, one message names it."""
    folder = TrainingFolder(study="mine", folder=tmp_path_factory.mktemp("checkpoints"))
    (folder.folder / "progress.json").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="cannot be read") as caught:
        folder.progress()
    assert caught.value.key == "trial.training.folder"


def test_steps_are_read_by_the_conventions_of_frameworks(tmp_path):
    """Megatron-LM's file wins over names; torchtitan names its folders; an empty folder says nothing."""
    assert step_in(tmp_path) is None
    for name in ("step-10", "step-9", "other"):
        (tmp_path / name).mkdir()
    assert step_in(tmp_path) == 10
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n", encoding="utf-8")
    assert step_in(tmp_path) == 12


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({8: 3.0, 9: 2.9, 10: 2.8}, ((8, 3.0), (9, 2.9), (10, 2.8))),  # the training's own numbers, from 1
        ({7: 3.0, 8: 2.9, 9: 2.8}, ((7, 3.0), (8, 2.9), (9, 2.8))),  # and from 0
        ({1: 3.0, 2: 2.9, 3: 2.8}, ((8, 3.0), (9, 2.9), (10, 2.8))),  # counted anew in each trial
        ({10: 3.0, 11: 2.9}, ((10, 3.0),)),  # steps beyond the checkpoint are trained again
        ({}, ()),
    ],
)
def test_losses_belong_to_steps_of_the_training(told, expected):
    """Whatever a program counts from, its losses are those of the steps behind the training's seventh."""
    assert losses_of_training(told, 7, 10) == expected


def test_long_trials_keep_some_of_their_losses():
    """A record stays small: of 1,200 losses every third is kept."""
    kept = losses_of_training({step: 1 / step for step in range(1, 1201)}, 0, 1200)

    assert [step for step, _ in kept] == list(range(1, 1201, 3))
    assert len(kept) <= MAX_LOSSES


def test_the_state_can_be_moved_with_its_folder(folder, tmp_path):
    """The file names folders beside it, so that a training may be copied to another file system."""
    tried(folder, 0, saved=7)
    moved = folder.folder.rename(tmp_path / "elsewhere")

    assert TrainingFolder(study="mine", folder=moved).progress().checkpoint == moved / "trial-0000"
    assert str(tmp_path) not in json.dumps(json.loads((moved / "progress.json").read_text(encoding="utf-8")))
