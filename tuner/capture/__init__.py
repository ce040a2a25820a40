"""Capture of launch commands: run a user's script with stand-ins for all programs that train.

A stand-in writes down its arguments and its environment and ends with status 0, so that nothing trains. Begin with
`run_script.py`, which prepares the folder and runs the command; `stand_in.py` is the program behind every stand-in.
This room uses the standard library only, because each stand-in is a process of its own that has to start at once.
"""
