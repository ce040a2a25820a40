import pytest

from docs.site.json_keys import JSON_KEYS
from tests.support.studies.command_line import COMMANDS, ROOT
from tests.support.studies.launch_scripts import ARRAYS

CONFIG = "pp=2,tp=2,dp=2"
PLACEMENT = ROOT / "configs" / "placements" / "ppo-7b-16.yaml"
OPERATORS = ROOT / "configs" / "placements" / "operators-4.yaml"
SMALL = ROOT / "configs" / "studies" / "cpu-gpt.yaml"


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("line", "when"),
    [
        ("run FINISHED", ""),
        ("init --from-megatron train.sh --cluster dgx-h100 --out new.yaml", ""),
        ("space STUDY", ""),
        ("space STUDY --list", "with `--list`, also"),
        (f"space STUDY --why {CONFIG}", "with `--why`, also"),
        (f"predict STUDY --config {CONFIG}", ""),
        (f"predict STUDY --config {CONFIG} --plan", "with `--plan`, or a planner, also"),
        (f"simulate STUDY --config {CONFIG}", ""),
        (f"simulate STUDY --config {CONFIG} --trace step.json", "with `--trace`, also"),
        ("rank STUDY", ""),
        ("rank STUDY --hosts 1,2", "with `--hosts` instead"),
        ("plan STUDY --config dp=4,tp=2 --layers 1 --planner recursive", ""),
        ("plan STUDY --config dp=4,tp=2 --layers 1 --planner recursive --export jax", "with `--export`, also"),
        ("plan STUDY --config dp=4,tp=2 --layers 1 --planner recursive --explain colours", "with `--explain`, also"),
        (f"place {PLACEMENT} --time-limit 2", ""),
        (f"place {PLACEMENT} --time-limit 2 --export verl", "with `--export`, also"),
        (f"place {OPERATORS} --time-limit 2", "for operators instead"),
        (f"replan {SMALL} --trace network.csv", ""),
        (f"replan {SMALL} --trace network.csv --robust mean", "with `--robust` instead"),
        (f"watch {SMALL} --hosts-from network.csv --once", ""),
        ("status FINISHED", ""),
        (f"trial STUDY --config {CONFIG} --dry-run", "with `--dry-run`"),
        (f"trial STUDY --config {CONFIG} --once", "with `--once`"),
        ("catalog models", ""),
        ("catalog models llama3-8b", ""),
        ("trials FINISHED", ""),
        ("best FINISHED", ""),
        ("estimate FINISHED --tokens 1e12", ""),
        ("report FINISHED", ""),
        ("export FINISHED --to megatron", ""),
        ("export FINISHED --to megatron --out flags.sh", "with `--out`, also"),
    ],
    ids=lambda text: text.split("/")[-1].replace(" ", "_"),
)
def test_json_has_the_documented_keys(meshtune, simulated, finished, tmp_path, line, when):
    """A command prints the keys that docs/commands.md names, and no others."""
    scene = {"FINISHED": [finished[0], "--storage", finished[1]], "STUDY": [simulated]}
    (tmp_path / "train.sh").write_text(ARRAYS, encoding="utf-8")
    (tmp_path / "network.csv").write_text("time_s,link,share\n0,intra,0.5\n", encoding="utf-8")
    command, *words = line.split()
    told = meshtune(command, *(part for word in words for part in scene.get(word, [word])), "--json")

    assert told.status == 0, told.err
    documented = JSON_KEYS[command]
    also = documented[""] if when.endswith("also") else {}
    assert told.json.keys() == (also | documented[when]).keys()


def test_every_command_has_its_keys_documented():
    """No command prints JSON that nothing tells of."""
    assert set(JSON_KEYS) == set(COMMANDS)
