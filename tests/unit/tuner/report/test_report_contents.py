import math
import re
from dataclasses import replace

import numpy as np
import pytest

from costmodels.step.memory.peak import stage_memory
from tests.support.studies.report_pages import (
    CURRENT,
    STUDY,
    figure_of,
    run,
    section_of,
    structure_of,
    study_of,
    visible,
)
from trials.backend import Observation, Status, TrialAbility
from tuner.report import collect
from tuner.report.sections.accuracy import likely_ranges_s
from tuner.report.sections.breakdown import worth_showing
from tuner.report.sections.flags import flags_section
from tuner.report.sections.map_cells import space_map
from tuner.report.sections.memory import memory_section
from tuner.report.sections.space_map import map_section
from tuner.report.sections.summary import summary_section
from tuner.report.sections.training import training_section
from tuner.report.words import after_trials, in_short, plural, predicted_seconds
from tuner.space.enumeration import enumerate_space
from tuner.storage.record import fastest
from tuner.study_file.request import TrialOptions


def text_of(markup):
    """The words of a part of the page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", visible(markup)))


def without(data, values):
    """The same study, had it not tried a configuration."""
    return replace(data, records=tuple(record for record in data.records if record.params != values))


# What was gained, and what it cost


def test_the_gain_over_the_priors_choice_is_measured(data):
    """The best is compared with the measured step of what was predicted fastest, or it is said that this has none."""
    chosen = data.prior_choice.values(data.dimensions)
    other = next(record for record in data.records if record.params != chosen and record.step_time_s)
    tried = [record for record in without(data, chosen).records if record.number != other.number]
    slower = replace(other, params=chosen, step_time_s=3 * data.best_step_time_s)
    failed = replace(slower, step_time_s=None, status=Status.OUT_OF_MEMORY)
    best = replace(other, step_time_s=data.best_step_time_s)

    def told(*records):
        return text_of(summary_section(replace(data, best=best, records=(*tried, *records))))

    assert "over the cost model&#x27;s first choice 3.00" in told(best, slower)
    assert f"{in_short(chosen)}, predicted to be fastest, was not tried" in told(best)
    assert f"{in_short(chosen)}, predicted to be fastest, has no measured step: out of memory" in told(best, failed)


def test_synthetic_device_hours_are_told_as_such(data, page):
    """A simulated study tells what its steps would have taken, and when the gain would have paid for that."""
    steps_s = sum(sum(record.observation.step_times_s) for record in data.records)
    told = text_of(section_of(page, "summary"))

    assert f"device-hours of trials {8 * steps_s / 3600:#.3g} for the measured steps on real devices" in told
    assert re.search(r"repaid after [\d,]+ training steps? \([^)]+\) by the gain over the current configuration", told)


def test_real_device_hours_are_told_apart_from_start_up(data):
    """A study that trains tells the device-hours of its trials, and how many of them were start-up."""

    class Training:
        """A backend as the report sees it."""

        clock, origin, source_in_words = "wall", "measured", "measured"
        abilities = frozenset({TrialAbility.TRAINING})

        def candidates(self, _opened):
            """Every candidate may be measured."""

    observed = Observation(status=Status.OK, step_times_s=(900.0,), elapsed_s=3600.0, measured_after_s=2700.0)
    records = tuple(replace(record, observation=observed) for record in data.records[:2])
    request = replace(data.request, trials=TrialOptions(backend=Training()))
    prepared = replace(data.prepared, request=request)
    trained = replace(data, origin="measured", records=records, prepared=prepared)

    told = text_of(summary_section(trained))

    assert "device-hours of trials 16.0 12.0 of them for start-up and warm-up" in told


# Where time and memory go


def test_the_five_fastest_are_shown_with_the_expert_and_the_prior(data, page):
    """The bars are the five fastest measured configurations, the current and the predicted fastest one, each once."""
    shown = worth_showing(data)
    roles = [role for one in shown for role in one.roles]
    drawn, _ = figure_of(page, "time")

    measured = [one.values for one in shown if {"best", "2nd", "3rd", "4th", "5th"} & set(one.roles)]
    assert measured == [record.params for record in fastest(data.records, 5)]
    assert len(measured) == 5
    assert {"current", "predicted 1st"} <= set(roles)
    assert len(roles) == len(set(roles))
    assert all(len(trace["y"]) == len(shown) for trace in drawn if trace["type"] == "bar")


def test_predictions_fill_up_what_was_not_measured(data):
    """After one trial the four best predictions stand beside it."""
    assert len(worth_showing(replace(data, records=data.records[:1], best=data.records[0]))) == 5


def test_bars_are_corrected_by_the_trials(data, page):
    """Bars beside measurements are those that the trials have corrected: nearer to what was measured than the cost
    model's, with the shares of its parts; the page says so.
    """
    drawn, _ = figure_of(page, "time")
    shown = worth_showing(data)
    measured = [one for one in shown if one.step_time_s]

    totals = [sum(trace["x"][at] for trace in drawn if trace["type"] == "bar") for at in range(len(shown))]
    assert totals == [pytest.approx(one.corrected_s) for one in shown]
    before = [abs(math.log(one.prediction["step_time_s"] / one.step_time_s)) for one in measured]
    after = [abs(math.log(one.corrected_s / one.step_time_s)) for one in measured]
    assert len(measured) >= 5
    assert max(after) < max(before)
    assert sum(after) < sum(before) / 2
    for one in shown:
        assert one.parts_s["compute"] / one.corrected_s == pytest.approx(
            one.prediction["breakdown_s"]["compute"] / one.prediction["step_time_s"]
        )
    assert "as the trials correct it" in section_of(page, "time")
    assert "as the trials correct it" in section_of(page, "memory")


def test_bars_before_any_trial_are_the_cost_models(data):
    """A study without trials shows the predictions as they are."""
    untaught = replace(data, records=(), best=None, basis=replace(data.basis, taught=None, why_not="it has no trials"))

    for one in worth_showing(untaught):
        assert one.corrected_s == one.prediction["step_time_s"]
        assert one.corrected_bytes == one.prediction["peak_memory_bytes"]


def test_the_bars_stand_there_in_numbers(data, page):
    """Every bar has a row with its step times, also where no picture can be drawn."""
    told = section_of(page, "time")

    for one in worth_showing(data):
        assert f"<td>{in_short(one.values)}</td>" in told
        assert f">{predicted_seconds(one.prediction['step_time_s'])}</td>" in told


def test_every_stage_stands_against_its_limit(deep):
    """Each stage of the best has a bar that sums to its predicted peak, beside the limit."""
    found = stage_memory(deep.problem.setting, deep.best_config)
    drawn = memory_section(deep)

    traces, _ = figure_of(drawn, "stages")
    sums_gib = np.sum([trace["x"] for trace in traces if trace["type"] == "bar"], axis=0)

    assert sums_gib == pytest.approx(found.peak_bytes / 2**30)
    assert f"limit {0.92 * found.capacity_bytes[0] / 2**30:.1f} GiB" in drawn
    assert "stage 3" in drawn


# How good predictions were


def test_predictions_have_their_ranges(data, page):
    """The error bars are the ranges of the predictions, and the words count the steps inside."""
    measured = [record for record in data.records if record.step_time_s]
    ranges_s = likely_ranges_s(data, measured)
    traces, _ = figure_of(page, "accuracy")
    points = next(trace for trace in traces if trace["mode"] == "markers")
    inside = sum(low <= record.step_time_s <= high for record, (low, high) in zip(measured, ranges_s, strict=True))

    tops = np.add(points["y"], points["error_y"]["array"])
    bottoms = np.subtract(points["y"], points["error_y"]["arrayminus"])
    assert np.stack([bottoms, tops], axis=1) == pytest.approx(np.array(ranges_s))
    assert f"{inside} of {len(measured)} measured steps are inside" in text_of(page)


def test_the_best_trial_is_the_darker_point(data, page):
    """Of the points of predicted and measured steps the best trial's has a colour of its own."""
    measured = [record.number for record in data.records if record.step_time_s]
    points = next(trace for trace in figure_of(page, "accuracy")[0] if trace["mode"] == "markers")

    colours = points["marker"]["color"]
    best = measured.index(data.best.number)
    assert colours.count(colours[best]) == 1


def test_what_was_measured_of_operators_is_told(data, page):
    """Steps, peaks and every kind of operator that trials timed have a row with the median ratio to the prediction."""
    ratios = [record.step_time_s / record.predicted_s for record in data.records if record.step_time_s]
    told = section_of(page, "calibration")

    assert f'<td>step time</td><td>5 trials</td><td class="number">{np.median(ratios):.3g}</td>' in told
    assert "<td>peak memory</td>" in told
    assert "<td>matmul, forward</td>" in told


# The map


def test_each_cell_of_the_map_is_its_fastest_candidate(data):
    """A cell counts its candidates and shows the fastest measured one, or the fastest by what trials taught."""
    found = space_map(data)
    grid, expected = data.candidates.space.grid, data.expected
    keys = np.stack([grid.tp, grid.pp, grid.mbs, grid.cp * grid.up], axis=1)
    measured = {record.number: record for record in data.records if record.step_time_s}

    assert sum(cell.candidates for cell in found.cells.values()) == len(grid)
    for key, cell in found.cells.items():
        own = (keys == key).all(axis=1)
        assert cell.candidates == own.sum()
        if cell.candidates and not cell.measured:
            runs = own & expected.fits if (own & expected.fits).any() else own
            assert cell.step_time_s == pytest.approx(expected.step_time_s[runs].min())
    steps_s = {cell.step_time_s for cell in found.cells.values() if cell.measured}
    assert steps_s <= {record.step_time_s for record in measured.values()}
    (best,) = [cell for cell in found.cells.values() if cell.is_best]
    assert best.fastest == data.best.params


def test_an_empty_cell_says_what_removed_it(config, data, page):
    """What rules and memory removed is kept cell by cell, and told where the pointer stands."""
    found = space_map(data)
    heard = {}

    def hear(rule, _, broken, weight):
        heard[rule] = heard.get(rule, 0) + int(broken.sum()) * weight

    _, removed = enumerate_space(config.problem.setting, config.problem.options, on_broken=hear)
    empty = {key: cell for key, cell in found.cells.items() if not cell.candidates}

    assert {rule: count for rule, count in heard.items() if count} == removed
    assert empty
    assert all(cell.removed for cell in empty.values())
    for rule in {rule for cell in empty.values() for rule in cell.removed}:
        assert rule == "memory" or rule in removed
    titles = re.findall(r"<title>([^<]*)</title>", section_of(page, "map"))
    assert any("removed: " in title and data.reasons["global_batch"] in title for title in titles)


def test_a_cell_that_memory_emptied_says_what_it_needs(tmp_path):
    """Where all configurations of a cell are too large, the least of them is told beside the limit."""
    config = study_of(tmp_path, text=STUDY.replace("llama-7b", "llama3-70b").replace("hosts: 1", "hosts: 4"))
    run(config, 1)
    data = collect(config)
    needs = [cell for cell in space_map(data).cells.values() if cell.least_bytes is not None]

    assert needs
    capacity = config.problem.setting.cluster.devices[0].memory_bytes
    assert all(cell.least_bytes > 0.8 * capacity and "memory" in cell.removed for cell in needs)
    assert re.search(r"it needs at least \d+\.\d GiB", map_section(data))


def test_the_map_needs_no_script(page):
    """The map is markup: its cells, their colours, their marks, and what the pointer shows."""
    told = section_of(visible(page), "map")

    assert told.count("<rect") > 20
    assert 'class="best"' in told
    assert "class=&quot;" not in told
    assert structure_of(page).wrong == []


# Without scripts


def test_numbers_stand_there_without_scripts(data, page):
    """Where scripts are blocked the page says so, leaves no empty picture, and still holds every table."""
    blocked = re.sub(r"<script\b[^>]*>.*?</script>", "", page, flags=re.DOTALL)

    assert "<noscript><p>" in blocked
    assert ".drawn, button.copy { display: none; }" in blocked
    assert blocked.count('class="drawn"') == blocked.count('id="figure-')
    words = text_of(blocked)
    for record in data.records:
        assert predicted_seconds(record.predicted_s) in words
    last = data.moments[-1]
    assert f"configuration ({after_trials(data.records, last.trial)})" in words
    assert in_short(last.shares[0].config) in words


# The framework


def test_the_flags_that_change_are_told(data):
    """Below the best stand the flags that today's lack and those that it drops; none where today's is the best."""
    current = data.reference
    same = replace(data, best=replace(data.best, params=dict(current.values)))

    today, best = flags_section(same), flags_section(data)
    lines = re.findall("<li>(.*?)</li>", best)

    assert f"You run {in_short(current.values)}. Change {plural(len(lines), 'line')}:" in text_of(best)
    assert lines
    for line in lines:
        flag = re.search("<code>(.*?)</code>", line)[1]
        assert (flag in best.split("<pre")[1]) != ("remove" in line)
        assert flag not in today.split("<pre")[1] or "remove" in line
    assert f"You run {in_short(current.values)}, which is the best." in text_of(today)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "title", "flag"),
    [
        ("megatron-core", "Flags for Megatron-LM", "--tensor-model-parallel-size 8"),
        ("nanotron", "Configuration for nanotron", "tp: 8"),
        ("maxtext", "Settings for MaxText", "ici_tensor_sequence_parallelism=8"),
        ("paddle", "Flags for Megatron-LM", "the study models paddle"),
    ],
)
def test_the_report_writes_for_the_studys_framework(tmp_path, runtime, title, flag):
    """The best is written as the study's own framework takes it; where that has no exporter, for Megatron-LM, with a
    note.
    """
    text = (STUDY + CURRENT).replace("{recompute: [none, full]}", "{tp: [8]}") + f"runtime: {runtime}\n"
    config = study_of(tmp_path, text=text)
    run(config, 1)

    told = flags_section(collect(config))

    assert f"<h2>{title}</h2>" in told
    assert flag in told


# A training inside of which trials ran


def trained(data, *losses):
    """The same study, had its first trials brought a training forward by steps with these losses."""
    records = tuple(
        replace(record, observation=replace(record.observation, losses=told))
        for record, told in zip(data.records, losses, strict=False)
    )
    return replace(data, records=records)


def test_the_losses_of_a_training_go_on_over_its_layouts(data):
    """The figure has one line through all steps and one colour for each layout, and the text tells how far the loss
    moved where the layout changed.
    """
    told = trained(data, ((1, 4.0), (2, 3.5)), ((3, 3.25), (4, 3.0)), ((5, 2.875),))
    shown = training_section(told)
    first, *layouts = figure_of(shown, "training")[0]

    assert first["x"] == [1, 2, 3, 4, 5]
    assert [trace["name"] for trace in layouts] == [in_short(record.params) for record in told.records]
    assert len({trace["line"]["color"] for trace in layouts}) == 3
    assert layouts[1]["y"] == [3.25, 3.0, None]
    words = "changed, 2 times, the loss moved by at most 0.25 from one step to the next; elsewhere by at most 0.5"
    assert words in text_of(shown)


def test_a_study_outside_of_a_training_has_no_losses(data):
    """Nothing stands where no trial tells a loss of a training."""
    assert training_section(data) == ""
