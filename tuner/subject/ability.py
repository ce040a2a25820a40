"""What a command may need of a subject; this file loads nothing else, so that help texts come at once."""

from __future__ import annotations

from enum import StrEnum


class Ability(StrEnum):
    """What a command may need of a subject, and some subjects cannot."""

    FLAGS = "flags"
    """Exporting a configuration to a training framework."""
    SHARDINGS = "shardings"
    """Handing out a mesh and the layouts of tensors, and a program with both."""
    LAYERS = "layers"
    """Telling the stages, layers and constants of a prediction, and simulating a step of it."""
    RULES = "rules"
    """Removing configurations by rules before any trial."""
    SIZES = "sizes"
    """Predicting other sizes of the cluster, and other clusters."""
    TOKENS = "tokens"
    """Counting the tokens of a step."""
    KNOBS = "knobs"
    """Judging known knobs of a framework."""
    HISTORY = "history"
    """Teaching later studies by its trials."""
    FEWER_HOSTS = "fewer hosts"
    """Going on with trials on fewer hosts."""
    WATCH = "watch"
    """Watching the cluster of a running training."""
