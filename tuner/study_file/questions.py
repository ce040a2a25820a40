"""Questions of `meshtune init`, each with the option that answers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Key that a user may be asked for.

    Attributes:
        key: Name of the key; its option has dashes in place of underscores.
        metavar: Kind of its value in the help.
        help: What it means.
    """

    key: str
    metavar: str
    help: str

    @property
    def option(self) -> str:
        """Name of the option."""
        return f"--{self.key.replace('_', '-')}"


QUESTIONS = {
    key: Question(key=key, metavar=metavar, help=meaning)
    for key, metavar, meaning in (
        ("hosts", "N", "Number of hosts, if the file gives none or another is wanted."),
        ("devices_per_host", "N", "Devices of each host, if not those of the cluster in the catalog."),
        ("vocab_size", "N", "Rows of the embedding table."),
        ("sequence_length", "N", "Tokens per sequence."),
        ("global_batch_size", "N", "Sequences per step."),
        ("precision", "NAME", "Number format of matrix products, such as bf16."),
        ("optimizer", "NAME", "Optimizer, by the name that study files have for it, such as adam or muon."),
        ("pp", "N", "Pipeline stages."),
        ("tp", "N", "Tensor parallel degree."),
        ("dp", "N", "Data parallel degree."),
        ("cp", "N", "Context parallel degree of ring attention."),
        ("up", "N", "Ulysses degree."),
        ("vpp", "N", "Model chunks per pipeline stage."),
        ("ep", "N", "Expert parallel degree."),
        ("mbs", "N", "Sequences per micro-batch."),
        ("recompute", "NAME", "Recomputation: none, selective or full."),
        ("recompute_layers", "N", "Layers of each virtual stage that run again in full, beside `recompute`."),
        ("offload", "NAME", "Training states on the host: none or optimizer."),
        ("zero_stage", "N", "ZeRO stage from 0 to 3; 1 is Megatron-LM's distributed optimizer."),
        ("sequence_parallel", "BOOL", "Sequence parallelism: true or false."),
        ("expert_tp", "N", "Tensor parallel degree of the experts; 0 is tp."),
    )
}
"""All keys that can be asked for, in the order of the help."""

IGNORE = Question(
    key="ignore_flags",
    metavar="NAME,...",
    help="Flags of the script that the study leaves out: you know that they change nothing, or study the job without.",
)
"""Question about flags whose effect is not known or not modelled."""
