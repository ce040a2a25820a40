"""Programs whose configuration is a recipe, with settings of the command over it.

`words.py` finds the settings among the words of a command, `command.py` makes the command of a trial. Each program has
one module: Megatron-Bridge, NeMo 2, Megatron-SWIFT, verl's actor, and MaxText. All but MaxText run megatron-core, so
that their settings are written as flags of Megatron-LM and read as those are (`megatron_keys.py`).
"""
