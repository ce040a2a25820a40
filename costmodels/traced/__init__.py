"""Models that no reader knows, read from transformers' own module tree.

Begin with `model.py`: what a trace says, in numbers and shapes. `with_torch/` makes it, and is the only part that needs
torch and transformers.
"""
