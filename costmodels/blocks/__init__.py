"""Price the parts of a model: one file for each kind of block.

Begin with `contract.py` for what a block says about itself, and `context.py` for what it is told. A model is a row of
layers, and each layer a row of blocks (costmodels/job/model_spec.py). To add a kind, write its file and a reader.
"""
