from pathlib import Path

import pytest

from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.io.errors import ConfigError
from hardware.price_file import Prices, read_prices

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "configs" / "prices").glob("*.yaml"))
GOOD = """\
currency: EUR
date: 2026-01-31
prices:
  H100: {per_device_hour: 2.5, source: our contract}
  p5-h100: {per_device_hour: 4, source: our contract}
"""


def written(folder, text):
    """The path of a file of prices with this text."""
    path = folder / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_price_belongs_to_a_device_by_any_of_its_names(tmp_path):
    """A cluster costs its devices times the price that stands under an alias of their name."""
    prices = read_prices(written(tmp_path, GOOD))

    assert prices.per_hour(find_cluster("dgx-h100", hosts=3)) == pytest.approx(3 * 8 * 2.5)
    assert (prices.currency, prices.date) == ("EUR", "2026-01-31")


def test_a_clusters_own_price_wins(tmp_path):
    """A price under the name of a cluster stands for its hosts in place of the device's."""
    prices = read_prices(written(tmp_path, GOOD))

    assert prices.per_hour(find_cluster("P5 H100", hosts=1)) == pytest.approx(8 * 4)


def test_a_name_of_a_cluster_and_its_device_is_the_price_of_both(tmp_path):
    """MI300X is a cluster of the catalog and the device in it: hosts of either have the price."""
    prices = read_prices(written(tmp_path, GOOD.replace("H100:", "MI300X:", 1)))

    for keys in ({"name": "mi300x"}, {"device": "MI300X"}):
        assert prices.per_hour(cluster_from_mapping(keys, Path())) == pytest.approx(8 * 2.5)


def test_unlike_hosts_add_up_and_one_without_a_price_has_no_sum(tmp_path):
    """The groups of a mixed cluster add up, unless a device has no price."""
    prices = read_prices(written(tmp_path, GOOD))
    mixed = [{"name": "dgx-h100", "hosts": 2}, {"name": "p5-h100", "hosts": 1}]

    assert prices.per_hour(cluster_from_mapping({"groups": mixed}, Path())) == pytest.approx(16 * 2.5 + 8 * 4)
    assert prices.per_hour(cluster_from_mapping({"groups": [*mixed, {"name": "dgx-a100"}]}, Path())) is None
    assert Prices(currency="EUR", of_all=1.5).per_hour(find_cluster("dgx-a100", hosts=2)) == pytest.approx(16 * 1.5)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("H100:", "H100-SXM-72:", ("prices.H100-SXM-72", "no cluster and no device", "did you mean")),
        ("p5-h100:", "H100-SXM-80:", ("H100-SXM-80", "keep one of the two")),
        ("2.5", "-1", ("prices.H100.per_device_hour", "-1", "greater than or equal to 0")),
        (", source: our contract}\n  p5", "}\n  p5", ("prices.H100.source", "missing")),
        ("2026-01-31", "31.1.2026", ("date", "must be a date such as")),
        ("currency: EUR\n", "", ("currency", "missing")),
        ("currency", "curency", ("curency", "unknown key", "did you mean 'currency'?")),
    ],
)
def test_a_wrong_file_is_told_with_its_key_and_rule(tmp_path, old, new, words):
    """A mistake in a file of prices names the file, the key, and what would be right."""
    assert old in GOOD
    with pytest.raises(ConfigError) as raised:
        read_prices(written(tmp_path, GOOD.replace(old, new, 1)))

    assert all(word in str(raised.value) for word in ("prices.yaml", *words))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_shipped_examples_are_dated_and_named(path):
    """Each example can be read, has the date of its prices in its name, and says first that it is an example."""
    assert read_prices(path).date in path.stem
    assert "EXAMPLE" in path.read_text(encoding="utf-8").splitlines()[0]
