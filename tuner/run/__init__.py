"""Run a study: open or resume it, keep the trial slots busy, and record the results. Begin with `loop.py`."""
