import pytest

from hardware.io.config_file import parse_yaml, read_mapping
from hardware.io.errors import ConfigError
from tests.support.settings.placements import PLACEMENTS
from tuner.place.placement_file import read_placement
from tuner.place.workload import EMBEDDINGS, WEIGHTS

FILE = """
cluster: {name: dgx-h100, hosts: 1}
modules:
  rollout: {job: generate, model: llama3-8b, prompts: 8, prompt_tokens: 128, response_tokens: 128}
  actor: {job: train, model: llama3-8b, sequence_length: 256, global_batch_size: 8}
  logprobs: {job: infer, shares: actor, sequence_length: 256, global_batch_size: 8}
flow:
  - {source: rollout, target: logprobs, sends: tokens}
  - {source: logprobs, target: actor, sends: logprobs}
  - {source: actor, target: rollout, sends: weights}
"""


READY = sorted(path for path in PLACEMENTS.glob("*.yaml") if "modules" in read_mapping(path))


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_files_are_read(path):
    """Each ready file is a workload whose name and devices are those of its name."""
    workload = read_placement(path)

    assert workload.name == path.stem
    assert path.stem.endswith(f"-{workload.cluster.num_devices}")


def test_modules_share_and_form_gangs():
    """Modules that share are one unit, and those that send embeddings one gang."""
    rl, vlm = (read_placement(PLACEMENTS / f"{name}.yaml") for name in ("grpo-32b-64", "vlm-7b-32"))
    names = [module.name for module in rl.modules]

    assert rl.unit_of[names.index("old_logprobs")] == names.index("actor")
    assert all(len(gang) == 1 for gang in rl.gangs())
    assert [len(gang) for gang in vlm.gangs()] == [3]
    assert {edge.sends for edge in vlm.edges} == {EMBEDDINGS}
    assert [rl.waits_for(edge) for edge in rl.edges if edge.sends == WEIGHTS] == [False]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("job: train", "job: trains", "modules.actor.job"),
        ("shares: actor", "shares: acter", "did you mean 'actor'"),
        ("shares: actor", "shares: rollout", "layout of its own"),
        ("prompts: 8, ", "", "modules.rollout.prompts: is required of a module that does generate"),
        ("prompts: 8", "prompts: 8, sequence_length: 9", "has no meaning for a module that does generate"),
        ("response_tokens: 128", "response_tokens: 128, longest_response_tokens: 64", "at least 128"),
        ("target: rollout, sends: weights", "target: rolout, sends: weights", "flow.2.target = 'rolout'"),
        ("source: actor, target: rollout", "source: logprobs, target: rollout", "weights travel from a module"),
        ("{job: train, model: llama3-8b", "{job: train, model: llama-7b", "which is another model"),
        ("{job: train, model: llama3-8b", "{job: train, model: llama9-8b", "no such model|neither a model"),
        ("sends: logprobs}", "sends: logprobs}\n  - {source: actor, target: rollout, sends: scores}", "wait for each"),
        ("hosts: 1}", "hosts: 1}\ntogether: [[actor, critic]]", "together = 'critic'"),
        ("hosts: 1}", "host: 1}", "did you mean 'hosts'"),
        ("model: llama3-8b, prompts", "precision: fp8, model: llama3-8b, prompt", "unknown key"),
    ],
)
def test_a_mistake_is_named(tmp_path, old, new, message):
    """A wrong value is one ConfigError with its file, its key and what would be valid."""
    assert old in FILE
    path = tmp_path / "placement.yaml"
    path.write_text(FILE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as found:
        read_placement(path)

    assert found.value.file == str(path)


def test_the_file_of_these_tests_is_right(tmp_path):
    """Without a change the file is read, so that each refusal above is for its change."""
    path = tmp_path / "placement.yaml"
    path.write_text(FILE, encoding="utf-8")

    assert len(read_placement(path).modules) == len(parse_yaml(FILE)["modules"])
