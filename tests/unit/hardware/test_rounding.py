"""How many digits people are told."""

import pytest

from hardware.rounding import by_source, measured, predicted


@pytest.mark.parametrize(
    ("value", "of_prediction", "of_measurement"),
    [
        (24.9134, "24.9", "24.91"),
        (7.3, "7.3", "7.3"),
        (0.0123456, "0.0123", "0.01235"),
        (99.96, "100", "99.96"),
        (12_345.6, "12,300", "12,350"),
        (1_234_567.0, "1,230,000", "1,235,000"),
        (0.0, "0", "0"),
        (float("inf"), "inf", "inf"),
    ],
)
def test_predictions_have_three_digits_and_measurements_four(value, of_prediction, of_measurement):
    """No digit is told that is not known, and none is written with an exponent."""
    assert predicted(value) == of_prediction
    assert measured(value) == of_measurement


def test_digits_follow_the_source():
    """What trials taught of others is a prediction; a simulated world's trial is measured in it."""
    told = {
        source: by_source(24.9134, source) for source in ("predicted", "learned", "simulated", "measured", "synthetic")
    }

    assert told == dict.fromkeys(("predicted", "learned", "simulated"), "24.9") | {
        "measured": "24.91",
        "synthetic": "24.91",
    }
