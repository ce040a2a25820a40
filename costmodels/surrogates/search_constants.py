"""Constants of the search that no formula gives: how far predictions may err, and how soon trials are believed.

They are data (catalog/search.yaml), chosen by hand for searches that end on the best: at least 93% did on measured
groups whose source no profile had seen. Constants chosen for the best prediction of untried candidates, each source
left out, ended on the best in 88 to 92%.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from costmodels.surrogates.gaussian_process import HyperPrior
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping

CATALOG_FILE = Path(__file__).parents[1] / "catalog" / "search.yaml"

Positive = Annotated[float, Field(gt=0)]


class SearchConstants(StrictModel):
    """Constants of the hypotheses about errors of step times.

    Attributes:
        noise: Prior median of the independent residual of a configuration, as a standard deviation of the logarithm.
        rough_length: Distance, in features.py's units, over which the errors of the rough hypothesis decorrelate.
        rough_chance: Chance of the rough hypothesis relative to the smooth one. Without it, a few trials that agree
            make all candidates look alike, and the search stops confident and wrong.
        alternative_chance: Chance of each other profile, relative to the study's own.
        outliers: Pseudo-counts of runs with and without an outlying slowdown, before any trial.
        doubt: Constant c of the factor 1 + c / t on all variances, for hyperparameters learned from t observations
            without a past. The most probable ones are too certain about candidates unlike the measured ones.
    """

    noise: Positive
    rough_length: Positive
    rough_chance: Positive
    alternative_chance: Positive
    outliers: Annotated[tuple[Positive, Positive], Field(strict=False)]
    doubt: Annotated[float, Field(ge=0)]

    @property
    def smooth(self) -> HyperPrior:
        """Prior of errors that vary slowly between configurations (its other constants are assumed)."""
        return HyperPrior(amplitude=0.3, length_scale=3.0, noise=self.noise)

    @property
    def rough(self) -> HyperPrior:
        """Prior of errors that change within one or two octaves."""
        return HyperPrior(amplitude=0.3, length_scale=self.rough_length, noise=self.noise)


class SearchFile(StrictModel):
    """Grammar of CATALOG_FILE."""

    constants: SearchConstants
    chosen_on: str


@cache
def search_constants() -> SearchConstants:
    """Return the catalog's constants."""
    return validate_mapping(SearchFile, read_mapping(CATALOG_FILE), file=str(CATALOG_FILE)).constants
