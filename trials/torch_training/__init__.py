"""Train a real transformer with torch as a trial, under exactly one configuration.

Begin with `keys.py` and `backend.py`. `rank_program.py` runs on every rank, and `model` holds the parts that it trains.
"""
