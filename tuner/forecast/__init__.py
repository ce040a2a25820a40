"""Predict a study's candidates before any trial: their step times and memory, rankings, other sizes. No Optuna is loaded for it."""
