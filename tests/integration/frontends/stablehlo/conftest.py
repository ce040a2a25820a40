"""Skip the tests of the StableHLO frontend where JAX is missing."""

import pytest

pytest.importorskip("jax", reason="the frontend needs JAX: pip install 'meshtune[jax]'")
