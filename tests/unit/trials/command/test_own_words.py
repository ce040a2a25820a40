"""A user's own command, in which only what a configuration changes is exchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.command.own_words import exchange_words, segments_of
from trials.framework_flags import WordRules
from tuner.export.megatron_flags import GROUPS

RULES = WordRules(
    groups={"--pp": "pipeline", "--layout": "pipeline", "--per-stage": "pipeline"},
    never_added=frozenset({"--overlap"}),
    never_removed=frozenset({"--no-fusion"}),
)


@pytest.mark.parametrize(
    ("words", "now", "then", "expected"),
    [
        ("run x.py --tp 2 --lr 1", "--tp 2", "--tp 4", "run x.py --tp 4 --lr 1"),
        ("run x.py --tp=2 --lr 1", "--tp 2", "--tp 4", "run x.py --tp 4 --lr 1"),
        ("run x.py --t_p 2 --lr 1", "--t-p 2", "--t-p 4", "run x.py --t-p 4 --lr 1"),
        ("run x.py --lr 1", "--tp 1", "--tp 4 --sp", "run x.py --lr 1 --tp 4 --sp"),
        ("run x.py --kind flex", "--kind plain", "--kind plain", "run x.py --kind flex"),
        ("run x.py --pp 2 --a --per-stage 3", "--pp 2", "--pp 4 --layout t|t", "run x.py --pp 4 --layout t|t --a"),
        ("run x.py --pp 2", "--pp 2 --overlap", "--pp 2", "run x.py --pp 2"),
        ("run x.py --pp 2 --overlap", "--pp 2 --overlap", "--pp 2", "run x.py --pp 2"),
        ("run x.py --pp 2", "--pp 2", "--pp 2 --overlap", "run x.py --pp 2"),
        ("run x.py --no-fusion", "--no-fusion", "", "run x.py --no-fusion"),
        ("run x.py", "", "--no-fusion", "run x.py --no-fusion"),
        ("run x.py --no-fusion", "", "--no-fusion", "run x.py --no-fusion"),
        ("run x.py --shift -1 --tp 2", "--tp 2", "--tp 4", "run x.py --shift -1 --tp 4"),
        ("run x.py model.tp=2 lr=1", "model.tp=2", "model.tp=4", "run x.py model.tp=4 lr=1"),
        ("run x.py --tp=4", "--tp 2", "--tp 4", "run x.py --tp=4"),
    ],
)
def test_only_what_differs_is_exchanged_in_place(words, now, then, expected):
    """A flag is exchanged where it stands, with its whole group; a new one comes last; everything else stays."""
    assert " ".join(exchange_words(words.split(), now.split(), then.split(), RULES)) == expected


WORDS = st.lists(st.sampled_from(["run", "--tp", "--pp", "--layout", "-x", "--a=b", "c=d", "4", "-1", "x.py"]))


@given(words=WORDS, now=WORDS)
def test_a_command_of_today_stays_as_it_is(words, now):
    """Where two configurations have the same flags, no word of the command changes, whatever it says."""
    assert exchange_words(words, now, now, RULES) == words


@given(words=WORDS)
def test_segments_hold_all_words_in_their_order(words):
    """Splitting a command into flags loses nothing."""
    assert [word for segment in segments_of(words) for word in segment.words] == words


@given(now=st.integers(1, 9), then=st.integers(1, 9), last=st.integers(1, 9))
def test_exchanges_do_not_add_up(now, then, last):
    """A command that was exchanged says the wanted configuration, and can be exchanged again."""
    command = ["run", "x.py", "--tp", str(now), "--lr", "1"]
    once = exchange_words(command, ["--tp", str(now)], ["--tp", str(then)], RULES)

    assert exchange_words(once, ["--tp", str(then)], ["--tp", str(last)], RULES) == [
        *("run", "x.py", "--tp", str(last), "--lr", "1")
    ]


def test_variables_of_mpirun_belong_to_its_flag():
    """`-x NAME=VALUE` is no override of a configuration, and the program behind it is no value."""
    found = segments_of(["mpirun", "-x", "A=1", "-x", "B=2", "python", "train.py", "model.a=1"])

    assert [one.words for one in found] == [
        ("mpirun",),
        ("-x", "A=1"),
        ("-x", "B=2"),
        ("python", "train.py"),
        ("model.a=1",),
    ]


def test_overlap_of_tensor_parallelism_goes_with_sequence_parallelism():
    """Megatron-LM asserts that `--tp-comm-overlap` has `--sequence-parallel` beside it."""
    words = ["--tp-comm-overlap", "--sequence-parallel", "--bf16"]
    rules = WordRules(groups=GROUPS)

    assert exchange_words(words, ["--sequence-parallel"], [], rules) == ["--bf16"]
    assert exchange_words(words, ["--sequence-parallel"], ["--sequence-parallel"], rules) == words


POLICY = "activation-checkpoint"


@pytest.mark.parametrize(
    ("words", "now", "then", "expected"),
    [
        (
            f"x.py --tp 2 {POLICY}:full",
            f"--tp 2 {POLICY}:full",
            f"--tp 4 --ep 2 {POLICY}:full",
            "--tp 4 --ep 2 {}:full",
        ),
        (
            f"x.py --tp 2 {POLICY}:full --debug",
            f"{POLICY}:full",
            f"--ep 2 {POLICY}:full",
            "--tp 2 --ep 2 {}:full --debug",
        ),
        (f"x.py --tp 2 {POLICY}:full --debug", f"{POLICY}:full", f"{POLICY}:none", "--tp 2 {}:none"),
        ("x.py --tp 2 --on", f"--on {POLICY}:selective", f"--on {POLICY}:full", "--tp 2 --on {}:full"),
        (f"x.py --on {POLICY}:full", f"--on {POLICY}:full", f"{POLICY}:full", "{}:full"),
    ],
    ids=["in place and before it", "its own flags stay", "another with its own", "the recipe's", "a switch before it"],
)
def test_a_subcommand_ends_the_command(words, now, then, expected):
    """What stands behind a subcommand is its own, and no flag of the program comes there."""
    found = exchange_words(words.split(), now.split(), then.split(), WordRules())

    assert " ".join(found) == f"x.py {expected.format(POLICY)}"
