"""Run a training program as one rank on a CPU. Begin with `serve.py`.

These modules run in the environment of the user's program. They import each other, PyTorch and the standard library.
"""
