"""A study's pages in optuna-dashboard, in our words: notes, attributes and logs laid over what the storage holds.

Nothing of it is written to the storage. The pages read through `StudyView`, which adds our words to what it reads, so
that they are never older than the study, take nothing from its driver, and cannot replace what a user has written.
"""

from tuner.dashboard.server import DashboardServer, Place, dashboard_server

__all__ = ["DashboardServer", "Place", "dashboard_server"]
