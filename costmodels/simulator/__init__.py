"""Simulate one optimizer step event by event.

Begin with `simulated_step.py`. `stage_prices.py` computes how long everything takes, `step_tasks.py` what waits for
what, and `events.py` is the engine. `trace.py` writes the timeline for Perfetto; `leaders.py` simulates many steps.
"""
