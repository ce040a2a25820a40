"""Strategy assignment: the contest's files and other problems for the product's solver (`tuner/planners/assignment`)."""
