"""What the tests of `plan_jax` share."""

import pytest

pytest.importorskip("jax", reason="plans of JAX functions need JAX: pip install 'meshtune[jax]'")
