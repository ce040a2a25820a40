"""Functions that run without the collector of cyclic garbage, and what is left of it behind them."""

import gc

import pytest

from hardware.collector import without_collector


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_before(is_on):
    """It pauses inside, in nested calls too, and works again behind the function if it did before, errors or not."""

    @without_collector
    def inner():
        return gc.isenabled()

    @without_collector
    def outer(error=None):
        seen = inner(), gc.isenabled()
        if error is not None:
            raise error
        return seen

    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        assert outer() == (False, False)
        assert gc.isenabled() is is_on
        with pytest.raises(ValueError, match="no"):
            outer(ValueError("no"))
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
