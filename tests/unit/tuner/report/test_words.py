"""Words of reports."""

from tuner.report.words import predicted_seconds, seconds


def test_durations_have_units():
    """Below a second a duration is told in milliseconds."""
    assert (predicted_seconds(24.9134), seconds(24.9134)) == ("24.9 s", "24.91 s")
    assert (predicted_seconds(0.0123456), seconds(0.0123456)) == ("12.3 ms", "12.35 ms")
    assert seconds(None) == predicted_seconds(None) == "\N{EN DASH}"
