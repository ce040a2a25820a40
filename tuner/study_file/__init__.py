"""Read and write study files. Begin with `config.py`, which turns a study file into a `StudyRequest`."""
