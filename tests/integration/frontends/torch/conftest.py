"""What the tests of the torch frontend share."""

import pytest

pytest.importorskip("torch", reason="the frontend needs torch: pip install 'meshtune[torch]'")
