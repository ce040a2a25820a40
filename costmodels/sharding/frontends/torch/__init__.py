"""Build graphs of torch modules. Begin with `graph.py`; `rules.py` holds one rule for each ATen operator."""
