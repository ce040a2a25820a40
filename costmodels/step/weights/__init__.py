"""Predict what a step does to its weights: the traffic of data parallelism, the optimizer's passes, and offloading."""
