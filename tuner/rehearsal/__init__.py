"""Rehearse candidates: the user's own program runs as single ranks on a CPU, before any device is touched.

`torch_room/` runs beside the user's framework; the other modules start it and read its answers.
"""
