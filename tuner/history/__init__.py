"""What earlier studies and published sweeps measured: kept beside each study, read back from a study's `history:`."""

from tuner.history.entries import past_of, read_past
from tuner.history.past import Past, PastRun, PastSample
from tuner.history.tables import keep_run, make_tables

__all__ = ["Past", "PastRun", "PastSample", "keep_run", "make_tables", "past_of", "read_past"]
