"""Pages of the atlas."""
