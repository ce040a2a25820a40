"""Read the programs that XLA's compiler makes, and describe devices to it; JAX is not needed."""
