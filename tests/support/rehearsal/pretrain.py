"""Training program on megatron-core's wheel, as short as one can be: a GPT model from Megatron-LM's flags."""

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def forward_step(batches, model):
    """Return the losses of one micro-batch, and how their sum is taken."""
    batch = next(batches)
    tokens, positions, labels = (batch[name].cuda() for name in ("tokens", "position_ids", "labels"))
    losses = model(tokens, positions, None, labels=labels)

    def total(output):
        summed = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int)
        return summed, count, {"lm loss": torch.stack([summed.detach(), count.float()])}

    return losses, total


def no_data(_, vp_stage=None):  # noqa: ARG001 - Megatron-LM passes it by name
    """Return no data sets, for any chunk of the model."""
    return None, None, None


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, no_data, ModelType.encoder_or_decoder, forward_step)
