"""Frontend of StableHLO modules: files of a compiler's input language, read as the JAX functions that they compute."""
