"""Entries of the catalogs as `meshtune catalog` prints them. `listing.py` is the entry point."""
