"""Enumerate the configurations that a study may try.

Begin with `enumeration.py`; `rules.py` holds the rules that remove configurations, each with its reason.
"""
