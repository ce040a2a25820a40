"""`python -m benchmarks.launch_scripts`: what a script trains, and when a study of it is right."""

import json

import pytest

from benchmarks.launch_scripts.__main__ import main
from benchmarks.launch_scripts.judging import AFTER, REFUSED, RIGHT, WRONG, verdict
from benchmarks.launch_scripts.study import Outcome
from benchmarks.launch_scripts.truth import Truth, contradiction

SIZES = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2"
SCRIPTS = {
    "right.sh": f"TP=2\ntorchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --global-batch-size 64 --bf16 "
    "--vocab-size 32000 --tensor-model-parallel-size $TP\n",
    "asked.sh": f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --global-batch-size 64 --bf16\n",
    "bert.sh": f"torchrun --nproc_per_node 8 pretrain_bert.py {SIZES} --global-batch-size 64\n",
    "impossible.sh": f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-size 32000 "
    "--tensor-model-parallel-size $1\n",
    "data.sh": "python tools/preprocess_data.py --input a.json\n",
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 4096\n'
    "[parallelism]\ndata_parallel_shard_degree = 8\n",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the entries of all scripts by their names."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "ours").mkdir()
    for name, text in SCRIPTS.items():
        (folder / "ours" / name).write_text(text, encoding="utf-8")
    (folder / "ours" / "impossible.sh.args").write_text("16\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        assert main([str(folder), "--json"]) == 0
    answer = json.loads("\n".join(line for line in printed if not line.startswith("ours: ")))
    return {entry["script"].removeprefix("ours/"): entry for entry in answer["scripts"]} | {"table": answer["projects"]}


def verdicts(entry):
    """Return the verdicts by the ways in."""
    return {way: of["verdict"] for way, of in entry["ways"].items()}


def test_a_whole_script_is_right_by_both_ways_in(found):
    """Nothing is asked of a script that states everything, and its studies agree with its command."""
    assert verdicts(found["right.sh"]) == {"capture": RIGHT, "reading": RIGHT}
    assert verdicts(found["titan.toml"]) == {"reading": RIGHT}


def test_answers_are_counted_apart(found):
    """A script without a vocabulary is right once that question is answered."""
    assert verdicts(found["asked.sh"]) == {"capture": AFTER, "reading": AFTER}
    assert found["asked.sh"]["ways"]["capture"]["asked"] == ["--vocab-size"]


def test_a_difference_is_wrong_and_named():
    """A study with another degree than the command's is wrong, unless an answer stated that degree."""
    truth = Truth(facts={"tp": 2, "pp": 1})

    assert verdict(Outcome(facts={"tp": 4, "pp": 1}), truth) == (WRONG, ["tp: 4, not 2"])
    assert verdict(Outcome(facts={"tp": 4, "pp": 1}, asked=("--config tp",), answered=frozenset({"tp"})), truth) == (
        AFTER,
        [],
    )


def test_a_study_of_another_training_is_wrong():
    """A study of what is no decoder-only transformer is wrong as a whole, and a refusal of a supported one counts."""
    assert verdict(Outcome(facts={"tp": 1}), Truth(other="T5"))[0] == WRONG
    assert verdict(Outcome(facts={}, refused="is too large"), Truth(facts={"tp": 1})) == (REFUSED, [])


def test_contradictions_of_a_command():
    """Devices, expert ranks and batch have to divide as the frameworks demand."""
    fits = {"tp": 2, "pp": 2, "cp": 1, "ep": 2, "dp": 2, "mbs": 1, "gbs": 4, "world": 8}

    assert contradiction(fits) == ""
    assert "devices" in contradiction(fits | {"world": 6})
    assert "expert" in contradiction(fits | {"ep": 8})
    assert "batch" in contradiction(fits | {"gbs": 5})
