import json
import re
import shlex
import shutil

import pytest

from tests.support.studies.launch_scripts import ARRAYS, DEEPSPEED, GPT_NEOX, NANOTRON, TORCHTITAN, TORCHTITAN_SCRIPT
from tests.support.studies.planted_secrets import FLAGS, KEPT, KEPT_FLAGS, VARIABLES, WORDS
from tests.support.studies.training_logs import LOG
from tuner.study_file.config import load_study

EXPORTS = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in {**VARIABLES, **KEPT}.items())
WORDS_OF_COMMAND = shlex.join([word for pair in {**FLAGS, **KEPT_FLAGS}.items() for word in pair] + list(WORDS))
NAMES = ",".join([*FLAGS, *KEPT_FLAGS, "--x-api-key", "--db"])
OF_SESSION = {"HOME": "/tmp/canary", "PS1": "canary", "SSH_AUTH_SOCK": "/tmp/canary", "MESHTUNE_STORAGE": "canary.db"}  # noqa: S108 # words only
H100 = ("--cluster", "dgx-h100", "--ignore-flags", NAMES)


def planted(script, program):
    """Plants everything in a script, before its launch line and behind the name of its program."""
    head, _, rest = script.partition("\n")
    session = "".join(f"export {name}={value}\n" for name, value in OF_SESSION.items())
    slurm = "#SBATCH --nodes=4\n#SBATCH --export=ALL,MY_TOKEN=CanaryS1x7\n"
    return f"{head}\n{slurm}{EXPORTS}{session}" + rest.replace(program, f"{program} {WORDS_OF_COMMAND} ")


def assert_silent(done, folder):
    """Nothing that was printed or written holds a planted secret."""
    written = [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")]
    assert done.status == 0, done.err
    assert re.findall(r"(?i).*canary.*", "\n".join((done.out, done.err, *written))) == []
    return "\n".join(written)


SCRIPTS = {
    "megatron": planted(ARRAYS, "pretrain_gpt.py"),
    "torchtitan": planted(f"#!/bin/bash\n{TORCHTITAN_SCRIPT}", "torchtitan.train"),
}
WAYS = [(framework, way) for framework in SCRIPTS for way in ("read", "captured")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to run scripts with")
@pytest.mark.parametrize(("framework", "way"), WAYS)
def test_no_secret_of_a_script_is_copied(meshtune, tmp_path, monkeypatch, framework, way):
    """None of the planted values is in a written file or in what is printed: the command and its environment refer to
    variables in their place, which the output names. What only looks like a secret is there.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPTS[framework], encoding="utf-8")
    source = ("--capture", "--yes") if way == "captured" else (f"--from-{framework}", "train.sh")
    behind = ("--", "bash", "train.sh") if way == "captured" else ()

    text = assert_silent(done := meshtune("init", *source, *H100, "--json", *behind), tmp_path)

    backend = load_study(tmp_path / "study.yaml").backend
    environment = dict(backend.environment)
    assert environment.items() >= KEPT.items()
    assert {name: environment[name] for name in VARIABLES} == {name: f"{{env:{name}}}" for name in VARIABLES}
    assert not environment.keys() & OF_SESSION.keys()
    words = list(backend.arguments)
    for flag, value in KEPT_FLAGS.items():
        assert words[words.index(flag) + 1] == value
    for flag in FLAGS:
        name = flag.strip("-").replace("-", "_").upper()
        # a script's own variable of that name has another value
        assert words[words.index(flag) + 1] == f"{{env:{name}{'_2' if name in VARIABLES else ''}}}"
    assert {"--x-api-key={env:X_API_KEY}", "--db={env:DB}", "+logger.wandb.api_key={env:API_KEY}"} <= set(words)
    assert "--export=ALL,MY_TOKEN" in text
    wanted = {*VARIABLES, "WANDB_API_KEY_2", "HUB_TOKEN", "X_API_KEY", "API_KEY", "MY_TOKEN"}
    assert wanted <= set(done.json["variables"])
    assert done.json["holds_secret"] is False
