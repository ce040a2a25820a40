import re
import shlex
import shutil
import subprocess
import sys

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
    monkeypatch.setenv("LANG", "C.UTF-8")
    for name in ("LC_ALL", "LC_CTYPE"):  # a stand-in's Python sets the latter, because the script sets LANG
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.sh").write_text(SCRIPTS[framework], encoding="utf-8")
    source = ("--capture", "--yes") if way == "captured" else (f"--from-{framework}", "train.sh")
    behind = ("--", "bash", "train.sh") if way == "captured" else ()

    text = assert_silent(done := meshtune("init", *source, *H100, "--json", *behind), tmp_path)
    assert done.status == 0, done.err

    backend = load_study(tmp_path / "study.yaml").trials.backend
    environment = dict(backend.environment)
    assert environment.items() >= KEPT.items()
    assert {name: environment[name] for name in VARIABLES} == {name: f"{{env:{name}}}" for name in VARIABLES}
    assert not environment.keys() & {*OF_SESSION, "LC_CTYPE"}
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


S = "CanaryX1x7"
URL = f"https://user:{S}@host/x"
ARGUMENTS = "".join(
    f"  {name} {'.' * 30} {value}\n" for name, value in (("wandb_api_key", S), ("hub_token", S), ("my_url", URL))
)
FILES = {
    "log": f"export WANDB_API_KEY={S}\n" + LOG.replace("\n", f"\n{ARGUMENTS}", 1),
    "torchtitan": f'{TORCHTITAN}[metrics]\nwandb_token = "{S}"\n[job]\nhub_token = "{S}"\nconfig_file = "{URL}"\n',
    "deepspeed": DEEPSPEED.replace('"bf16"', f'"wandb": {{"api_key": "{S}", "host": "{URL}"}}, "bf16"'),
    "nanotron": f'{NANOTRON}general: {{token: {S}}}\nlogging: {{hub_token: {S}, url: "{URL}"}}\n',
    "gpt-neox": GPT_NEOX.replace('"num_nodes"', f'"wandb_api_key": "{S}", "wandb_host": "{URL}", "num_nodes"'),
    # what is not followed: a branch, another program, output of commands
    "megatron": ARRAYS.replace(
        "GPUS=8",
        f'GPUS=8\nif on; then MORE="--hub-token {S}"; fi\npython prepare.py --hub-token {S}\nwandb login {S}\n'
        f"source <(vault read --token {S} path)\nexport OF_VAULT=$(vault read --token {S})\ncd $(git clone {URL})\n",
    ).replace("pretrain_gpt.py", f"pretrain_gpt.py --x $(curl -H 'Authorization: Bearer {S}012345' host) $MORE"),
}
OF_FILE = {
    "deepspeed": ("--model", "llama-7b", "--hosts", "2", "--sequence-length", "4096"),
    "torchtitan": ("--hosts", "2"),
}


@pytest.mark.parametrize("framework", FILES)
def test_no_secret_of_a_file_is_copied(meshtune, tmp_path, monkeypatch, framework):
    """Settings of logs and files leave no secret, nor does a refusal that asks for what a script leaves open."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(FILES[framework], encoding="utf-8")

    done = meshtune("init", f"--from-{framework}", "file", "--cluster", "dgx-h100", *OF_FILE.get(framework, ()))

    assert_silent(done, tmp_path)
    assert done.status == (2 if framework == "megatron" else 0)


def test_a_file_that_shows_a_secret_is_its_users_alone(meshtune, tmp_path, monkeypatch):
    """An option of sbatch takes no variable: its secret stays, the file has the mode 0600, and the output says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.sh").write_text(f"#SBATCH --nodes=4\n{ARRAYS}", encoding="utf-8")
    (tmp_path / "shown.sh").write_text(f"#SBATCH --nodes=4 --comment={URL}\n{ARRAYS}", encoding="utf-8")

    modes = {}
    for name in ("open", "shown"):
        done = meshtune("init", "--from-megatron", f"{name}.sh", "--cluster", "dgx-h100", "--out", f"{name}.yaml")
        modes[name] = (tmp_path / f"{name}.yaml").stat().st_mode & 0o777
        assert ("mode 0600" in done.out) == (name == "shown")
        assert "set them before `meshtune run`: WANDB_API_KEY\n" in done.out

    assert modes["shown"] == 0o600
    assert modes["open"] != 0o600


def test_the_words_behind_the_dashes_show_no_secret(meshtune):
    """The command that a refusal repeats, and the one that a capture announces, hide the secrets of their words."""
    for arguments in (("--capture", "--", "bash", "t.sh"), ("--from-deepspeed", "x.json", "--")):
        done = meshtune("init", *arguments, "--hub-token", S, f"WANDB_API_KEY={S}", URL)
        assert done.status == 2
        assert S not in done.out + done.err
        assert "--hub-token" in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc to read command lines from")
def test_the_words_behind_the_dashes_are_in_no_command_line():
    """A capture's own process does not show the secrets of the script's words, and still hands them to the script."""
    code = (
        "import sys, tuner.cli.init\n"
        "def told(words, **_):\n"
        "    line = open('/proc/self/cmdline').read()\n"
        f"    print([{S!r} in str(place) for place in (words, line)])\n"
        "    raise SystemExit(3)\n"
        "tuner.cli.init.captured_import = told\n"
        "import tuner.cli.main\n"
        "sys.argv[0] = 'meshtune'\n"
        "tuner.cli.main.main()\n"
    ).replace(repr(S), "'-'.join(['canary', 'x7'])")
    given = ["init", "--capture", "--force", "--", "bash", "t.sh", "--hub-token", "canary-x7"]

    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (3, "[True, False]\n"), done.stderr
