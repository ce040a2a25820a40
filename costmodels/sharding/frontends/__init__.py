"""Make graphs of training steps: from a transformer's sizes, from JAX programs and from torch modules."""
