"""Pages of a study in optuna-dashboard: notes, attributes and logs added to the data in the storage.

None of these texts is written to the storage. The pages read through `StudyView`, which adds the texts to the data that
it reads. They are therefore always as recent as the study, need nothing from its driver, and cannot replace a user's
notes.
"""

from tuner.dashboard.server import DashboardServer, Place, dashboard_server

__all__ = ["DashboardServer", "Place", "dashboard_server"]
