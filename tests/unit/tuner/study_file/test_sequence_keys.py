from pathlib import Path

import pytest

from costmodels.job.sequences import Sequences
from hardware.io.errors import ConfigError
from trials.command.backend import CommandBackend
from tuner.study_file.config import load_study
from tuner.study_file.sequence_keys import round_well

STUDY = """
name: sft
model: llama3-8b
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 8192, {job}}}
runtime: {runtime}
trial: {{backend: {backend}}}
"""
SMALL = Path(__file__).resolve().parents[4] / "configs" / "models" / "gpt-small.yaml"
LENGTHS = "sequences: {lengths: [512, 2048, 8192], shares: [6, 3, 1]}"


def load(folder, job, *, backend="simulated", runtime="megatron-core"):
    """The study of a job."""
    path = folder / "study.yaml"
    path.write_text(STUDY.format(job=job, backend=backend, runtime=runtime), encoding="utf-8")
    return load_study(path)


def job_of(folder, job):
    """The job of a study."""
    return load(folder, job).problem.setting.job


def test_shares_are_ratios_and_lengths_come_in_any_order(tmp_path):
    """Shares of 6, 3 and 1 are 60%, 30% and 10%, in whatever order the lengths stand."""
    expected = Sequences(lengths=(512, 2048, 8192), shares=(0.6, 0.3, 0.1))

    assert job_of(tmp_path, f"global_batch_size: 64, {LENGTHS}").sequences == expected
    mixed = "sequences: {lengths: [8192, 512, 2048], shares: [1, 6, 3]}"
    assert job_of(tmp_path, f"global_batch_size: 64, {mixed}").sequences == expected


@pytest.mark.parametrize(
    "text", ["length,count\n512,6\n2048,3\n8192,1\n", "length\n" + "512\n" * 6 + "2048\n2048\n\n2048\n8192\n"]
)
def test_a_file_of_lengths_is_the_same_histogram(tmp_path, text):
    """Counts, or a line for each sequence, say what the keys say."""
    (tmp_path / "lengths.csv").write_text(text, encoding="utf-8")
    found = job_of(tmp_path, "global_batch_size: 64, sequences: {lengths: lengths.csv}")

    assert found == job_of(tmp_path, f"global_batch_size: 64, {LENGTHS}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "length,count"),
        ("tokens,count\n1,2\n", "length,count"),
        ("length,count\n", "no lengths"),
        ("length,count\n512\n", ":2: has 1 cells"),
        ("length,count\n512,6\n0,1\n", ":3: length = '0'"),
        ("length,count\n512,-6\n", "count = '-6'"),
        ("length\n5e3\n", "whole number"),
        ("length,count\n512,0\n", "not all of them 0"),
        ("length,count\n99999,1\n", "99999 tokens"),
    ],
)
def test_a_broken_file_is_refused_by_its_line(tmp_path, text, says):
    """A mistake in a file of lengths names the file, its line and the rule."""
    (tmp_path / "lengths.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, "global_batch_size: 64, sequences: {lengths: lengths.csv}")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("global_batch_size: 64, sequences: {lengths: none.csv}", "none.csv"),
        ("global_batch_size: 64, sequences: {lengths: [512], shares: [1, 2]}", "sequences.shares = 2"),
        ("global_batch_size: 64, sequences: {lengths: [512, 9000]}", "sequence_length of at least 9000"),
        ("global_batch_size: 64, sequences: {lengths: [512], layout: padded, order: balanced}", "sequences.order"),
        (f"{LENGTHS}", "global_batch_size: is required"),
        ("global_batch_size: 64, global_batch_tokens: 8192", "global_batch_tokens"),
        ("global_batch_tokens: 10000", "multiple of sequence_length=8192; 8192"),
        ("global_batch_size: 64, sequences: {lengths: [512], per_step: 3}", "sequences.per_step"),
    ],
)
def test_mistakes_in_the_keys_are_refused_by_name(tmp_path, job, says):
    """Keys that contradict each other or the rows are named with the rule."""
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        load(tmp_path, job)


def test_a_batch_in_tokens_is_one_of_whole_rows(tmp_path):
    """2**20 tokens are 128 rows of 8,192, with or without packed sequences."""
    assert job_of(tmp_path, "global_batch_tokens: 1048576").global_batch_size == 128
    assert job_of(tmp_path, f"global_batch_tokens: 1048576, {LENGTHS}").global_batch_size == 128


def test_a_batch_in_sequences_fills_rows(tmp_path):
    """1,000 sequences of 1,741 tokens fill 212.5 rows of 8,192, which become 216; padded, they are 1,000 rows."""
    packed = job_of(tmp_path, LENGTHS.replace("}", ", per_step: 1000}"))
    padded = job_of(tmp_path, LENGTHS.replace("}", ", per_step: 1000, layout: padded}"))

    assert packed.global_batch_size == 216
    assert packed.sequences_per_step == pytest.approx(1000, rel=0.03)
    assert padded.global_batch_size == 1000


def test_padded_tokens_are_those_without_padding(tmp_path):
    """A batch of padded sequences in tokens counts their own tokens."""
    job = job_of(tmp_path, "global_batch_tokens: 1000000, " + LENGTHS.replace("}", ", layout: padded}"))

    assert job.tokens_per_step == pytest.approx(1_000_000, rel=0.03)


@pytest.mark.parametrize(("number", "found"), [(0.2, 1), (7, 7), (31.4, 31), (33, 32), (387, 384), (1000, 992)])
def test_rounding_well_moves_a_number_by_three_percent_at_most(number, found):
    """Numbers become multiples of a power of two that is at most a sixteenth of them."""
    assert round_well(number) == found
    assert abs(found / number - 1) <= 1 / 32 or number < 1


@pytest.mark.parametrize(("backend", "runtime"), [("torch", "torch-reference"), ("jax", "jax-reference")])
def test_backends_that_train_equal_sequences_refuse_others(tmp_path, backend, runtime):
    """A backend that cannot train sequences of varying length says so, and which can."""
    path = tmp_path / "study.yaml"
    text = STUDY.format(job=f"global_batch_size: 64, precision: fp32, {LENGTHS}", backend=backend, runtime=runtime)
    path.write_text(text.replace("dgx-h100", "cpu-host").replace("llama3-8b", str(SMALL)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"job\.sequences: vary in length"):
        load_study(path)


def test_a_command_trains_whatever_it_is_given(tmp_path):
    """The command backend takes sequences of varying length: its program has the data."""
    study = load(tmp_path, f"global_batch_size: 64, {LENGTHS}", backend="command, command: [./train.sh]")

    assert isinstance(study.trials.backend, CommandBackend)
    assert study.problem.setting.job.sequences is not None


def test_studies_without_a_histogram_mean_what_they_meant(tmp_path):
    """The meaning of trials gains keys only where sequences vary."""
    plain, varying = (load(tmp_path, f"global_batch_size: 64{more}") for more in ("", f", {LENGTHS}"))

    assert "sequences" not in plain.meaning["job"]
    assert "splits_documents" not in plain.meaning["runtime"]
    assert varying.meaning["job"]["sequences"]["lengths"] == (512, 2048, 8192)
    assert varying.meaning["runtime"]["splits_documents"]
