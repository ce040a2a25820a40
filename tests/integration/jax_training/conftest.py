"""Skip the tests of the step in JAX where JAX is missing."""

import pytest

pytest.importorskip("jax", reason="the step needs JAX: pip install 'meshtune[jax]'")
