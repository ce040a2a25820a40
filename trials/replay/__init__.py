"""Replay published measurements as trials."""
