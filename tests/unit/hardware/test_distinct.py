import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hardware.distinct import distinct_rows

rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[st.integers(0, 40)] * width), min_size=1, max_size=60)
)


@given(rows)
def test_distinct_rows_are_those_that_sorting_finds(found):
    """Counting finds the same rows in the same order as `numpy.unique`, and the first place of each."""
    table = np.array(found)
    _, first, row = np.unique(table, axis=0, return_index=True, return_inverse=True)

    counted_first, counted_row = distinct_rows(list(table.T))

    assert counted_first.tolist() == first.tolist()
    assert counted_row.tolist() == row.ravel().tolist()


def test_no_rows_have_no_distinct_ones():
    """An empty grid has no row."""
    first, row = distinct_rows([np.zeros(0, dtype=np.int64)])

    assert len(first) == len(row) == 0
