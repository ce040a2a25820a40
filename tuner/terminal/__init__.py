"""Print results, progress and pipelines on a terminal."""
