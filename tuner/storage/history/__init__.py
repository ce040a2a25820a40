"""Keep the runs of each study for later ones, and read the `history:` of a study."""

from tuner.search.earlier_runs import Past, PastRun, PastSample
from tuner.storage.history.entries import past_of, read_past
from tuner.storage.history.tables import keep_run, make_tables

__all__ = ["Past", "PastRun", "PastSample", "keep_run", "make_tables", "past_of", "read_past"]
