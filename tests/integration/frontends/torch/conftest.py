"""Provide one thread for the tests of the torch frontend, whose operators are small."""

import pytest

torch = pytest.importorskip("torch", reason="the frontend needs torch: pip install 'meshtune[torch]'")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: further ones spin while they wait for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
