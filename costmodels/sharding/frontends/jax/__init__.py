"""Build graphs of JAX programs. Begin with `graph.py`; `rules.py` holds one rule for each primitive."""
