"""What the tests of planned JAX programs share."""

import pytest

pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
