"""Read which operators a profile of one training step shows, and how long they took."""
