"""Catalog of the knobs that people tune by hand, per framework, with what is known of their effects.

Begin with `known_knob.py`, an entry of the catalog, and `catalog.py`, which reads the files in `catalog/`. `needs.py`
says which models and clusters an entry suits, `effects.py` what its values do to each layout, and `recommended.py`
which entries may pay for a study.
"""
