"""Predict a study's candidates before any trial: step times, memory, rankings, other sizes. It loads no Optuna."""
