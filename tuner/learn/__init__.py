"""Learn from the user's own runs: read logs and studies as rows of measured runs, keep them, fit to them, share them.

Begin with `learning.py`.
"""
