"""A small Llama that transformers' Trainer trains: as a plan of Meshtune says, or in Trainer's own way."""

import argparse
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

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


class StepTimes(TrainerCallback):
    """Prints the time of each step, which the study reads."""

    def on_step_begin(self, args, state, control, **kwargs):
        """Note the time."""
        self.begun_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Print how long the step took."""
        if state.is_world_process_zero:
            print(f"step {state.global_step} took {time.perf_counter() - self.begun_s:.6f} s", flush=True)


def main():
    """Train some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="file of a plan; without it, Trainer's own data parallelism trains")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    model, plan = model_of(), given.plan and load_plan(given.plan)
    # plain data parallelism is what Trainer does by itself, with DDP; all other plans run as planned
    if plan and not plan.is_data_parallel:
        model = for_trainer(plan.parallelize(model, sample(), loss=loss_of))
    drawn = torch.Generator().manual_seed(1)
    examples = torch.randint(0, VOCABULARY, (ROWS * given.steps, LENGTH), generator=drawn)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=ROWS // torch.distributed.get_world_size(),
            max_steps=given.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": ids, "labels": ids} for ids in examples]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[StepTimes()]).train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
