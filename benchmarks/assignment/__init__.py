"""Strategy assignment: files of the contest and other problems for `tuner/planners/assignment`, which solves them."""
