"""Write sharding plans for JAX, torch's DTensor, MindSpore and Megatron-LM."""
