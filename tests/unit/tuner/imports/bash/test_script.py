import shutil
import subprocess
from random import Random

import pytest

from tuner.imports.bash.script import read_script

SHELL = shutil.which("bash")

# each ends in one command, whose words bash itself prints for comparison
AGREED = {
    "words": "run --a 1 'b c' \"d  e\" f\\ g",
    "comments": "run --a 1 # --b 2\n# run --c\n",
    "continued lines": "run --a \\\n  1 \\\n  --b 2",
    "variables": 'TP=8\nA=$TP B="${TP}x" run $TP "$TP" ${TP}_2 \'$TP\' $TP$TP',
    "defaults": "run ${TP:-4} ${PP-2} ${CP:-} end",
    "defaults of set and empty variables": 'A=1; E=; run ${A:-2} ${E:-3} "${E-4}" end',
    "nested defaults": 'A=7; run ${B:-${A}} ${C:-"x y"} "${D:-$A z}"',
    "arithmetic": "A=3\nB=$((A*4 + 2))\nrun $((B)) $(( ($A+1) * 2 )) $((7/2)) $((7%4)) $((${A}-1))",
    "arrays": 'A=(\n --a 1 # --no\n # --no 2\n --b \'x y\'\n)\nA+=(--c)\nrun ${A[@]} "${A[@]}" x"${A[@]}"y',
    "arrays without elements": 'E=()\nrun ${E[@]} "${E[@]}" end',
    "elements of several words": 'A=("--a 1" "--b 2")\nrun ${A[@]}',
    "strings of several lines": 'S="\n  --a 1 \\\n  --b 2\n"\nS="$S --c \'3\'"\nrun $S --d',
    "words around split values": "S=' a b '\nrun x$S y$S'z' $S$S",
    "unquoted defaults split": "run ${A:-x y} z${B:-1 2}",
    "here-documents and redirections": "cat > /dev/null <<END\nrun --no $X\nEND\nrun --a 2>&1 1>&2 --b",
    "shell in a command": 'ARGS="--a 1"\neval "run $ARGS --b"',
    "shell in a text": 'export -f run\nA="--a 1"\nbash -c "run $A --b 2>&1 | cat"',
    "arguments": 'set -- a "b c" d\nrun $1 "$2" ${3:-x} ${4:-y} $5 "$@" $#',
    "shifted arguments": 'set -- a "b c" d\nshift\nrun $1 "$@"',
    "a command in a variable": 'cmd="run --a 1"\n$cmd --b',
    "exports": "export A=1 B='x y'\nexport A\nrun $A \"$B\"",
}


@pytest.mark.skipif(SHELL is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("text", AGREED.values(), ids=AGREED)
def test_words_are_those_of_bash(text):
    """Of every form that launch scripts have, the words are those that bash itself hands to the command."""
    program = f"run() {{ printf '%s\\0' \"$@\"; }}\n{text}\n"
    done = subprocess.run([SHELL, "-c", program], env={}, capture_output=True, text=True, check=True)

    command = next(one for one in read_script(text).commands if any(word.text == "run" for word in one.words))

    words = command.words[[word.text for word in command.words].index("run") + 1 :]
    assert [word.text for word in words] == done.stdout.split("\0")[:-1]
    assert not any(word.unknown for word in words)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run --a $1", "$1 on line 1 is given when the script is started"),
        ("run --a \\\n $DATA", "$DATA on line 2 is not set in the script"),
        ("\nA=$(nproc)\nrun --a $A", "$(nproc) on line 2 can be evaluated only by a shell"),
        ("A=`nproc`\nrun --a $A", "`nproc` on line 1 can be evaluated only by a shell"),
        ("A=1\nunset A\nrun --a $A", "$A is set by a command on line 2"),
        ("A=1\nprintf -v A %s 2\nrun --a $A", "$A is set by a command on line 2"),
        ("set -- 8\nf() {\nrun --a $1\n}\nf 2", "$1 on line 3 is given when the script is started"),
        ("A=1\n[ $B = 2 ] && A=2\nrun --a $A", "$A is set on line 2 under a condition"),
        ("A=1\n. ./more.sh\nrun --a $A", "$A may be set by `source ./more.sh` on line 2, which is not read"),
        ('A=1\neval "A=2"\nrun --a $A', "$A may be set by `eval` on line 2, which is not read"),
        ("run --a ${A:+2}", "${A:+2} on line 1 can be evaluated only by a shell"),
        ("run --a $((N * 2))", "$((N * 2)) on line 1 can be evaluated only by a shell"),
        ("A=1\nrun --a $((A / 0))", "$((A / 0)) on line 2 can be evaluated only by a shell"),
        ("run --a ${A%.*}", "${A%.*} on line 1 can be evaluated only by a shell"),
        ("if [ -f x ]; then\nA=1\nfi\nrun --a $A", "$A is set on line 2 under a condition"),
        ("for A in 1 2; do\nrun --a $A\ndone", "$A is set by the loop on line 1"),
        ("f() {\n A=1\n}\nf\nrun --a $A", "$A is set on line 2 under a condition, in a loop or in a function"),
        ("case $X in\n a) A=1 ;;\nesac\nrun --a $A", "$A is set on line 2 under a condition"),
    ],
    ids=lambda value: value.replace("\n", "; ") if value.startswith("$") else "",
)
def test_what_only_a_run_could_tell_stays_unknown(text, reason):
    """A value that a script gets from elsewhere has no text, but the line and the reason."""
    command = next(one for one in read_script(text).commands if one.words[0].text == "run")

    assert command.words[2].unknown.startswith(reason)


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        ("--gpus-per-node=4", "$SLURM_GPUS_PER_NODE ${SLURM_GPUS_ON_NODE:-8}", ["4", "4"]),
        ("--gpus-per-node=h100:4", "$SLURM_GPUS_PER_NODE $SLURM_GPUS_ON_NODE", ["h100:4", "4"]),
        ("--gres=gpu:a100:8", "$SLURM_GPUS_ON_NODE", ["8"]),
        ("-N 2 -n16", "$SLURM_NNODES $SLURM_JOB_NUM_NODES $((SLURM_NTASKS)) $SLURM_NPROCS", ["2", "2", "16", "16"]),
        ("--nodes=4 --ntasks-per-node=8", "$SLURM_NTASKS_PER_NODE $SLURM_NTASKS", ["8", "32"]),
        ("--nodes=4 --ntasks-per-node=8", "$SLURM_TASKS_PER_NODE", ["8(x4)"]),
        ("--nodes=2 --gpus-per-node=4", "$((SLURM_NNODES * SLURM_GPUS_PER_NODE))", ["8"]),
        (
            "-c 12 -J train -p gpu -A us",
            "$SLURM_CPUS_PER_TASK $SLURM_JOB_NAME $SLURM_JOB_PARTITION",
            ["12", "train", "gpu"],
        ),
    ],
)
def test_variables_of_slurm_follow_from_the_header(header, line, words):
    """What Slurm sets from the script's own options is known, as if the script set it."""
    script = read_script(f"#!/bin/bash\n#SBATCH {header} # as ever\nsource ./more.sh\nrun {line}\n")

    command = next(one for one in script.commands if one.words[0].text == "run")
    assert [word.text for word in command.words[1:]] == words
    assert not any(word.unknown for word in command.words)
    assert not script.defaulted


@pytest.mark.parametrize(
    ("header", "variable"),
    [
        ("--nodes=2-4", "SLURM_NNODES"),
        ("--gres=gpu:8", "SLURM_GPUS_PER_NODE"),
        ("--nodes=2", "SLURM_JOB_ID"),
        ("--nodes=2", "SLURM_NODEID"),
        ("--nodes=2", "SLURM_NTASKS_PER_NODE"),
        ("-p gpu,big", "SLURM_JOB_PARTITION"),
        ("--nodes=2\n#SBATCH hetjob\n#SBATCH --nodes=3", "SLURM_NNODES"),
    ],
)
def test_what_the_header_leaves_to_slurm_stays_unknown(header, variable):
    """A variable whose option is not given, or that a run alone decides, has no value."""
    command = read_script(f"#!/bin/bash\n#SBATCH {header}\nrun ${variable}\n").commands[0]

    assert command.words[1].unknown.startswith(f"${variable} on line")


def test_an_assignment_replaces_slurms_value():
    """A script that sets such a variable itself is taken at its word."""
    command = read_script("#SBATCH --nodes=2\nSLURM_NNODES=3\nrun $SLURM_NNODES\n").commands[0]

    assert command.words[1].text == "3"


def test_nothing_is_run(tmp_path):
    """Commands of a script, in whatever form they stand there, leave no trace."""
    made = tmp_path / "made"
    text = "\n".join(
        f"{form}\n" for form in (f"touch {made}", f"A=$(touch {made})", f"B=`touch {made}`", f"[ $(touch {made}) ]")
    )

    script = read_script(text + "run $A $B")

    assert not made.exists()
    assert all(word.unknown for word in script.commands[-1].words[1:])


def random_script(rng):
    """A script of simple assignments to scalars A and B and arrays C and D, some of which may not run."""

    def value():
        name = rng.choice("ABCD")
        forms = (
            *(str(rng.randrange(9)), f"${name}", f'"${name}"', "'x y'", '"p  q"', f"a${name}", f"${{{name}}}_z"),
            *(f"${{{rng.choice('AB')}:-u v}}", f"$(({rng.randrange(9)}*$A))", "--f", "${C[@]}", '"${D[@]}"'),
        )
        return rng.choice(forms)

    def statement(depth=0):
        scalar, array = rng.choice("AB"), rng.choice("CD")
        words = " ".join(value() for _ in range(rng.randrange(4)))
        forms = (
            *(f"{scalar}={value()}", f'{scalar}="${scalar} --g 1"', f"{array}=({words})", f"{array}+=({words})"),
            *(f'[ "$A" = 2 ] && {scalar}=7', f"f() {{\n{scalar}=9\n}}\nf", f"for {scalar} in 1 2; do :; done"),
        )
        inner = f'if [ "$B" = 1 ]; then\n{statement(1)}\nelse\n{statement(1)}\nfi' if not depth else "A=3"
        return rng.choice((*forms, inner))

    lines = [statement() for _ in range(rng.randrange(2, 7))]
    return "\n".join((*lines, "run " + " ".join(value() for _ in range(rng.randrange(1, 6)))))


@pytest.mark.skipif(SHELL is None, reason="there is no bash to compare with")
def test_known_words_of_random_scripts_are_those_of_bash():
    """Whatever simple script is read: if all words of its command are known, bash hands it the same ones."""
    rng, compared = Random(0), 0  # noqa: S311 # draws scripts, guards nothing
    for text in (random_script(rng) for _ in range(600)):
        command = next(one for one in read_script(text).commands if one.words[0].text == "run")
        if any(word.unknown for word in command.words):
            continue
        program = f"run() {{ printf '<%s>' \"$@\"; }}\n{text}\n"
        done = subprocess.run([SHELL, "-c", program], env={}, capture_output=True, text=True, check=False)
        read = "".join(f"<{word.text}>" for word in command.words[1:]) or "<>"  # printf prints its format once
        compared += not done.stderr
        assert read == done.stdout or done.stderr, text

    assert compared > 50


BROKEN = ("'", '"', "${", "$((", "$(", "`", "A=(", "if", "fi", "then", "}", "((", "<<", "${${${", "\\", "\x00")


@pytest.mark.parametrize("text", [*BROKEN, "a=$((9" + "9" * 5000 + "))"], ids=lambda text: repr(text[:9]))
def test_broken_scripts_are_read_to_their_end(text):
    """A script that bash would refuse is read without an error of ours, also at the end of another."""
    read_script(text)
    read_script(f"A=1\nrun --a $A {text}")


def test_a_variable_that_doubles_itself_is_given_up():
    """A script whose variable would have 2 to the power of 60 words is read at once."""
    text = "A='x y'\n" + 'A="$A $A"\n' * 60 + "run $A"

    command = read_script(text).commands[-1]

    assert "is too long" in command.words[-1].unknown


def test_variables_before_a_command_are_its_own():
    """What is set before one command is no variable of another, and its own value changes nothing behind it."""
    text = 'N=8\nif [ -n "$DRY" ]; then\nN="$N" A=1 dry $N\nelse\nA=2 B=x$N run $N\nfi\nlast $N'
    found = {command.words[0].text: command for command in read_script(text).commands}

    assert {name: {key: word.text for key, word in found[name].own} for name in ("dry", "run", "last")} == {
        "dry": {"N": "8", "A": "1"},
        "run": {"A": "2", "B": "x8"},
        "last": {},
    }
    assert (found["last"].words[1].text, found["last"].words[1].unknown) == ("8", "")
    assert read_script(text).exported == ()
