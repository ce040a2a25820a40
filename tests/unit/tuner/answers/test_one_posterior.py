"""Every command answers from the trials of a study, and all of them say the same."""

import re
import sys

import pytest

from tests.support.studies.in_process_executor import run_here
from tuner.study_file.config import load_study

PROGRAM = """
import sys
pp, tp, dp, cp, up, vpp, mbs = map(int, sys.argv[1:])
if 260 / (tp * pp) + 4 * mbs / tp + 10 > 76:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
memory_gib = 260 / (tp * pp) + 4 * mbs / tp + 10
step_ms = 9000 * (1 + 0.05 * (pp - 1)) * (1 + 0.02 * (tp - 1) + 0.1 * (cp - 1)) * (1.1 if mbs == 1 else 1 + mbs / 1000)
step_ms *= 1 + (up + vpp) / 10000  # no two layouts take equally long
for step in range(1, 6):
    print(f"step {step} took {step_ms + step} ms, {memory_gib} GiB", flush=True)
"""

STUDY = """
name: one
model: llama3-8b
cluster: {{name: dgx-h100, hosts: 2}}
job: {{sequence_length: 4096, global_batch_size: 64}}
current: {{pp: 4, tp: 4, dp: 1, mbs: 1}}
search: {{max_trials: 40, seed: 0, rehearse: "off"}}
trial:
  backend: command
  command: [{python}, train.py, "{{pp}}", "{{tp}}", "{{dp}}", "{{cp}}", "{{up}}", "{{vpp}}", "{{mbs}}"]
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms, (?P<memory_gib>[\\\\d.]+) GiB"]}}
  warmup_steps: 1
  steps: 4
storage: sqlite:///one.db
"""
"""Study of layouts of which the fastest predictions run out of memory; the path of its storage is relative."""

OTHER_MODEL = "model=gpt-13b"

RANGES = ("step_time_range_s", "days_range", "seconds_range")
"""Keys of ranges in answers."""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study after its trials, whose file lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    file = folder / "study.yaml"
    file.write_text(STUDY.format(python=sys.executable), encoding="utf-8")
    run_here(load_study(file))
    return file


@pytest.fixture
def ended(study, meshtune):
    """The trials of the study."""
    return meshtune("trials", study, "--json").json["trials"]


def text_of(config):
    """Return a configuration as `--config` takes it."""
    return ",".join(f"{name}={value}" for name, value in config.items() if value)


def needs_gib(pp, tp, mbs, **_):
    """Return the memory of a layout in this world, whose devices have 76 GiB."""
    return 260 / (tp * pp) + 4 * mbs / tp + 10


def layout_of(config):
    """Return a configuration without its data parallelism, which follows from the number of hosts."""
    return {name: value for name, value in config.items() if name != "dp"}


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_all_commands_name_one_best(meshtune, study, ended, tmp_path, monkeypatch, place):
    """Each names the fastest trial with its measured step time, from whatever folder it is asked."""
    monkeypatch.chdir(study.parent if place == "beside" else tmp_path)
    best = min((row for row in ended if row["status"] == "ok"), key=lambda row: row["step_time_s"])
    step_time_s, named = (best["step_time_s"], text_of(best["config"]))

    def told(*command):
        return meshtune(*command, "--json").json

    answers = {
        "best": told("best", study),
        "rank": (ranked := told("rank", study))["configs"][0],
        "rank --hosts": (sizes := told("rank", study, "--hosts", "2"))["sizes"][0],
        "rank --tokens": (costs := told("rank", study, "--tokens", "1B"))["offers"][0],
        "predict": (predicted := told("predict", study, "--config", named)),
        "simulate": (simulated := told("simulate", study, "--config", named))["taught"],
        "estimate": (estimated := told("estimate", study, "--tokens", "1B"))["trainings"][-1],
    }
    exported = told("export", study, "--to", "megatron")

    assert {name: answer["step_time_s"] for name, answer in answers.items()} == dict.fromkeys(answers, step_time_s)
    assert {name: answer["source"] for name, answer in answers.items()} == dict.fromkeys(answers, "measured")
    for name in ("best", "rank --hosts", "rank --tokens", "estimate"):
        assert answers[name]["config"] == best["config"], name
    assert f"--tensor-model-parallel-size {best['config']['tp']}" in exported["text"]
    assert predicted["predicted"]["step_time_s"] < step_time_s / 2
    low_s, high_s = predicted["step_time_range_s"]
    assert low_s < step_time_s < high_s < 1.2 * step_time_s
    for answer in (answers["best"], ranked, sizes, costs, predicted, simulated, estimated, exported):
        assert answer["taught_by_trials"] == len(ended)
        assert answer["looked_in"].endswith("one.db")


def test_no_size_names_a_layout_that_ran_out_of_memory(meshtune, study, ended):
    """On as many hosts or fewer, such a layout has no more room; the cost model alone names one as the best."""
    misfits = [layout_of(row["config"]) for row in ended if row["status"] == "out_of_memory"]
    empty = study.with_name("empty.db")

    told = meshtune("rank", study, "--hosts", "1,2", "--json").json["sizes"]
    alone = meshtune("rank", study, "--hosts", "2", "--storage", f"sqlite:///{empty}", "--json").json["sizes"]

    assert misfits
    assert needs_gib(**alone[0]["config"]) > 76
    for size in told:
        assert size["config"] is None or layout_of(size["config"]) not in misfits


def test_what_trials_taught_reaches_other_sizes_and_sequences(meshtune, study):
    """Elsewhere a step is learned, nearer to its trials than to the prediction, and the line says where these ran."""
    (size,) = meshtune("rank", study, "--hosts", "4", "--json").json["sizes"]
    longer = meshtune("predict", study, "--set", "job.sequence_length=8192", "--json").json
    shown = meshtune("rank", study, "--set", "job.sequence_length=8192")

    config = text_of(size["config"])
    four = ("--set", "cluster.hosts=4", "--set", "current=null")
    alone = meshtune("predict", study, *four, "--config", config, "--json").json
    assert alone["step_time_s"] == pytest.approx(size["step_time_s"], rel=0.05)
    assert (size["source"], longer["source"], alone["source"]) == ("learned", "learned", "learned")
    assert size["step_time_s"] > 1.5 * alone["predicted"]["step_time_s"]
    assert longer["step_time_s"] > 1.5 * longer["predicted"]["step_time_s"]
    assert "which ran with sequence_length 4,096" in shown.out


def test_an_untried_layout_is_told_by_its_range_and_its_chance_to_be_slower(meshtune, study, tmp_path):
    """Ranges are those of layouts that behave like the measured ones, and every answer has the chance to be slower
    beside them, in the table, in words and in JSON.
    """
    rows = meshtune("rank", study, "--top", 60, "--json").json["configs"]
    untried = [row for row in rows if row["source"] == "learned" and row["fits"]]
    first = {name: untried[0][name] for name in ("pp", "tp", "dp", "cp", "up", "vpp", "mbs")}
    shown = meshtune("rank", study, "--top", 60)
    predicted, worded = (meshtune("predict", study, "--config", text_of(first), *more) for more in (("--json",), ()))
    simulated = meshtune("simulate", study, "--config", text_of(first), "--json").json["taught"]
    four = ("rank", study, "--hosts", "4", "--tokens", "1B", "--out", tmp_path / "costs.html")
    (offer,), costs = meshtune(*four, "--json").json["offers"], meshtune(*four)
    longer = ("estimate", study, "--tokens", "1B", "--set", "job.sequence_length=8192")
    training, estimated = meshtune(*longer, "--json").json["trainings"][-1], meshtune(*longer)

    for row in rows:
        low_s, high_s = row["step_time_range_s"]
        assert low_s < row["step_time_s"] < high_s
        if row["source"] == "measured":
            assert row["slower_probability"] == pytest.approx(0.025)
    for answer in (*untried, predicted.json, simulated, offer, training):
        low, high = next(answer[key] for key in RANGES if key in answer)
        assert high / low < 2
        assert 0.04 < answer["slower_probability"] < 0.25
    assert "beyond: chance to be slower than the 95% range" in shown.err
    assert f"{untried[0]['slower_probability']:.0%}" in shown.out
    behaving = r"with probability 95% if it behaves like those measured; \d+% chance to be slower than that"
    assert re.search(behaving, worded.out)
    assert re.search(behaving, estimated.out)
    assert "beyond: chance to be slower than the 95% range" in costs.out
    page = (tmp_path / "costs.html").read_text(encoding="utf-8")
    assert f", {offer['slower_probability']:.0%} beyond" in page


def test_without_trials_no_answer_has_such_a_chance(meshtune, study, tmp_path):
    """The cost model's own range counts all that is known of its errors."""
    empty = ("--storage", f"sqlite:///{tmp_path}/none.db")

    rows = meshtune("rank", study, *empty, "--json").json["configs"]
    shown = meshtune("rank", study, *empty)
    offers = meshtune("rank", study, "--hosts", "2", "--tokens", "1B", *empty, "--json").json["offers"]

    assert not any("slower_probability" in row for row in rows)
    assert "beyond" not in shown.out + shown.err
    assert [offer["slower_probability"] for offer in offers] == [None]


def test_trials_of_another_model_are_not_used(meshtune, study):
    """They say nothing of the model that is asked about, and the line says so."""
    told = meshtune("rank", study, "--set", OTHER_MODEL, "--json").json
    shown = meshtune("best", study, "--set", OTHER_MODEL)

    assert told["taught_by_trials"] == 0
    assert "its trials ran with model." in shown.err


def test_a_layout_that_failed_is_told_as_such(meshtune, study, ended):
    """`predict` and `export` say of a layout that ran out of memory in which trial it did."""
    failed = next(row for row in ended if row["status"] == "out_of_memory")
    named = text_of(failed["config"])

    told = meshtune("predict", study, "--config", named, "--json").json
    exported = meshtune("export", study, "--to", "megatron", "--config", named)

    assert (told["fits"], told["fit_probability"]) == (False, 0.0)
    assert told["outcome"] == f"ran out of memory in trial {failed['trial']}"
    assert told["outcome"] in exported.err


def test_the_current_configuration_is_predicted_unasked(meshtune, study, ended):
    """`predict` and `simulate` without --config are about `current:`, which the first trial measured."""
    assert meshtune("predict", study, "--json").json["step_time_s"] == ended[0]["step_time_s"]


@pytest.mark.parametrize(
    "command", [("rank",), ("rank", "--hosts", "2"), ("best",), ("predict",), ("estimate", "--tokens", "1B")]
)
def test_without_trials_a_command_says_where_it_looked(meshtune, study, tmp_path, command):
    """One line names the storage in which there are no trials."""
    name, *options = command

    done = meshtune(name, study, *options, "--storage", f"sqlite:///{tmp_path}/none.db")

    (line,) = [line for line in done.err.splitlines() if "none.db" in line]
    looked = f"trials of study one looked for in {tmp_path}/none.db: there is no such storage"
    assert line == f"Predicted by the cost model alone; {looked}."
