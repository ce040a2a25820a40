"""Optimizers by the names that files and flags give them."""

from __future__ import annotations

from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS, optimizers_of, why_unknown


def read_optimizer(framework: str, text: str, *, has_momentum: bool = True) -> tuple[str, str]:
    """Return the optimizer that a framework's name means, and an empty text; or the default, and why it is not known.

    A name that only another framework has is that one's: the user's program must have added it.

    Args:
        framework: Framework that the file or the flags are for.
        text: Name that they give; empty for the default.
        has_momentum: Whether an SGD of torch is told to have a momentum, which it has not by itself.
    """
    own, name = optimizers_of(framework), text.lower()
    if not name:
        return DEFAULT_OPTIMIZER, ""
    spelled = {other: known for known, one in OPTIMIZERS.items() for texts in one.spellings.values() for other in texts}
    found = (spelled | {known: known for known in OPTIMIZERS} | own).get(name)
    if found is None:
        return DEFAULT_OPTIMIZER, why_unknown(text, own)
    return "plain_sgd" if found == "sgd" and not has_momentum else found, ""
