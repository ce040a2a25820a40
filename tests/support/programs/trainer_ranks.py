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
    """Make a whole batch as Trainer hands it to the model, in another order."""
    import torch

    ids = torch.zeros(WHOLE_BATCH, LENGTH, dtype=torch.int64)
    return {
        "num_items_in_batch": torch.tensor(1.0),
        "labels": ids,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def loss_of(model, batch):
    """Compute the loss of a batch."""
    return model(**batch).loss


def as_torchrun(place):
    """Set what torchrun tells its ranks, which Accelerate reads."""
    import os

    if place.world_size > 1:
        at, size = str(place.rank), str(place.world_size)
        os.environ |= {"RANK": at, "LOCAL_RANK": at, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def expected_traffic(plan, rank, batch):
    """Count what a rank sends in a call on a batch.

    The ranks' parts of a batch are cut along all axes, from which the plan may want another layout. One sum of two
    integers per axis tells whether they fit together.
    """
    from collections import Counter

    from costmodels.blocks.operator import OpKind
    from costmodels.sharding.exports.torch_ranks import layout_of
    from costmodels.sharding.layouts import moves
    from trials.torch_training.planned.traffic import members, planned_traffic

    mesh = plan.planned.plan.mesh
    found = Counter(planned_traffic(plan.planned.plan, rank))
    for name, value in batch.items():
        after = layout_of(plan.inputs[0][name])
        for move in moves((0,) * len(after), after, value.nbytes, mesh.sizes) if value.dim() else ():
            found[move.kind, members(mesh, move.axes, rank)] += move.message_bytes
    for axis in range(len(mesh.sizes)):
        found[OpKind.ALL_REDUCE, members(mesh, (axis,), rank)] += 16
    return dict(found)


def train(place, folder, mesh, cases):
    """Report what Trainer logs for each (model, seed of the plan, micro-batches), and what each call sends.

    One rank trains the model without a plan.
    """
    import warnings

    import torch
    from transformers import Trainer, TrainingArguments

    from tests.support.programs.parallel_ranks import of_transformers, planned
    from tests.support.programs.recorded_ranks import _groups
    from trials.torch_training.planned.traffic import recorded_traffic
    from tuner import for_trainer

    as_torchrun(place)
    with _groups(place) as (recorder, _):
        for name, seed, micro_batches in cases:
            torch.manual_seed(0)
            module, sent, expected = of_transformers(name), [], {}
            if mesh:
                plan = planned(module, (sample(),), loss_of, mesh, seed)
                expected = expected_traffic(plan, place.rank, sample())
                module = for_trainer(plan.parallelize(module))

            class Recorded(Trainer):
                def training_step(self, *given, sent=sent, **named):
                    recorder.start()
                    found = super().training_step(*given, **named)
                    sent.append(dict(recorded_traffic(recorder.stop())))
                    return found

            size = WHOLE_BATCH // place.world_size
            data = examples()
            trainer = Recorded(
                model=module,
                args=TrainingArguments(
                    folder,
                    use_cpu=True,
                    per_device_train_batch_size=size,
                    per_device_eval_batch_size=size,
                    gradient_accumulation_steps=micro_batches,
                    max_steps=4,
                    learning_rate=1e-2,
                    warmup_steps=1,
                    max_grad_norm=0.5,
                    logging_steps=1,
                    eval_steps=2,
                    eval_strategy="steps",
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                ),
                train_dataset=data,
                eval_dataset=data[:WHOLE_BATCH],
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.train()
            trainer.save_model(f"{folder}/{name}-{place.world_size}")
            keys = ("loss", "grad_norm", "eval_loss")
            place.tell(
                {
                    "logged": [each[key] for each in trainer.state.log_history for key in keys if key in each],
                    "expected": expected,
                    "again": [str(each.message) for each in caught if "planned again" in str(each.message)],
                    "sent": sent[1:],  # the first one also checks that numbers are the same on all ranks
                }
            )


def loop(place):
    """Report the losses of a loop with Accelerate, those of one process, and what is refused."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from hardware.io.errors import ConfigError
    from tests.support.programs.parallel_ranks import built, of_transformers, planned
    from trials.torch_training.process_group import process_group
    from tuner import for_trainer

    def losses(model, loader, optimizer, backward):
        found = []
        for batch in loader:
            loss = model(**batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    as_torchrun(place)
    with process_group(place, "cpu"):
        torch.manual_seed(0)
        twin, model = of_transformers("llama"), of_transformers("llama")
        twin.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        told = {"expected": losses(twin, DataLoader(examples(), WHOLE_BATCH), optimizer, torch.Tensor.backward)}
        batch = {name: each for name, each in sample().items() if each.dim()}
        model = for_trainer(planned(model, (batch,), loss_of, "data=2", 1).parallelize(model))
        accelerator = Accelerator(cpu=True)
        optimizer, loader = accelerator.prepare(
            torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(examples(), WHOLE_BATCH // place.world_size)
        )
        told["found"] = losses(model, loader, optimizer, accelerator.backward)
        module, inputs, loss = built("perceptron")
        plain = planned(module, inputs, loss, "data=2").parallelize(module)
        ids = batch["input_ids"][:4, : 8 + 8 * place.rank]
        told["refused"] = []
        for refused in (
            lambda: model(input_ids=ids, attention_mask=ids, labels=ids),
            lambda: model(
                **{name: each[:4] for name, each in batch.items()}, num_items_in_batch=torch.tensor(place.rank)
            ),
            lambda: for_trainer(plain),
        ):
            try:
                refused()
            except ConfigError as error:
                told["refused"].append(str(error))
        place.tell(told)
