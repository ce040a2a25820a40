"""Simulate one optimizer step event by event.

Begin with `simulated_step.py`. `events.py` is the engine; `trace.py` writes the timeline for Perfetto.
"""
