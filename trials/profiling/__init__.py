"""Read the operators of a training step's profile, with their times."""
