"""docs/licences.md against what pyproject.toml asks for, and against what the packages that are here say themselves."""

import re

import pytest

from docs.site.licences import COPYLEFT, PAGE, STRONG, closure, direct, installed, licence_of, rows_of
from docs.site.regions import names_of

ROWS = rows_of(PAGE.read_text(encoding="utf-8"))
WEAK_COPYLEFT = {"certifi", "psycopg2-binary", "tqdm"}
"""Those whose own files stay under their licence when they are changed; the page names them."""
FAMILIES = re.compile(r"Apache|BSD|BSL|CC0|GNU|ISC|LGPL|MIT|MPL|PSF|Zlib")


@pytest.mark.parametrize("extra", direct(), ids=lambda extra: extra or "core")
def test_every_package_is_listed(extra):
    """All that the core and each extra for users asks for stands on the page, and what that needs here."""
    names = set(direct()[extra]) | {name for name in closure(direct()[extra]) if installed(name)}

    assert names - set(ROWS) == set()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_licence_is_what_the_package_says(name):
    """The page states the kind of licence that the metadata of an installed package states.

    Only the kind, because a package that `constraints.txt` leaves open may spell it anew in its next release:
    cloudpickle went from "BSD License" to "BSD-3-Clause".
    """
    found = installed(name)
    if found is None:
        pytest.skip(f"{name} is not installed")

    stated = set(FAMILIES.findall(ROWS[name][0]))

    assert stated
    assert stated == set(FAMILIES.findall(licence_of(found)))


def test_no_licence_reaches_what_uses_it():
    """No package is under the GPL or AGPL, and the few under weaker copyleft are named in words."""
    assert len(ROWS) > 30
    assert [name for name, (licence, _) in ROWS.items() if STRONG.search(licence)] == []
    assert {name for name, (licence, _) in ROWS.items() if COPYLEFT.search(licence)} == WEAK_COPYLEFT
    assert ROWS["psycopg2-binary"][1] == "the extra `postgresql`"
    assert [name for name, (licence, _) in ROWS.items() if licence == "not told"] == []
    words = PAGE.read_text(encoding="utf-8").partition("<!-- generated")[0]
    assert [name for name in WEAK_COPYLEFT if f"`{name}`" not in words] == []
    assert names_of(PAGE.read_text(encoding="utf-8")) == ["licences"]


@pytest.mark.parametrize(
    ("licence", "is_strong"),
    [
        ("GPL-3.0-or-later", True),
        ("GNU General Public License v3 (GPLv3)", True),
        ("GNU Affero General Public License v3", True),
        ("AGPL-3.0", True),
        ("LGPL-2.1", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("GNU Library or Lesser General Public License (LGPL)", False),
        ("MPL-2.0 AND MIT", False),
    ],
)
def test_the_gpl_is_told_from_the_lgpl(licence, is_strong):
    """The words that the page is searched for find all spellings of the one, and none of the other."""
    assert bool(STRONG.search(licence)) == is_strong
    assert COPYLEFT.search(licence)
