import re
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.memory.peak import MEMORY_PARTS
from hardware.io.errors import ConfigError
from tests.support.studies.report_pages import (
    CRASH,
    CURRENT,
    OUT_OF_MEMORY,
    STUDY,
    figure_of,
    page_of,
    run,
    structure_of,
    study_of,
    visible,
)
from trials.backend import Observation, Status
from tuner.forecast.planned_candidates import as_stored, prepare
from tuner.forecast.prepared import Prepared
from tuner.report import APPENDIX, SECTIONS, collect, render_report, write_report
from tuner.report.figures import part_colour, time_axis
from tuner.report.sections.failures import conclusions_section
from tuner.report.sections.outcomes import outcomes_table
from tuner.report.sections.pipeline import pipeline_section
from tuner.report.sections.plan import plan_section
from tuner.report.sections.population import ABOVE, population_section
from tuner.report.words import in_short
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.search.failures import LEARNED, FailureConclusion
from tuner.storage.opening import find_study
from tuner.storage.record import LAYER_PLANS
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

JAX_STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "cpu-jax.yaml"
HOSTILE = "<script>alert('x')</script><img src=https://evil.example/x onerror=alert(1)>\"'&"
IDENTITIES = (
    "summary flags warnings progress trials conclusions time pipeline memory "
    "population map accuracy calibration pruning"
)


CASES = {
    "no_current_configuration": (STUDY, 1, {}),
    "no_trial": (STUDY + CURRENT, 0, {}),
    "all_failed": (STUDY + CURRENT, 2, dict.fromkeys(range(2), CRASH)),
    "the_current_configuration_failed": (STUDY + CURRENT, 2, {0: OUT_OF_MEMORY}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["some_failed", *CASES])
def test_a_page_of_every_kind_of_study(case, request, tmp_path):
    """Whatever became of the trials, all sections are there in their order, every element closes where it should,
    plotly.js stands there once, nothing is fetched, and no raw Python shows through.
    """
    if case == "some_failed":
        page = request.getfixturevalue("page")
    else:
        text, num_trials, failures = CASES[case]
        config = study_of(tmp_path, text=text)
        run(config, num_trials, failures)
        page = page_of(config, tmp_path)
    parsed = structure_of(page)
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    words = re.sub(r"<[^>]+>", " ", visible(page))

    assert " ".join(re.findall(r'<section id="([a-z]+)">', page)) == IDENTITIES
    # that of the sharding plan is for studies that plan layers, that of shardings for steps of the user's own, and that
    # of the training for trials inside of one
    assert len(IDENTITIES.split()) == len(SECTIONS) + len(APPENDIX) - 3
    assert parsed.wrong == parsed.open == []
    assert page.count("* plotly.js (basic - minified) v") == 1
    assert len(page.encode()) < 1_700_000
    assert not parsed.attributes & {"src", "href", "srcset", "action"}
    assert not parsed.elements & {"link", "img", "iframe", "base", "object", "embed"}
    assert not re.search("https?://", visible(page))
    assert 'content="default-src &#x27;none&#x27;;' in page
    assert not re.search(r"url\(|@import", styles)
    assert not re.search(r"\bNone\b(?!\.)|\bnan\b|\binf\b|\{'|Status\.", words)


def test_the_summary_tells_the_best_trial(data, page):
    """Step time, gain over the current configuration and the sizes of the space are those of the stored study."""
    text = visible(page)

    assert data.best is not None
    assert f"trial {data.best.number}" in text
    assert f"{data.reference_step_time_s / data.best.step_time_s:.2f}×" in text  # noqa: RUF001 # the sign of a factor
    for count in (data.candidates.space.num_before_memory, len(data.candidates.space.grid)):
        assert f"<b>{count:,}</b>" in text
    assert "the budget of trials is spent" in text
    assert "before it was confident" in text


def test_synthetic_times_are_announced(data, page):
    """A study of a simulated world says so loudly, and a measured one does not."""
    measured = render_report(replace(data, origin="measured"))

    assert "<strong>SYNTHETIC</strong>" in page
    assert "SYNTHETIC" not in visible(measured)
    assert "measured</p>" in measured


def test_every_candidate_dropped_is_accounted_for(config, page):
    """The table of rules names every rule that dropped something, with its reason and its count."""
    text = visible(page)

    for rule, count in config.problem.space().removed.items():
        assert f"<code>{rule}</code>" in text
        assert f">{count:,}</td>" in text
    assert "must be the 8 devices of the cluster" in text or "must divide" in text


def test_hostile_text_stays_text(data):
    """Names, reasons and logs that look like HTML are shown as they are, and become no element."""
    setting = data.problem.setting
    job = replace(setting.job, model=setting.job.model.changed(name=HOSTILE))
    problem = replace(data.problem, subject=data.problem.subject.with_setting(replace(setting, job=job)))
    prepared = Prepared(request=replace(data.request, name=HOSTILE, file=HOSTILE), problem=problem)
    crash = Observation(status=Status.CRASHED, reason=HOSTILE, log_tail=HOSTILE, origin="synthetic")
    records = [replace(record, observation=crash) if record.number == 3 else record for record in data.records]

    page = render_report(replace(data, prepared=prepared, records=tuple(records)))

    assert "alert('x')" not in page
    assert "<img" not in page
    assert visible(page).count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;") >= 5
    parsed = structure_of(page)
    assert parsed.wrong == []
    assert "onerror" not in parsed.attributes


def test_trials_are_counted_by_how_they_ended(copied):
    """Each way in which a trial ended has a row with its count; one in flight stands in the table and in the warnings,
    and does not count as failed.
    """
    sampler = make_sampler(copied)
    open_study(prepared_of(copied), sampler).ask(fixed_distributions=sampler.search_space)

    data = collect(copied)
    text = visible(render_report(data))

    rows = re.findall(r'<tr><td>([^<]+)</td><td class="number">(\d+)</td>', outcomes_table(data))
    assert rows == [("completed", "5"), ("out of memory", "1"), ("crashed", "1"), ("running", "1")]
    assert ">running</span>" in text
    assert "1 trial had not ended" in text
    assert "2 failed" in text


def test_the_flags_are_those_of_the_best(data, page):
    """The report prints the Megatron-LM export of the fastest trial."""
    assert f"--tensor-model-parallel-size {data.best_config.tp}\n" in page
    assert f"# {data.best_config}\n" in page


def test_the_same_study_gives_the_same_page(config, page):
    """A report holds no clock and no random names, so that two of the same study can be compared."""
    assert render_report(collect(config)) == page


def test_every_part_has_a_colour_of_its_own():
    """No two parts of one picture share a colour."""
    assert len({part_colour(part) for part in BREAKDOWN}) == len(BREAKDOWN)
    assert len({part_colour(part) for part in MEMORY_PARTS}) == len(MEMORY_PARTS)


def test_a_study_without_storage_is_the_users_mistake(tmp_path):
    """A report of a study that never ran names the study and how to start it."""
    with pytest.raises(ConfigError, match="meshtune run"):
        write_report(study_of(tmp_path), tmp_path / "report.html")


def test_a_folder_that_does_not_exist_is_the_users_mistake(config, tmp_path):
    """An output path that cannot be written is told with its path."""
    with pytest.raises(ConfigError, match="missing"):
        write_report(config, tmp_path / "missing" / "report.html")


def test_an_outlier_makes_the_time_axis_logarithmic():
    """Step times of one size get a linear axis that holds them all, and a far outlier turns it into decades."""
    linear, logarithmic = time_axis("t", [1.0, 2.0, 3.0]), time_axis("t", [1.0, 100.0])

    assert linear["range"][0] < 1.0
    assert linear["range"][1] > 3.0
    assert "type" not in linear
    assert logarithmic["type"] == "log"
    assert logarithmic["range"][0] < 0.0
    assert logarithmic["range"][1] > 2.0


def population_of(page):
    """Of the picture of the population: its parts as (column, bottom, height, tried), and its named marks."""
    traces, _ = figure_of(page, "population")
    parts = [
        (column, bottom, height, not trace["marker"]["pattern"]["shape"])
        for trace in traces
        if trace["type"] == "bar"
        for column, bottom, height in zip(trace["x"], trace["base"], trace["y"], strict=True)
    ]
    return parts, {trace["name"]: trace for trace in traces if trace["type"] == "scatter" and "name" in trace}


def test_the_columns_are_the_population_after_each_trial(data, page):
    """There is a column before the first trial and one after each, its parts fill it, and the tried end at p_star."""
    parts, marks = population_of(page)

    assert sorted({column for column, _, _, _ in parts}) == list(range(8))
    for column, p_star in zip(marks["confidence"]["x"], marks["confidence"]["y"], strict=True):
        inside = sorted((bottom, height, tried) for at, bottom, height, tried in parts if at == column)
        tops = [0.0, *(bottom + height for bottom, height, _ in inside)]
        assert [bottom for bottom, _, _ in inside] == pytest.approx(tops[:-1])
        assert tops[-1] == pytest.approx(1.0)
        assert sum(height for _, height, tried in inside if tried) == pytest.approx(p_star)
    assert marks["confidence"]["y"][1:] == pytest.approx([share for _, share in data.p_star_history])


def test_a_choice_stands_on_the_column_from_which_it_was_drawn(data):
    """Trial N is marked after N trials, on the part that is its candidate's or, if it has none, above the column."""
    start, first = data.moments[0], tuple(data.records[0].params[name] for name in data.dimensions)
    others = tuple(share for share in start.shares if share.key != first)
    data = replace(data, moments=(replace(start, shares=others), *data.moments[1:]))

    traces, _ = figure_of(population_section(data), "population")
    marks = next(trace for trace in traces if trace.get("name") == "tried next")
    parts = {
        (column, text.split("<br>")[0]): bottom + height / 2
        for trace in traces
        if trace["type"] == "bar"
        for column, bottom, height, text in zip(trace["x"], trace["base"], trace["y"], trace["text"], strict=True)
    }
    expected = {count: parts.get((count, in_short(record.params)), ABOVE) for count, record in enumerate(data.records)}

    assert dict(zip(marks["x"], marks["y"], strict=True)) == pytest.approx(expected)
    assert marks["y"][0] == ABOVE
    assert min(marks["y"]) < 1


def test_trials_side_by_side_are_drawn_from_the_column_that_stood(tmp_path):
    """Three trials asked for before any ended are all marked before the first trial's end, and each is named."""
    config = study_of(tmp_path)
    study = run(config, 0)
    sampler = make_sampler(config)
    for _ in range(3):
        study.ask(fixed_distributions=sampler.search_space)

    _, marks = population_of(population_section(collect(config)))

    chosen = marks["tried next"]
    assert set(chosen["x"]) == {0}
    named = [line.split(":")[0] for text in chosen["text"] for line in text.split("<br>")]
    assert sorted(named) == ["trial 0", "trial 1", "trial 2"]


def test_a_study_without_populations_says_so(data):
    """A study that an older version ran has no picture of them, and a sentence in its place."""
    assert "The study holds no probabilities" in population_section(replace(data, moments=()))


def test_what_the_failures_taught_is_told(copied):
    """Each conclusion of the study is a row, escaped; without any there is a sentence and no table."""
    conclusion = FailureConclusion(kind="crash", text=f"Schedules with {HOSTILE} crash.")
    find_study(copied.storage, copied.name).set_user_attr(LEARNED, [conclusion.as_json()])
    data = collect(copied)

    none, told = (str(conclusions_section(each)) for each in (replace(data, conclusions=()), data))

    assert "<table>" not in none
    assert "No failure has changed the choice of configurations." in none
    assert "<td>crashed</td>" in told
    assert "Schedules with &lt;script&gt;" in told


def test_what_stopping_early_saved_is_told(data):
    """A trial that was stopped is no failure, and the summary says what its unmeasured steps would have taken."""
    stopped = Observation(status=Status.PRUNED, step_times_s=(2.0, 2.5, 2.0), expected_steps=10)
    *records, last = data.records[:3]
    last = replace(last, status=Status.PRUNED, step_time_s=None, observation=stopped)

    text = visible(render_report(replace(data, records=(*records, last))))

    assert "none failed; 1 stopped early, about 14 s of steps saved" in text


# The pipeline


def test_the_pipeline_of_the_best_is_drawn(deep):
    """The report shows what every stage of the best configuration does, and how long it is idle."""
    drawn = pipeline_section(deep)

    assert 'id="figure-pipeline"' in drawn
    assert "<span><i" in drawn
    for words in ("(measured: ", "are idle for", "is the bottleneck", "stage 0", "stage 3"):
        assert words in drawn
    for kind in ("forward", "backward", "idle"):
        assert f'"name":"{kind}"' in drawn
    assert "micro-batch %{customdata[0]}" in drawn


def test_a_long_step_is_drawn_at_its_ends(tmp_path):
    """Of very many passes the picture holds the first and the last ones, says what it leaves out, and stays small."""
    text = STUDY.replace("recompute: [none, full]", "pp: [2], tp: [4], vpp: [1], mbs: [1], recompute: [full]")
    config = study_of(tmp_path, text=text.replace("batch_size: 64", "batch_size: 2048"))
    run(config, 1)
    drawn = pipeline_section(collect(config))

    assert re.search(r"Only the first \S+ m?s and the last \S+ m?s are drawn; \S+ s between them are omitted", drawn)
    assert len(drawn) < 200_000


def test_too_many_passes_are_not_simulated(data, monkeypatch):
    """Where a step has more passes than a page may wait for, it names the command that writes them."""
    monkeypatch.setattr("tuner.report.sections.pipeline.MAX_SIMULATED", 1)

    assert "`meshtune simulate --trace`" in pipeline_section(data)


# The sharding plan


def planned_report(folder, *, planner, space, num_trials=1):
    """The report of a small study whose layers are planned, as it is stored, and its page's section of the plan."""
    text = STUDY.replace("llama-7b", "llama3-8b").replace("dgx-a100, hosts: 1", "dgx-h100, hosts: 2")
    text = text.replace("space: {recompute: [none, full]}", f"space: {space}") + f"planner: {planner}\n"
    config = study_of(folder, text=text)
    planned = prepare(config, StoredStudies(config.storage), runs=True)
    run(planned, num_trials).set_user_attr(LAYER_PLANS, as_stored(planned.problem))
    data = collect(config)
    page = render_report(data)
    assert structure_of(page).wrong == []
    found = re.search(r'<section id="plan">.*?</section>', page, re.DOTALL)
    return data, found.group() if found else ""


def test_the_plan_of_the_best_is_told(tmp_path):
    """Between pipeline and memory: its collectives, where it differs, its pins, and whether anything runs it."""
    pin = "{op: '*.core', dim: heads, axis: up}"
    space = "{pp: [1], tp: [1], cp: [1], up: [2], mbs: [2]}"
    data, told = planned_report(tmp_path, planner=f"{{name: descent, pins: [{pin}]}}", space=space)
    (plan,) = data.problem.layer_plans.values()

    assert data.best_config.plan == "descent"

    assert "as descent shards them over up 2" in told
    for each in plan["collectives"]:
        assert f"<td>{each['kind']}</td><td>{each['axes']}</td>" in told
    assert "Differences from the plan by hand" in told
    assert "<td>embedding.lookup</td>" in told
    assert "*.core heads on up: holds at 2 of 2 operators" in told
    assert "No framework runs this plan yet" in told
    trained = replace(data, prepared=replace(data.prepared, request=load_study(JAX_STUDY)))
    assert "Its trial trained with this plan" in plan_section(trained)
    page = render_report(data)
    assert page.index('id="pipeline"') < page.index('id="plan"') < page.index('id="memory"')
    assert "None" not in re.sub(r"<[^>]+>", " ", told)


def test_a_best_by_hand_is_told_as_such(tmp_path):
    """Where the best ran by hand, the section shows the other plan of its shape, and that it did not run."""
    data, told = planned_report(
        tmp_path, planner="{name: descent}", space="{pp: [1], tp: [1], cp: [2], up: [1], mbs: [1]}", num_trials=2
    )

    assert data.best_config.plan == "hand"
    assert "The best configuration ran with the plan by hand, and not with this one" in told
    assert re.search(r"predicted to change by \+[\d.]+%", told)


@pytest.mark.parametrize(
    ("space", "num_trials", "words"),
    [
        ("{pp: [1], tp: [2], mbs: [1]}", 0, "The plan is shown once a trial has completed."),
        ("{pp: [2], tp: [1], cp: [1], up: [1], mbs: [1]}", 1, "each device holds whole layers"),
    ],
)
def test_a_plan_that_is_not_there_is_explained(tmp_path, space, num_trials, words):
    """Before the first trial, and where a device has its layers to itself."""
    _, told = planned_report(tmp_path, planner="{name: recursive}", space=space, num_trials=num_trials)

    assert words in told
    assert "<table>" not in told
