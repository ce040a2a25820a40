"""Sections of the report, one per module."""
