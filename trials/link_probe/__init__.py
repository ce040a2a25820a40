"""Measure how fast TCP is between neighbouring hosts, with bytes of a bounded size.

Begin with `contract.py`. `transfer.py` sends and receives on one host, `rounds.py` says who sends to whom and when, and
`host_program.py` is the program of a host that a batch system starts.
"""
