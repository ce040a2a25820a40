"""Planners: searches over what a configuration leaves open."""
