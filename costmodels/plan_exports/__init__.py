"""Sharding plans as frameworks take them: JAX, torch's DTensor and MindSpore, and the plans that Megatron-LM knows."""
