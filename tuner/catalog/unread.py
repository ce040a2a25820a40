"""Notes on files of catalogs that no entry could be read from, and that stop only what names their entries."""

from __future__ import annotations

from hardware.cluster_file import broken_clusters
from hardware.device import broken_devices
from hardware.io.catalogs import unread_in_user_catalog


def notes_on_unread() -> tuple[str, ...]:
    """Return a note for each file that cannot work among those that every study reads, and for each that is not read.

    Files of models and profiles are read only where a study names them.
    """
    broken = (f"{each.mistake}" for each in (*broken_clusters(), *broken_devices()))
    return (*broken, *unread_in_user_catalog())
