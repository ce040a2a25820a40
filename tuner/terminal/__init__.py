"""Terminal output: results, progress and pipeline timelines."""
