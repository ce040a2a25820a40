"""Planners: searches for the best plan of one configuration, with a proof of how good it is."""
