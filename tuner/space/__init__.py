"""Enumerate the configurations that a study may try.

Begin with `enumeration.py`. `dimensions.py` is the table of dimensions, and `rules/` holds the rules that remove
configurations, each with its reason.
"""
