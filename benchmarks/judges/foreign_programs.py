"""Rehearse training programs of other people, unmodified: does each run, what stood in, and in what memory and time?

    python -m benchmarks.judges.foreign_programs FOLDER [--only NAME ...] [--path FOLDER] [--json]

FOLDER holds checked-out repositories, each in a folder OWNER+NAME. Every program is the command of a study with
`backend: command`, and is rehearsed as rank 1 by the command line, in this Python environment. `--path` adds a folder
of packages that programs import. Data that a program wants are made where they are small: tokens, a configuration and a
tokenizer.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.timing import answer, benchmark_parser, publish

STUDY = """\
name: foreign
model: {model}
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 1024, global_batch_size: 8, precision: bf16}}
space: {{pp: [1], tp: [1], cp: [1]}}
trial:
  backend: command
  command: [{words}]
  directory: "{directory}"
  log: megatron
"""
RANK, RANKS = 1, 8
LIMIT_S = 600
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Program of a public repository.

    Attributes:
        repository: OWNER/NAME.
        folder: Working directory in it.
        packages: Folder in it with packages of its own that are not beside the program; None for none.
        words: Python file or `-m` with a module, and arguments; `{folder}` is the temporary folder with made files.
        prepare: What makes files before, from the working directory and the temporary folder.
        environment: Variables.
    """

    repository: str
    folder: str = "."
    packages: str | None = None
    words: Sequence[str]
    prepare: Callable[[Path, Path], None] = lambda _directory, _made: None
    environment: Mapping[str, str] = field(default_factory=dict)


def _tokens(path: Path, vocabulary: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        array.array("H", [7 * at % vocabulary for at in range(100_000)]).tofile(file)


def _nano_gpt(directory: Path, _: Path) -> None:
    for part in ("train", "val"):
        _tokens(directory / "data" / "openwebtext" / f"{part}.bin", 50_257)


def _text(_: Path, made: Path) -> None:
    (made / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1_000)


def _alpaca(_: Path, made: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - only this program needs them
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    rows = [{"instruction": f"say {number}", "input": "", "output": "a number " * 40} for number in range(256)]
    (made / "data.json").write_text(json.dumps(rows))
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    (made / "fsdp.json").write_text(json.dumps(sharding))
    symbols = ["<unk>", "<s>", "</s>", "<pad>", *map(chr, range(33, 127))]
    vocabulary = {symbol: at for at, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=symbols[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own).save_pretrained(made / "model")
    (made / "model" / "config.json").write_text(json.dumps(LLAMA))


def _stories(directory: Path, made: Path) -> None:
    _alpaca(directory, made)
    stories = directory / "roneneldan" / "TinyStories" / "train.jsonl"  # a folder goes before a data set of the hub
    stories.parent.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"text": "once upon a time there was a fox. " * 400}) + "\n"
    stories.write_text(row * 64)


EXAMPLES = "pytorch/examples"
ALPACA = (
    *("train.py", "--model_name_or_path", "{folder}/model", "--data_path", "{folder}/data.json", "--bf16", "True"),
    *("--output_dir", "out", "--num_train_epochs", "3", "--per_device_train_batch_size", "4", "--save_strategy", "no"),
    *("--gradient_accumulation_steps", "8", "--learning_rate", "2e-5", "--report_to", "none"),
    *("--fsdp", "full_shard auto_wrap", "--fsdp_config", "{folder}/fsdp.json"),
)
PROGRAMS = {
    "nanoGPT": Foreign(repository="karpathy/nanoGPT", words=("train.py",), prepare=_nano_gpt),
    "ddp-tutorial": Foreign(
        repository=EXAMPLES, folder="distributed/ddp-tutorial-series", words=("multigpu_torchrun.py", "5", "5")
    ),
    "minGPT-ddp": Foreign(
        repository=EXAMPLES,
        folder="distributed/minGPT-ddp/mingpt",
        words=("main.py", "data_config.path={folder}/input.txt"),
        prepare=_text,
    ),
    "FSDP2": Foreign(
        repository=EXAMPLES,
        folder="distributed/FSDP2",
        words=("example.py", "--mixed-precision", "--explicit-prefetching"),
    ),
    "tensor_parallel": Foreign(
        repository=EXAMPLES, folder="distributed/tensor_parallelism", words=("tensor_parallel_example.py",)
    ),
    "sequence_parallel": Foreign(
        repository=EXAMPLES, folder="distributed/tensor_parallelism", words=("sequence_parallel_example.py",)
    ),
    "fsdp_tp": Foreign(repository=EXAMPLES, folder="distributed/tensor_parallelism", words=("fsdp_tp_example.py",)),
    "T5_training": Foreign(repository=EXAMPLES, folder="distributed/FSDP", words=("T5_training.py",)),
    "llm.c": Foreign(
        repository="karpathy/llm.c",
        words=("train_gpt2.py", "--model", "d12", "--write_tensors", "0", "--dtype", "bfloat16"),
    ),
    "stanford_alpaca": Foreign(repository="tatsu-lab/stanford_alpaca", words=ALPACA, prepare=_alpaca),
    "nd_parallel": Foreign(
        repository="huggingface/accelerate",
        folder="examples/torch_native_parallelism",
        words=("nd_parallel.py", "--model-name", "{folder}/model", "--dp-shard-size", "4", "--tp-size", "2"),
        prepare=_stories,
    ),
    "fms-fsdp": Foreign(
        repository="foundation-model-stack/fms-fsdp",
        words=("main_training_llama.py", "--use_dummy_dataset=True", "--model_variant=llama3_194m_4k"),
    ),
    "nanotron": Foreign(
        repository="huggingface/nanotron",
        packages="src",
        words=("run_train.py", "--config-file", "examples/config_tiny_llama.yaml"),
    ),
    "modded-nanogpt": Foreign(repository="KellerJordan/modded-nanogpt", words=("train_gpt.py",)),
    "torchtune": Foreign(
        repository="pytorch/torchtune",
        packages=".",
        words=("recipes/full_finetune_distributed.py", "--config", "recipes/configs/llama3_2/1B_full.yaml"),
    ),
    "litgpt": Foreign(
        repository="Lightning-AI/litgpt",
        words=(
            *("-m", "litgpt", "pretrain", "--config", "config_hub/pretrain/debug.yaml"),
            *("--tokenizer_dir", "{folder}/model"),
        ),
        prepare=_alpaca,
    ),
    "llama-cookbook": Foreign(
        repository="meta-llama/llama-cookbook",
        packages="src",
        words=(
            *("getting-started/finetuning/finetuning.py", "--enable_fsdp", "--model_name", "{folder}/model"),
            *("--dataset", "alpaca_dataset", "--data_path", "{folder}/data.json", "--batching_strategy", "padding"),
            *("--batch_size_training", "4", "--pure_bf16", "--run_validation", "False", "--save_model", "False"),
        ),
        prepare=_alpaca,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each program and return the exit status."""
    parser = benchmark_parser("judges.foreign_programs", __doc__)
    parser.add_argument("folder", type=Path, help="folder with the repositories, each in OWNER+NAME")
    parser.add_argument("--only", nargs="+", choices=sorted(PROGRAMS), default=sorted(PROGRAMS), help="programs to run")
    parser.add_argument("--path", default="", help="folder of packages that programs import")
    return answer("foreign_programs", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Rehearse the programs."""
    return {"rows": [row_of(name, PROGRAMS[name], given.folder.resolve(), given.path) for name in given.only]}


def show(figures: dict[str, Any]) -> None:
    """Print all rows."""
    publish(figures["rows"], as_json=False)


def row_of(name: str, program: Foreign, folder: Path, path: str) -> dict[str, Any]:
    """Return what a rehearsal says of a program."""
    directory = folder / program.repository.replace("/", "+") / program.folder
    if not directory.is_dir():
        return {"program": name, "verdict": "no such folder", "told": str(directory)}
    with tempfile.TemporaryDirectory() as made:
        program.prepare(directory, Path(made))
        words = [sys.executable, *(word.replace("{folder}", made) for word in program.words)]
        study = Path(made) / "study.yaml"
        shown = ", ".join(json.dumps(word) for word in words)
        study.write_text(STUDY.format(model="llama-7b", words=shown, directory=directory))
        own = None if program.packages is None else str(directory / program.packages)
        searched = os.pathsep.join(filter(None, (own, path, os.environ.get("PYTHONPATH"))))
        command = "from tuner.cli.main import main; main()"
        options = ("--yes", "--json", "--config", f"dp={RANKS},mbs=1", "--ranks", str(RANK), "--limit", str(LIMIT_S))
        began_s = time.monotonic()
        done = subprocess.run(
            (sys.executable, "-c", command, "rehearse", str(study), *options),
            env=os.environ | {"PYTHONPATH": searched} | dict(program.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        return {"program": name, **_figures(done), "wall_s": round(time.monotonic() - began_s, 1)}


def _figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the verdict, the peak, the CPU time of a step, and stand-ins for values; or the error of the command."""
    if not done.stdout.startswith("{"):
        return {"verdict": "not run", "told": done.stderr.strip().splitlines()[-1][:200]}
    (found,) = json.loads(done.stdout)["ranks"]
    peak = found["peak_bytes"]
    return {
        "verdict": found["verdict"],
        "parameters": found["parameters"],
        "peak_gib": None if peak is None else round(peak / 2**30, 3),
        "step_cpu_s": None if found["cpu_s"] is None else round(found["cpu_s"], 2),
        "invented": len(found["invented"]),
        "told": (found["error"] or "").splitlines()[0][:160] if found["error"] else "",
    }


if __name__ == "__main__":
    sys.exit(main())
