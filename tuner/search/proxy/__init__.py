"""Run smaller jobs in place of candidates, and learn from them. Begin with `proxy_trials.py`."""
