"""What makes array graphs out of models: each frontend writes one training step down as tensors and operators."""
