"""Room of a captured script: what the kernel keeps its processes from doing.

Begin with `enter.py`, the program between Meshtune and the script. It takes the first boundary that the machine allows:
namespaces with overlays (`mounts.py`), or Landlock and a filter of system calls (`guard.py`). In both, `exec_watch.py`
sends programs that have a stand-in to it, by whatever path they are started, and `keeper.py` holds the script to its
bounds. Only the standard library is used here, and Linux's system calls (`system_calls.py`).
"""
