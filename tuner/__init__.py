"""What to try next, and everything a user touches."""
