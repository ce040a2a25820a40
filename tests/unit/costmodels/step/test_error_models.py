import numpy as np
import pytest
from scipy.stats import t as student

from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.step.error_models import MemoryErrorModel, error_models, memory_error_of, student_cdf


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 10, 30])
def test_students_distribution_is_that_of_scipy(freedom):
    """The finite sums agree with scipy for odd and even degrees of freedom, in the middle and in both tails."""
    at = np.array([-1e9, -40.0, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 40.0, 1e9])

    found = student_cdf(at, freedom)

    np.testing.assert_allclose(found, student.cdf(at, freedom), atol=1e-14)
    assert ((found >= 0) & (found <= 1)).all()


def test_the_tails_of_memory_are_heavy():
    """At equal scales Student's t leaves more than the normal distribution beyond three scales."""
    margin = np.array([-0.3])

    heavy = MemoryErrorModel(scale=0.1, freedom=4).probability_below(margin)

    assert heavy[0] == pytest.approx(student.cdf(-3, 4))
    assert heavy[0] > 5 * MemoryErrorModel(scale=0.1).probability_below(margin)[0]


def test_no_shipped_profile_states_its_own_error_of_memory():
    """All profiles of the catalog have the catalog's error, and `unknown` that of a framework without a profile."""
    models = error_models()

    for name in runtime_names():
        expected = models.unknown_memory if name == "unknown" else models.memory
        assert memory_error_of(find_runtime(name)) == expected
