"""All targets, by their names."""

from __future__ import annotations

from tests.fuzz import graph_files, launch_files, stored_files, study_files, trial_files

TARGETS = {
    target.name: target
    for module in (study_files, trial_files, launch_files, graph_files, stored_files)
    for target in module.TARGETS
}
