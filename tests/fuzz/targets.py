"""All targets, by their names."""

from __future__ import annotations

from tests.fuzz import graph_files, launch_files, own_code, stored_files, study_files, trial_files, words

TARGETS = {
    target.name: target
    for module in (study_files, trial_files, launch_files, graph_files, stored_files, own_code, words)
    for target in module.TARGETS
}
