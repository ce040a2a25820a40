"""Skip the tests of planned JAX programs where JAX is missing."""

import pytest

pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
