"""Strategy assignment: one strategy for each node of a graph, under costs of nodes and of pairs of nodes."""
