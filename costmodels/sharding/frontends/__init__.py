"""Build graphs for the sharding planners from transformer sizes, JAX functions and torch modules."""
