"""Checker of `meshtune init` over a folder of launch scripts; see `__main__.py`."""
