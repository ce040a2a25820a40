"""Start the processes of a trial, one for each device, and hear how they end.

Begin with `contract.py`. `processes.py` starts the ranks of one host from the warm server in `server.py`.
"""
