"""Interpreter that reads launch scripts without running them. `script.py` is the entry point."""
