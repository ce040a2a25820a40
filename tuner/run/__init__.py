"""Run a study: open or resume it (`studies.py`), keep the trial slots busy, and record the results (`loop.py`)."""
