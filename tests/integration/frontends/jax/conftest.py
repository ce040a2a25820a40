"""What the tests of the JAX frontend share."""

import pytest

pytest.importorskip("jax", reason="the frontend needs JAX: pip install 'meshtune[jax]'")
