"""A small Llama that transformers' Trainer trains: as a plan of Meshtune says, or in transformers' own ways."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from tuner import for_trainer, load_plan

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
VOCABULARY, ROWS, LENGTH = 8192, 8, 32


def model_of():
    """Make the model; all ranks draw the same weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **SIZES), dtype="float32").train()


def sample():
    """Make a batch of all ranks as Trainer passes it on, with the number of labels that count."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(1.0)}


def loss_of(model, batch):
    """Return the loss of a batch."""
    return model(**batch).loss


def step():
    """Return model, inputs and loss: the factory that the study names."""
    return model_of(), (sample(),), loss_of


def trained_as(way, plan, folder):
    """Return the model as Trainer is to train it, which wraps one that is not sharded in DDP."""
    if way == "fsdp":
        if distributed.get_rank() == 0:
            model_of().save_pretrained(folder)
        distributed.barrier()
        sizes = DistributedConfig(fsdp_size=distributed.get_world_size())
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes).train()
    model = model_of()
    return model if way == "ddp" else for_trainer(plan.parallelize(model, sample(), loss=loss_of))


class StepTimes(TrainerCallback):
    """Prints the time of each step, which the study reads."""

    def on_step_begin(self, *_, **__):
        """Note the time."""
        self.begun_s = time.perf_counter()

    def on_step_end(self, _, state, *__, **___):
        """Print how long the step took."""
        if state.is_world_process_zero:
            print(f"step {state.global_step} took {time.perf_counter() - self.begun_s:.6f} s", flush=True)


def main():
    """Train some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="file of a plan; without it, Trainer trains with DDP")
    parser.add_argument("--own-way", action="store_true", help="train with DDP or FSDP where the plan says the same")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    distributed.init_process_group("gloo")
    plan = load_plan(given.plan) if given.plan else None
    way = "ddp" if plan is None else plan.own_way if given.own_way else None
    drawn = torch.Generator().manual_seed(1)
    examples = torch.randint(0, VOCABULARY, (ROWS * given.steps, LENGTH), generator=drawn)
    here = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(here)
    arguments = TrainingArguments(
        here[0],
        use_cpu=True,
        per_device_train_batch_size=ROWS // distributed.get_world_size(),
        max_steps=given.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in examples]
    model = trained_as(way, plan, Path(here[0]) / "weights")
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[StepTimes()]).train()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
