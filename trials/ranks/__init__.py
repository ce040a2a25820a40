"""Start the processes of a trial, one for each device or host, and learn how they end.

Begin with `contract.py`. `processes.py` starts the ranks of one host from the warm server in `server.py`, and
`listening.py` receives their messages. `unheard_signals.py` says which processes hear the signals that end a run.
"""
