"""Flags that no reader asks for: known ones with their effects, and those that no known program has."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from costmodels.job.fact_words import all_names
from hardware.io.errors import ConfigError
from tests.unit.tuner.imports.test_megatron_models import read
from tuner import imports
from tuner.export.megatron_flags import FLAGS
from tuner.imports.known_arguments import effects, is_harmless, known_flags
from tuner.study_file.answers import Added, check_complete, open_doubts, parse_ignored

FOLDER = Path(imports.__file__).parent
LISTED = yaml.safe_load((FOLDER / "megatron_arguments.yaml").read_text(encoding="utf-8"))
IN_TABLE = {flag.removeprefix("--"): row for flag, row in FLAGS.items()}
OF_FACTS = {name.removeprefix("--") for name in all_names("megatron") | all_names("mindspeed")}
MODELLED = sorted(
    {name for one in LISTED["programs"] for name in one.get("modelled", "").split()}
    | {name for name, row in IN_TABLE.items() if row.exports == "none"}
)
REFUSED = LISTED["refused"].split()
UNKNOWN = "not known to any version of Megatron-LM"


def doubts(flags):
    """The flags that are doubted, with the keys that settle them."""
    return {one.flag: one.key for one in read(flags).doubts}


def test_every_argument_stands_once():
    """No name is listed under two programs or with two meanings, except where only its values tell them apart."""
    texts = [one.get(kind, "") for one in LISTED["programs"] for kind in ("modelled", "harmless")]
    names = [name for text in (*texts, LISTED["refused"]) for name in text.split()]
    with_effects = [name.removeprefix("--") for name in effects()]

    assert [name for name, times in Counter(names + with_effects).items() if times > 1] == []
    assert set(names) & (IN_TABLE.keys() | OF_FACTS) == set()
    assert len(known_flags()) == len(names) + len(IN_TABLE.keys() | OF_FACTS | set(with_effects))


def test_what_counts_as_modelled_is_asked_for():
    """Each argument that is called modelled stands in the text of an importer."""
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))

    written = {name.replace("_", "-") for name in re.findall(r"--([A-Za-z0-9][\w-]*)", text)}
    ends = {f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")}
    assert sorted(set(MODELLED) - written - ends) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_called_refused_is_refused(name):
    """A flag of another kind of training makes no study."""
    with pytest.raises(ConfigError, match="does not model this"):
        read(f"--{name} 1")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--use-moba-attention", {"--use-moba-attention": ""}),
        ("--hash_layers 4", {"--hash-layers": ""}),
        ("--xyz", {"--xyz": ""}),
        ("--enable-zero-bubble", {"--enable-zero-bubble": ""}),
        ("--my-fsdp-group 8", {"--my-fsdp-group": "zero_stage"}),
        ("--recompute-every 2", {"--recompute-every": "recompute"}),
        ("--offload-optimizer-to-host", {"--offload-optimizer-to-host": "offload"}),
        ("--tree-ulysses 2", {"--tree-ulysses": "up"}),
        ("--no-bias-gelu-fusion --wandb-project x --use-flash-attn", {}),
        ("--wandb-team x --my-data-blend y --eval-batches 4 --swanlab-key z --reward-loss-weight 1", {}),
    ],
)
def test_an_unknown_flag_is_asked_for_unless_its_name_is_harmless(flags, expected):
    """Flags about data, reports, evaluation and learning are listed only; a key that a name is about is asked for."""
    assert doubts(flags) == expected


def test_unknown_flags_are_listed_by_name():
    """One note names every flag that no version of a known program has, also the harmless ones."""
    notes = [note for note in read("--xyz --wandb-team x --swiglu").notes if note.startswith(UNKNOWN)]

    assert [note.rpartition(": ")[2] for note in notes] == ["--xyz, --wandb-team"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--swap-optimizer", {"--swap-optimizer": ""}),
        ("--megatron-fsdp-main-grads-dtype bf16", {"--megatron-fsdp-main-grads-dtype": ""}),
        ("--main-grads-dtype bf16 --spec local --cpu-offloading-num-layers 0", {}),
        ("--attention-backend unfused", {}),
        ("--use-checkpoint-args", {"--use-checkpoint-args": ""}),
        ("--recompute-norm", {"--recompute-norm": "recompute"}),
        ("--recompute-norm --recompute-granularity full", {}),
        ("--schedules-method dualpipev", {"--schedules-method": ""}),
        ("--recompute-granularity attention", {"--recompute-granularity": "recompute"}),
        ("--num-experts 8 --moe-layer-freq [1]*2+[0]*22", {"--moe-layer-freq": ""}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 24", {}),
        ("--recompute-granularity full --recompute-method block", {"--recompute-method": "recompute"}),
    ],
)
def test_a_known_flag_that_no_study_has_is_asked_for(flags, expected):
    """What changes memory, the model or the layout is asked for where its value does."""
    assert doubts(flags) == expected


def test_flags_of_launchers_are_not_doubted():
    """A script without a command that can be read holds flags of srun and torchrun too, which train nothing."""
    imported = imports.IMPORTERS["megatron"](
        """\
SRUN="--kill-on-bad-exit 1 --container-image pytorch.sqsh"
LAUNCH="--nproc_per_node 8 --nnodes 2"
MODEL="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4"
OTHER="--bf16 --xyz"
"""
    )

    assert [one.flag for one in imported.doubts] == ["--xyz"]


def test_an_override_is_not_called_unread():
    """--recompute-activations replaces the granularity, which then needs no note."""
    imported = read("--recompute-activations --recompute-granularity full --recompute-modules mlp")

    assert imported.job["recompute"] == "selective"
    assert imported.job["recompute_modules"] == ["mlp"]
    assert (imported.unread, imported.doubts) == ((), ())


def test_a_doubt_ends_by_its_key_or_by_being_ignored():
    """The message names the options that settle all doubts; with them none is open."""
    imported = read("--xyz --my-fsdp-group 8 --recompute-norm")
    with pytest.raises(ConfigError) as error:
        check_complete(imported, Added(cluster="dgx-h100"), Path("train.sh"))

    assert error.value.listed[-1].endswith("--recompute NAME --zero-stage N --ignore-flags xyz")
    ignored = parse_ignored("xyz, --my_fsdp_group")
    assert [one.flag for one in open_doubts(imported, Added(ignored=ignored))] == ["--recompute-norm"]
    check_complete(
        imported, Added(cluster="dgx-h100", answers={"recompute": "none"}, ignored=ignored), Path("train.sh")
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--log-expert-load", True),
        ("--save-hf-dir", True),
        ("--indexed-dataset-path", True),
        ("--tokenizer-padding", True),
        ("--z-loss-coeff", True),
        ("--batch-steps", False),
        ("--num-memory-tokens", False),
        ("--loss-parallel", False),
    ],
)
def test_names_that_say_that_nothing_changes(name, expected):
    """Only the beginning or the end of a name, or a word of it beside no suspicious one, makes it harmless."""
    assert is_harmless(name) is expected


@pytest.mark.parametrize("flag", ["--num-layer-list", "--custom-pipeline-layers"])
def test_a_list_of_layers(flag):
    """MindSpeed's --num-layer-list and AIAK-Megatron's --custom-pipeline-layers give the layers of each stage."""
    imported = read(f"--num-layers 24 --pipeline-model-parallel-size 4 {flag} 5,6,6,7")

    assert (imported.layers, imported.degrees["vpp"]) == ((5, 6, 6, 7), 1)


@pytest.mark.parametrize(
    ("flags", "layers", "vpp"),
    [
        ("--num-virtual-stages-per-pipeline-rank 4 --account-for-embedding-in-pipeline-split", (2, *[3] * 7), 4),
        ("--num-layers-per-virtual-pipeline-stage 3 --account-for-loss-in-pipeline-split", (*[3] * 7, 2), 4),
        ("--account-for-loss-in-pipeline-split", (12, 11), 1),
        ("--decoder-first-pipeline-num-layers 11", (11, 12), 1),
        ("--decoder-last-pipeline-num-layers 5 --num-virtual-stages-per-pipeline-rank 1", (18, 5), 1),
        ("--pipeline-model-parallel-layout 'E|(tt|)*10t|tt|L'", (0, *[2] * 10, 1, 2, 0), 7),
        ("--pipeline-model-parallel-layout 'Et*12|t*11mL'", (12, 11), 1),
    ],
)
def test_unequal_layers_of_megatron(flags, layers, vpp):
    """The embedding and the loss may count as layers; ends may have layers of their own; a layout says all."""
    imported = read(f"--num-layers 23 --pipeline-model-parallel-size 2 {flags}")

    assert (imported.layers, imported.degrees["vpp"]) == (layers, vpp)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2", "divisible by the 4 virtual"),
        ("--decoder-first-pipeline-num-layers 11 --num-virtual-stages-per-pipeline-rank 2", "share equally"),
    ],
)
def test_unequal_layers_that_megatron_refuses_are_left_open(flags, told):
    """Layers that the stages cannot share as the flags say are told with the rule that they break."""
    imported = read(f"--num-layers 21 --pipeline-model-parallel-size 2 {flags}")

    assert told in imported.open["vpp"]


def test_experts_are_recomputed_by_their_own_flag():
    """--moe-layer-recompute adds the experts to selective recomputation."""
    imported = read("--num-experts 8 --moe-layer-recompute")

    assert (imported.job["recompute"], imported.job["recompute_modules"]) == ("selective", ["core_attn", "moe"])


@pytest.mark.parametrize(
    ("flags", "runtime", "stage"),
    [
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "megatron-core", 2),
        ("--enable-zero3 --use-distributed-optimizer", "unknown", 3),
        ("--deepspeed --ds-sequence-parallel-size 2 --zero-stage 3", "unknown", 3),
    ],
)
def test_sharded_weights(flags, runtime, stage):
    """Each way to shard gradients or weights has a stage, and a profile that offers it."""
    imported = read(flags)

    assert (imported.runtime, imported.job["zero_stage"]) == (runtime, stage)


def test_flag_that_a_variable_names_is_asked_for_as_what_the_variable_says():
    """A flag such as `--${DTYPE}` is the question of its key, and never passed over."""
    assert doubts("--$TRAINING_DTYPE --$PRECISION_FLAG") == {
        "--$TRAINING-DTYPE": "precision",
        "--$PRECISION-FLAG": "precision",
    }
