"""Entries of the catalog: a folder for each kind."""
