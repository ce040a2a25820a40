"""Functions that ranks run in the tests of planned models in transformers' Trainer; ranks import them from here."""

WHOLE_BATCH, LENGTH = 8, 16


def examples():
    """Make token ids whose labels leave out more or fewer positions, so that ranks and batches have other numbers."""
    import torch

    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (48, LENGTH), generator=drawn)
    seen = torch.arange(LENGTH)
    return [
        {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each.where(seen >= 2 + number % 7, -100)}
        for number, each in enumerate(ids)
    ]


def sample():
    """Make a whole batch as Trainer hands it to the model."""
    import torch

    ids = torch.zeros(WHOLE_BATCH, LENGTH, dtype=torch.int64)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "num_items_in_batch": torch.tensor(1.0),
    }


def loss_of(model, batch):
    """Compute the loss of a batch."""
    return model(**batch).loss


def arguments(place, folder, **further):
    """Make Trainer's arguments for a whole batch on all ranks together."""
    import os

    from transformers import TrainingArguments

    size = str(place.world_size)
    if place.world_size > 1:  # as torchrun has it
        os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": size}
    return TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=WHOLE_BATCH // place.world_size,
        per_device_eval_batch_size=WHOLE_BATCH // place.world_size,
        learning_rate=1e-2,
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_steps=3,
        eval_strategy="steps",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **further,
    )


def train(place, folder, mesh, cases):
    """Report what Trainer logs for each (model, seed of the plan, micro-batches), the weights, and what a call sends.

    One rank trains the model without a plan.
    """
    import torch
    from transformers import Trainer

    from tests.support.programs.parallel_ranks import of_transformers, planned
    from tests.support.programs.recorded_ranks import _groups
    from trials.torch_training.planned.traffic import planned_traffic, recorded_traffic
    from tuner import for_trainer

    with _groups(place) as (recorder, _):
        for name, seed, micro_batches in cases:
            torch.manual_seed(0)
            module, own, sent = of_transformers(name), None, []
            if mesh:
                plan = planned(module, (sample(),), loss_of, mesh, seed)
                own = planned_traffic(plan.planned.plan, place.rank)
                module = for_trainer(plan.parallelize(module))

            class Recorded(Trainer):
                def training_step(self, *given, sent=sent, **named):
                    recorder.start()
                    found = super().training_step(*given, **named)
                    sent.append(recorded_traffic(recorder.stop()))
                    return found

            data = examples()
            trainer = Recorded(
                model=module,
                args=arguments(place, folder, max_steps=6, gradient_accumulation_steps=micro_batches),
                train_dataset=data,
                eval_dataset=data[:WHOLE_BATCH],
            )
            trainer.train()
            trainer.save_model(f"{folder}/{name}-{place.world_size}")
            keys = ("loss", "grad_norm", "eval_loss")
            place.tell(
                {
                    "logged": [each[key] for each in trainer.state.log_history for key in keys if key in each],
                    "planned": own,
                    "sent": sent,
                }
            )
