"""Prior of a known knob's effect, from the catalog."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.surrogates.knob_effects import KnobDesign
from hardware.arrays import FloatArray

CHANCES = (0.3, 0.5, 0.2)
"""Prior probabilities that the effect is as expected, off by about its width, and off by about FAR times that;
assumed."""

FAR = 3.0
"""Factor of the width by which an expectation is off where it does not hold; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobPrior:
    """Expected effects of a knob's values on every layout, with their widths.

    Attributes:
        step: Expected log effect on the step time, zero for today's value [n, v].
        step_width: Standard deviation of that on each layout [n].
        memory: Expected log effect on the needed memory, zero for today's value [n, v].
        memory_width: Standard deviation of that on each layout [n]; None where the knob has no effect on memory.
    """

    step: FloatArray
    step_width: FloatArray
    memory: FloatArray
    memory_width: FloatArray | None


def around(design: KnobDesign, expected: FloatArray, width: FloatArray | None) -> KnobDesign:
    """Return the design of an effect that deviates from what is expected by about a width.

    Args:
        design: Design of the knob, as if nothing were known of it.
        expected: Expected log effect of each value on each layout [n, v].
        width: Standard deviation of the deviation on each layout [n]; None if it is exactly as expected.
    """
    if width is None:
        return replace(design, known=expected, scales=(0.0,), chances=(1.0,))
    most = float(width.max())
    return replace(design, known=expected, ties=width[:, None] / most, scales=(0.0, most, FAR * most), chances=CHANCES)
