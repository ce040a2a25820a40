"""How long one training step takes and how much memory it needs: pure functions over many configurations at once."""
