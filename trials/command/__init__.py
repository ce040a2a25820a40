"""The `command` backend: a trial runs the user's own training command and reads its log."""
