import csv
from pathlib import Path

import pytest

from costmodels.calibration.measured_runs import (
    COLUMNS,
    one_group,
    read_measured,
    read_measured_and_skipped,
    read_measured_and_unstated,
    read_measured_group,
    varying_dimensions,
)
from costmodels.calibration.stated_setup import NOTHING, STATED_COLUMNS, StatedSetup
from hardware.io.errors import ConfigError

MEASURED = Path(__file__).resolve().parents[4] / "configs" / "measured"
DEFAULT = dict.fromkeys(COLUMNS, "") | {
    "source": "test", "model": "llama-tiny", "layers": "4", "hidden": "64", "heads": "4", "kv_heads": "2",
    "ffn": "128", "vocab": "1000", "seq_len": "128", "gbs": "8", "mbs": "1", "devices": "2",
    "device": "H100-SXM-80", "tp": "1", "pp": "1", "dp": "2", "recompute": "none", "zero_stage": "1",
    "seq_parallel": "0", "precision": "bf16 (fp32 grad accum)", "step_seconds": "2.0",
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Writes rows over the defaults to runs.csv."""

    def write_rows(*rows, columns=COLUMNS):
        with (tmp_path / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(DEFAULT | row for row in rows)
        return tmp_path

    return write_rows


def read(folder, **where):
    """The runs of runs.csv."""
    return read_measured(["runs.csv"], where, folder)


def test_reads_every_field_of_a_row(write):
    """A row gives the model, the job, the configuration, the result, and the place that it stands in."""
    row = {"recompute": "selective:core_attn", "peak_mem_gib": "1.5", "notes": "swiglu; tied embeddings"}
    (run,) = read(write(row))
    model, config = run.model, run.config

    assert (model.num_layers, model.plain.head_dim, model.plain.num_kv_heads) == (4, 16, 2)
    assert (model.plain.gated_ffn, model.norm, model.tied_embeddings) == (True, "rms", True)
    assert (config.dp, config.vpp, config.recompute, config.sequence_parallel) == (2, 1, "selective", False)
    assert (run.step_time_s, run.peak_memory_bytes, run.precision) == (2.0, 3 * 2**29, "bf16")
    assert (run.place, run.is_failed) == ("runs.csv:2", False)


@pytest.mark.parametrize(
    ("row", "step_time_s"),
    [
        ({"step_seconds": "", "tokens_per_s_per_device": "256"}, 128 * 8 / (256 * 2)),
        ({"notes": "FAILED: oom"}, None),
        ({"step_seconds": ""}, None),
    ],
)
def test_a_step_time_follows_from_throughput_or_the_run_failed(write, row, step_time_s):
    """Without a printed step time, it follows from tokens per second and device.

    A note that begins with FAILED, or a row without any result, is a failed run.
    """
    (run,) = read(write(row))

    assert (run.step_time_s, run.is_failed) == (step_time_s, step_time_s is None)


def test_a_failed_row_takes_its_ties_from_its_sweep(write):
    """A row whose notes don't tell takes tied embeddings from another row of the same source and model."""
    rows = ({"notes": "tied embeddings"}, {"notes": "FAILED"}, {"model": "other", "notes": "untied embeddings"})

    assert [run.model.tied_embeddings for run in read(write(*rows))] == [True, True, False]


def test_incomplete_rows_are_skipped_and_counted(write):
    """Rows that tell no whole, consistent configuration with a step time are counted where they match."""
    incomplete = [{"mbs": ""}, {"recompute": "maxtext:custom"}, {"devices": "4"}, {"dp": "2", "mbs": "3"}]
    rows = [{}, *incomplete, {"step_seconds": "", "peak_mem_gib": "3"}, {"mbs": "", "gbs": "64"}]
    group = read_measured_group(["runs.csv"], {"gbs": 8}, write(*rows))

    assert (len(group.runs), group.skipped) == (1, 5)


def test_a_file_may_hold_only_rows_without_recomputation(write):
    """Such a file has no runs for readers of runs, which refuse it, but it has some for those who ask for them."""
    folder = write({"recompute": ""})

    assert len(read_measured_and_unstated(["runs.csv"], folder)[1]) == 1
    with pytest.raises(ConfigError, match="matches 1 rows, none of which has a complete"):
        read(folder)


@pytest.mark.parametrize(
    ("rows", "where", "message"),
    [
        ([{}], {"device_count": 2}, r"where\.device_count: is no column of the file; did you mean"),
        ([{}, {"gbs": "16"}], {"gbs": 32}, r"where\.gbs = 32: matches no row; the column has 8, 16"),
        ([{"gbs": "eight"}], {}, r"runs\.csv:2: gbs = 'eight': must be a number"),
        ([{"tp": "1.5"}], {}, r"runs\.csv:2: tp = '1\.5': must be a whole number.*nearest: 2"),
        ([{"step_seconds": "nan"}], {}, r"step_seconds = 'nan'"),
        ([{"seq_parallel": "7"}], {}, r"seq_parallel = '7': must be 0 or 1"),
        ([{"zero_stage": "5"}], {}, r"zero_stage = 5: must be 0, 1, 2 or 3"),
        ([{"kv_heads": "3"}], {}, r"none of which has a complete and consistent configuration"),
        ([{"mbs": ""}], {}, r"none of which has a complete and consistent configuration"),
        ([], {}, r"runs\.csv: holds no measured run"),
    ],
)
def test_a_mistake_is_told_with_its_place(write, rows, where, message):
    """Each mistake is one ConfigError with file and line, key, value, rule and, where there is one, a valid choice."""
    with pytest.raises(ConfigError, match=message):
        read(write(*rows), **where)


ALL_COLUMNS = (*COLUMNS, *STATED_COLUMNS)
STATED = {
    "runtime": "torchtitan", "devices_per_host": "4", "link": "RoCE", "nic_gb_per_s": "12.5", "attention": "unfused",
    "facts": "overlaps_gradients=False; gradient_bytes=2; layer_split=balanced; fp8_recipe=tensorwise",
    "peak_mem_counts": "allocated",
}  # fmt: skip


def test_a_row_states_its_runtime_network_and_kernels(write):
    """The optional columns are read as far as a file has them; a row that leaves them empty states nothing."""
    stating, silent = read(write(STATED, {}, columns=ALL_COLUMNS))
    (part,) = read(write({"attention": "flash"}, columns=(*COLUMNS, "attention")))

    facts = {"attention": "unfused", "overlaps_gradients": False, "gradient_bytes": 2}
    facts |= {"fp8_recipe": "tensorwise", "layer_split": "balanced"}
    assert stating.stated == StatedSetup(
        runtime="torchtitan",
        devices_per_host=4,
        link="RoCE",
        nic_gb_per_s=12.5,
        facts=tuple(facts.items()),
        memory="allocated",
    )
    assert silent.stated == NOTHING
    assert part.stated == StatedSetup(facts=(("attention", "flash"),))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"runtime": "torchtitans"}, r"runtime = 'torchtitans': is no runtime profile; did you mean 'torchtitan'"),
        ({"link": "rocee"}, r"link = 'rocee': is not among its values; did you mean 'roce'"),
        ({"nic_gb_per_s": "fast"}, r"nic_gb_per_s = 'fast': must be a number"),
        ({"nic_gb_per_s": "0"}, r"nic_gb_per_s = '0': must be above 0 and at most 1,000,000"),
        ({"devices_per_host": "7.5"}, r"devices_per_host = '7\.5': must be a whole number"),
        ({"attention": "flesh"}, r"attention = 'flesh': is not among its values; did you mean 'flash'"),
        ({"facts": "overlaps_gradients"}, r"facts = 'overlaps_gradients': must be NAME=VALUE"),
        ({"facts": "overlap_gradients=true"}, r"facts\.overlap_gradients: .* did you mean 'overlaps_gradients'"),
        ({"facts": "overlaps_ring=1"}, r"facts\.overlaps_ring = '1': is not among its values; valid: false, true"),
        ({"facts": "gradient_bytes=0"}, r"facts\.gradient_bytes = '0': must be a whole number from 1"),
        ({"facts": "matmul_efficiency=1"}, r"facts\.matmul_efficiency: is no fact of a run"),
        ({"facts": "overlaps_ring=true;overlaps_ring=true"}, r"facts\.overlaps_ring = 'true': states the fact twice"),
        (
            {"facts": "fused_attention=true", "attention": "unfused"},
            r"attention = 'unfused': contradicts fused_attention=true in `facts`",
        ),
        ({"peak_mem_counts": "all"}, r"peak_mem_counts = 'all': is not among its values; .*allocated"),
    ],
)
def test_a_wrong_statement_is_told_with_its_place(write, row, message):
    """What an optional column cannot mean is refused with file, line, column, value and the nearest valid choice."""
    with pytest.raises(ConfigError, match=r"runs\.csv:2: " + message):
        read(write(row, columns=ALL_COLUMNS))


def test_a_misspelt_optional_column_is_told(write):
    """A column close to an optional one is refused, since it would be ignored; others are the user's own."""
    assert read(write({"remark": "mine"}, columns=(*COLUMNS, "remark")))
    with pytest.raises(ConfigError, match=r"runs\.csv:1: nic_gb_s: is no column; did you mean 'nic_gb_per_s'"):
        read(write({}, columns=(*COLUMNS, "nic_gb_s")))


def test_a_group_shares_one_setup(write):
    """Runs that state another network are of another group, and the message names the column."""
    with pytest.raises(ConfigError, match=r"add `link` to `where`"):
        one_group(read(write({"link": "roce"}, {"link": "infiniband"}, columns=ALL_COLUMNS)))


def test_a_file_that_is_no_table_is_told(write):
    """A misspelt file name comes with the CSV that stands there; a lacking column and a line cut off are refused."""
    folder = write({})
    with (folder / "runs.csv").open("a") as file:
        file.write("test,only,three\n")

    with pytest.raises(ConfigError, match=r"run\.csv: no such file; did you mean 'runs\.csv'"):
        read_measured(["run.csv"], {}, folder)
    with pytest.raises(ConfigError, match=r"runs\.csv:3: has 3 cells where the header has 34"):
        read(folder)
    with pytest.raises(ConfigError, match=r"runs\.csv:1: gbs: is a missing column"):
        read(write({}, columns=[column for column in COLUMNS if column != "gbs"]))


@pytest.mark.parametrize("column", ["gbs", "layers", "model", "precision"])
def test_a_group_shares_one_job(write, column):
    """Rows of two jobs are refused, with the column that tells them apart."""
    row = {"gbs": "16", "layers": "8", "model": "x", "precision": "fp16"}
    with pytest.raises(ConfigError, match=rf"add `{column}` to `where`"):
        one_group(read(write({}, {column: row[column]})))


def test_only_dimensions_within_equal_degrees_vary():
    """In the shipped sweep the ZeRO stage varies; sequence parallelism follows from tp and does not."""
    group = read_measured_group(["ultrascale-llama-8b-128.csv"], {}, MEASURED)

    assert {run.config.sequence_parallel for run in group.runs} == {True, False}
    assert varying_dimensions(group.runs) == ("zero_stage",)


# What only remarks and free text tell


MOE = {"model": "mixtral-tiny", "experts": "8", "topk": "2", "moe_ffn": "64"}


@pytest.mark.parametrize(
    ("row", "expert_tp"),
    [
        ({"notes": "ETP=1"}, 1),
        ({"notes": "expert-tensor-parallel-size=1; swiglu"}, 1),
        ({"notes": "expert_tensor_parallel_size=2"}, 0),
        ({"notes": "CI golden moe/gpt3_moe_tp2_pp1_ep2_etp1_1node"}, 1),
        ({"ep": "4"}, 1),
        ({"ep": "2"}, 0),
    ],
)
def test_the_experts_tensor_degree_is_read_from_the_remarks(write, row, expert_tp):
    """It is what the remarks name, 1 where ep leaves no other, and 0 where it is that of tp."""
    (run,) = read(write(MOE | {"tp": "2", "devices": "4", "ep": "2"} | row))

    assert run.config.expert_tp == expert_tp


@pytest.mark.parametrize(
    ("notes", "dp_shard"),
    [
        ("zero1 group size 4 ", 4),
        ("zero1 group size=4 (", 4),
        ("zero1 group size=-1 (all DP ranks); ", 0),
        ("zero1 group size 3 ", 0),
        ("", 0),
    ],
)
def test_a_shard_over_some_ranks_is_read_from_the_remarks(write, notes, dp_shard):
    """InternEvo names the ranks of its ZeRO groups; a number that cannot be is left out."""
    (run,) = read(write({"dp": "8", "devices": "8", "notes": f"{notes}interleaved"}))

    assert run.config.dp_shard == dp_shard


@pytest.mark.parametrize(
    ("cell", "mode", "modules"),
    [
        ("none", "none", ("core_attn",)),
        ("full:uniform:1", "full", ("core_attn",)),
        ("selective:[moe_act]", "selective", ("moe_act",)),
        ("modules:layernorm+moe_act", "selective", ("layernorm", "moe_act")),
        ("maxtext:full", "full", ("core_attn",)),
        ("maxtext:minimal", "none", ("core_attn",)),
    ],
)
def test_recomputation_is_read_in_every_spelling(write, cell, mode, modules):
    """A mode may name its method, its modules, or a MaxText policy."""
    (run,) = read(write({"recompute": cell}))

    assert (run.config.recompute, run.recompute_modules) == (mode, modules)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("full:block:4", ("none", 4)), ("full:5 layers", ("none", 5)), ("full:uniform:2", ("full", 0))],
)
def test_some_layers_of_each_stage_may_be_repeated(write, cell, expected):
    """Megatron-LM's method `block` repeats the first layers of each virtual stage alone, `uniform` repeats all."""
    (run,) = read(write({"recompute": cell}))

    assert (run.config.recompute, run.config.recompute_layers) == expected


def test_precision_is_told_in_the_words_of_a_job(write):
    """Whatever stands beside it, the type of the products is one that TrainingJob has."""
    cells = ("bf16", "FP8 (delayed)", "nvfp4", "fp16", "")
    runs = read(write(*({"precision": cell} for cell in cells)))

    assert [run.precision for run in runs] == ["bf16", "fp8", "nvfp4", "fp16", "bf16"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"notes": "schedule GPipe"}, "a pipeline schedule that the cost model does not know"),
        ({"notes": "DualPipe"}, "a pipeline schedule that the cost model does not know"),
        ({"model": "gpt ZB-2p"}, "a pipeline schedule that the cost model does not know"),
        ({"kv_heads": "3"}, "impossible architecture: "),
    ],
)
def test_runs_without_a_model_are_skipped_with_their_reason(write, row, words):
    """A run under another schedule than plain or interleaved 1F1B, or of sizes that contradict, cannot be compared."""
    known = ({"notes": "schedule 1F1B"}, {"notes": "Schedule Interleaved1F1B"}, {"notes": "no word of it"})
    runs, skipped = read_measured_and_skipped(["runs.csv"], write(*known, row))

    ((reason, count),) = skipped.items()
    assert (len(runs), count) == (3, 1)
    assert reason.startswith(words)
    assert ("num_kv_heads" in reason) == ("kv_heads" in row)


ARCHITECTURE = (*COLUMNS, "architecture")


def test_a_row_takes_its_model_from_the_file_that_it_names(write):
    """Its columns of sizes may be empty then, and the model keeps the row's name."""
    sizes = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": ""}
    folder = write({"architecture": "moonlight.json", "model": "moonlight", **sizes}, columns=ARCHITECTURE)
    text = (MEASURED / "kinds" / "models" / "moonlight-16b-a3b.json").read_text(encoding="utf-8")
    (folder / "moonlight.json").write_text(text, encoding="utf-8")
    (run,) = read(folder)

    assert (run.model.name, run.model.num_layers, run.model.plain.kv_lora_rank) == ("moonlight", 27, 512)
    assert run.architecture == "moonlight.json"


def test_a_row_whose_model_no_reader_knows_is_counted_by_the_file(write):
    """The reason names the file and what was not understood, and other rows are read."""
    folder = write({}, {"architecture": "new.json"}, columns=ARCHITECTURE)
    (folder / "new.json").write_text('{"model_type": "of_tomorrow"}', encoding="utf-8")
    runs, skipped = read_measured_and_skipped(["runs.csv"], folder)

    assert [run.place for run in runs] == ["runs.csv:2"]
    assert skipped == {"no reader for new.json: model_type: of_tomorrow unknown model type": 1}


def test_a_row_may_not_name_a_model_that_is_not_there(write):
    """A wrong path is a mistake of the file, not a model that is unknown."""
    folder = write({"architecture": "gone.json"}, columns=ARCHITECTURE)

    with pytest.raises(ConfigError, match=r"architecture = 'gone.json': no such file"):
        read(folder)
