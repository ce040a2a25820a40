"""The assignment problem below sharding plans: one strategy for every node, under one memory limit."""
