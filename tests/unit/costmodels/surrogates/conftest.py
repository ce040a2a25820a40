"""Provide the fixtures that tests of surrogates share."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    """A fixed stream."""
    return np.random.default_rng(0)
