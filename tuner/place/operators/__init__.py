"""Placement of operators: which device runs each operator of several models, when, and over which links data travel."""
