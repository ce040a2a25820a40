"""Tables of the keys of price files in docs/costs.md, generated from the models that validate them."""

from __future__ import annotations

from docs.site.study_file import table_of
from hardware.price_file import PriceKeys, PricesKeys


def price_tables() -> dict[str, str]:
    """Return the table of each kind of mapping in a file of prices, by the name of its model."""
    return {model.__name__: table_of(model.model_json_schema()) for model in (PricesKeys, PriceKeys)}
