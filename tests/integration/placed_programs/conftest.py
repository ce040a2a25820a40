"""Skip the tests of placed programs where JAX or torch is missing."""

import pytest

pytest.importorskip("jax", reason="captured steps need JAX: pip install 'meshtune[jax]'")
pytest.importorskip("torch", reason="captured steps need torch: pip install 'meshtune[torch]'")
