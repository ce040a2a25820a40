"""Known knobs in study files: names, changed entries, recommended ones, and what is refused."""

import json
import shlex

import pytest

from hardware.io.errors import ConfigError
from tuner.forecast.candidates import candidates_of
from tuner.forecast.searched_knobs import searched_knobs
from tuner.study_file.config import load_study

STUDY = """
name: known
model: {model}
cluster: {{name: dgx-h100, hosts: 8}}
job: {{sequence_length: 8192, global_batch_size: 512}}
runtime: {runtime}
space:
  knobs: {knobs}
trial: {trial}
"""


@pytest.fixture
def study(tmp_path):
    """Loads a study with some knobs."""

    def load(knobs, *, model="llama3-8b", runtime="megatron-core", trial="{backend: simulated}"):
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
        (tmp_path / "other.json").write_text("{}", encoding="utf-8")
        path = tmp_path / "study.yaml"
        path.write_text(STUDY.format(knobs=knobs, model=model, runtime=runtime, trial=trial), encoding="utf-8")
        return load_study(path)

    return load


def command(words="train {flags}", **keys):
    """Keys of a command that trains."""
    return json.dumps({"backend": "command", "command": shlex.split(words), **keys})


def test_knobs_are_judged_with_the_memory_that_must_stay_free(study):
    """What is recommended is judged for layouts that leave the share of `limits.free_memory` free."""
    found = study("recommended\nlimits: {free_memory: 0.3}")

    assert found.knob_catalog.options.memory_headroom == 0.3 == found.problem.options.memory_headroom


def test_a_name_stands_for_an_entry(study):
    """A name opens the knob with the catalog's values, flags and condition, and today's value by the profile."""
    (knob,) = study("[overlap_grad_reduce]").problem.knobs

    assert knob.values == (False, True)
    assert knob.today is True
    assert knob.place.words(True) == ("--overlap-grad-reduce",)
    assert knob.place.replaced_flags(False) == {"--overlap-grad-reduce", "--overlap-param-gather"}
    assert str(knob.when) == "replicas > 1 and zero_stage <= 1"


def test_an_entry_may_be_changed(study):
    """Other values replace the catalog's, and the first is in use unless it is said."""
    (knob,) = study("[{catalog: ddp_bucket_size, values: [1000000, 2000000]}]").problem.knobs

    assert (knob.name, knob.values, knob.today) == ("ddp_bucket_size", (1000000, 2000000), 1000000)
    assert knob.place.flag == "--ddp-bucket-size"


def test_own_knobs_stand_beside_known_ones(study):
    """The user's own knobs stay in their place; recommended ones follow, each once."""
    found = study("[recommended, {name: my_own, flag: --mine}, manual_gc, tp_comm_overlap]")
    names = [knob.name for knob in found.problem.knobs]

    assert names[:3] == ["my_own", "manual_gc", "tp_comm_overlap"]
    assert len(names) > 3
    assert len(set(names)) == len(names)
    assert {known.name for known in found.problem.known_knobs} == set(names) - {"my_own"}


def test_recommended_alone(study):
    """`recommended` opens the knobs that the verdicts recommend."""
    found = study("recommended")
    verdicts = [verdict.known.name for verdict in found.knob_catalog.verdicts if verdict.is_recommended]

    assert verdicts
    assert [knob.name for knob in found.problem.knobs] == verdicts


def test_a_condition_on_an_absent_knob_is_decided_by_the_value_in_use(study):
    """A knob that needs overlapped gradients is searched without that knob, because the profile overlaps them."""
    (knob,) = study("[overlap_param_gather]").problem.knobs

    assert str(knob.when) == "replicas > 1 and zero_stage == 1"


@pytest.mark.parametrize(
    ("knobs", "options", "said"),
    [
        ("[tp_com_overlap]", {}, r"space.knobs.0 = 'tp_com_overlap': is no known knob of Megatron-LM.*tp_comm"),
        ("[async_tp]", {}, r"space.knobs.0 = 'async_tp': is a knob of torchtitan"),
        ("[manual_gc, moe_dispatcher]", {}, r"space.knobs.1 = 'moe_dispatcher': needs a model with experts"),
        ("[optimizer_offload]", {}, r"is a dimension of layouts, no knob.*space: \{offload"),
        (
            "[async_tp]",
            {"runtime": "torchtitan"},
            r"is set only where .*compile != none, which today's values rule out",
        ),
        ("[manual_gc]", {"runtime": "paddle"}, r"space.knobs.0.*none is known of paddle"),
        ("recommended", {"runtime": "paddle"}, r"space.knobs.*none is known of paddle"),
        ("[{catalog: nothing}]", {}, r"space.knobs.0.catalog = 'nothing'"),
        ("[{values: [1, 2]}]", {}, r"space.knobs.0.name: is required"),
        ("[manual_gc, manual_gc]", {}, r"space.knobs.1.*is the name of another knob"),
        ("[{catalog: manual_gc, values: [1, 2]}]", {}, r"space.knobs.0.flag = 'false': is none of the values"),
    ],
)
def test_mistakes_are_refused(study, knobs, options, said):
    """Each mistake is one message that names the entry, the rule and what is near."""
    with pytest.raises(ConfigError, match=said):
        study(knobs, **options)


def test_the_framework_of_the_flags_counts(study):
    """A command that takes torchtitan's flags has torchtitan's knobs, whatever profile predicts it."""
    found = study("[compile]", trial=command(flags="torchtitan", log="torchtitan"))

    assert found.problem.known_knobs[0].framework == "torchtitan"


def test_nemo_is_named_by_its_log(study):
    """A command that writes NeMo's log has NeMo's knobs, as overrides of a recipe."""
    found = study("[tp_comm_overlap]", trial=command("nemo {knobs}", log="nemo"))

    assert found.problem.knobs[0].place.words(True) == ("model.config.tp_comm_overlap=true",)


def test_keys_go_to_the_only_file(study):
    """DeepSpeed's keys go to the only file of the trials, or to the one named after it."""
    options = {"runtime": "megatron-deepspeed"}
    (one,) = study("[overlap_comm]", trial=command("train {ds}", files={"ds": "ds.json"}), **options).problem.knobs
    two_files = {"deepspeed": "ds.json", "other": "other.json"}
    (two,) = study(
        "[overlap_comm]", trial=command("train {deepspeed} {other}", files=two_files), **options
    ).problem.knobs

    assert (one.place.file, one.place.key) == ("ds", "zero_optimization.overlap_comm")
    assert two.place.file == "deepspeed"
    with pytest.raises(ConfigError, match=r"trial\.files has several"):
        study("[overlap_comm]", trial=command("train {a} {b}", files={"a": "ds.json", "b": "other.json"}), **options)


def test_priors_enter_the_search(study):
    """The search expects of a known knob what the catalog does, and of the user's own nothing."""
    found = study("[tp_comm_overlap, {name: my_own, flag: --mine}]")
    space = searched_knobs(found.problem, candidates_of(found.problem))
    tensor = space.steps[0]
    shares = tensor.ties[:, 0]

    assert tensor.known[:, 1].min() < -0.01
    assert not tensor.known[:, 0].any()
    assert tensor.ties.shape[1] == 1
    assert shares.max() == 1.0
    assert not space.steps[1].known.any()
    assert len(space.memory[0].scales) == 3


def test_what_affects_no_memory_has_no_effect_on_it(study):
    """A known knob without an effect on memory has exactly none in the search."""
    found = study("[overlap_grad_reduce]")
    (memory,) = searched_knobs(found.problem, candidates_of(found.problem)).memory

    assert memory.scales == (0.0,)
