"""Write sharding plans for JAX, torch's DTensor and Megatron-LM."""
