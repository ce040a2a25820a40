"""Strategy assignment below sharding plans: choose one strategy for every node under one memory limit."""
