"""What earlier studies and published sweeps measured: kept beside each study, read back from a study's `history:`."""

from tuner.search.earlier_runs import Past, PastRun, PastSample
from tuner.storage.history.entries import past_of, read_past
from tuner.storage.history.tables import keep_run, make_tables

__all__ = ["Past", "PastRun", "PastSample", "keep_run", "make_tables", "past_of", "read_past"]
