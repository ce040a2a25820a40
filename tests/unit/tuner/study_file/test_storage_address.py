from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from tuner.study_file.storage_address import StorageAddress, StorageKind

CANARY = "c4nary"

SERVERS = st.builds(
    lambda scheme, user, host, name: f"{scheme}://{user}:{CANARY}@{host}/{name}",
    st.sampled_from(["postgresql", "postgresql+psycopg2", "mysql"]),
    st.sampled_from(["me", ""]),
    st.sampled_from(["localhost", "db.example:5432", "[::1]"]),
    st.text("abc_", min_size=1, max_size=8),
)
NAMES = st.text("abc.%_ -é:@", min_size=1, max_size=12).filter(lambda name: name != ":memory:")
FILES = st.builds(
    lambda scheme, slash, name, query: f"{scheme}:///{slash}{name}{query if scheme != 'journal' else ''}",
    st.sampled_from(["sqlite", "sqlite+pysqlite", "journal"]),
    st.sampled_from(["", "/shared/"]),
    NAMES,
    st.sampled_from(["", "?timeout=5"]),
)


@given(st.one_of(SERVERS, FILES, st.sampled_from(["sqlite://", "sqlite:///:memory:"])))
def test_an_address_is_what_its_url_says(url):
    """Its URL parses to an equal address; a server has no file, and what the address shows has no password."""
    address = StorageAddress.parse(url)

    assert StorageAddress.parse(address.url) == address
    assert (address.file is None) == (address.kind is StorageKind.SERVER)
    assert CANARY not in f"{address} {address!r} {address.place}"


@given(st.sampled_from([StorageKind.SQLITE, StorageKind.JOURNAL]), st.sampled_from(["", "/shared/"]), NAMES)
def test_a_file_has_an_address(kind, folder, name):
    """The address of a file has this file and this kind, whatever characters the name has."""
    address = StorageAddress.of_file(Path(folder + name), kind)

    assert (address.file, address.kind) == (Path(folder + name), kind)
    assert address.place == str(Path(folder + name).resolve())
    assert not address.may_exist


@pytest.mark.parametrize(
    ("url", "kind", "file", "is_local"),
    [
        ("sqlite:///study.db", StorageKind.SQLITE, Path("study.db"), True),
        ("sqlite:////data/study.db?timeout=5", StorageKind.SQLITE, Path("/data/study.db"), True),
        ("sqlite:///file:a%20b.db?uri=true", StorageKind.SQLITE, Path("a b.db"), True),
        ("sqlite:///a%20b.db", StorageKind.SQLITE, Path("a%20b.db"), True),
        ("sqlite://", StorageKind.SQLITE, Path(), True),
        ("journal:////shared/study.log", StorageKind.JOURNAL, Path("/shared/study.log"), True),
        ("postgresql://me@localhost/x", StorageKind.SERVER, None, True),
        ("postgresql://me@/x?host=/run/postgresql", StorageKind.SERVER, None, True),
        ("postgresql://me@elsewhere/x", StorageKind.SERVER, None, False),
        ("mysql+pymysql://me@elsewhere/x", StorageKind.SERVER, None, False),
    ],
)
def test_kinds_and_files(url, kind, file, is_local):
    """Each form of docs/storage.md has its kind and its file, and tells whether it names another machine."""
    address = StorageAddress.parse(url)

    assert (address.kind, address.file, address.is_local) == (kind, file, is_local)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("meshtune.db", "is not a database URL"),
        ("oracle://host/x", "is not a database URL"),
        ("sqlite:///a\0b", "is not a database URL"),
        ("journal://study.log", "names no journal file"),
        (f"sqlite:///{'n' * 300}", "names no file that there can be"),
    ],
)
def test_what_is_no_address_is_refused_under_its_key(text, words):
    """A text that names no storage is one message with the key that holds it."""
    with pytest.raises(ConfigError, match=words) as refused:
        StorageAddress.parse(text, key="history.2")

    assert refused.value.key == "history.2"


def test_a_path_that_no_url_can_name_is_refused():
    """A question mark ends the path of a URL: such a file gets no address of another one."""
    with pytest.raises(ConfigError, match="holds a \\?"):
        StorageAddress.of_file(Path("what?/meshtune.db"))
