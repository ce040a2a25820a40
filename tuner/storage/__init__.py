"""Keep all durable state of studies in SQLite, PostgreSQL or a journal file.

Begin with `opening.py`; `record.py` says what a study and its trials keep.
"""
