"""Run trials: training steps, replayed measurements or simulations, in parallel on Ray.

Every backend has a folder and keeps the contract in `backend.py`. Begin there, and read `ray_executor.py` for the pool
of workers that runs backends. Failures come back as observations, never as exceptions.
"""
