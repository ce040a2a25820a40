"""Predict the time of a pipeline's stages: schedules and their bubbles, transfers, and what unlike stages take.

Begin with `stage_pricing.py`. Pipelines whose stages are unlike are timed pass by pass (`pass_by_pass.py`).
"""
