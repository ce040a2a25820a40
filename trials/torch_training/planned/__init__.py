"""Training step that a sharding plan describes, executed on local shards. Begin with `step.py`.

`digits.py` says which indices of a dim a rank holds, `relayout.py` moves tensors between layouts, and `operators.py`
computes operators on the parts of one rank.
"""
