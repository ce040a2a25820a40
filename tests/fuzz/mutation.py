"""Changed inputs: trees of JSON and YAML, tables, lines of text, and bytes.

A mutation of bytes seldom gets past a parser. These change one value, key, cell or word at a time, so that what comes
out is read as far as the checks behind the parser; some of what they put in, a parser must refuse.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from random import Random
from typing import Any

import yaml

Mutation = Callable[[bytes, Random, Sequence[bytes]], bytes]
"""A changed input, from one input, a source of chance, and all seeds of its kind."""

LARGEST = 64_000
"""Bytes of an input that is taken apart; larger ones are changed as bytes."""

NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 64, 4096, 65_536, 131_072, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**9, 10**12, 10**18),
    *(10**30, 10**308, 10**309, 10**4200, -(10**18), 0.0, -0.0, 0.5, 1.0, 1e-9, 1e-300, 5e-324, 1e15, 1e300),
    *(float("inf"), float("-inf"), float("nan")),
)
WORDS = (
    *("", " ", "0", "1", "-1", "1e400", "nan", "inf", "1_000", "0x10", "1,5", "٣", "²", "½", "true", "null", "~"),
    *("none", "\x00", "\x1b[2J\x1b]0;title\x07", "\u202e", "\ufeff", "\n", "\r\n", "\t", "a\nb", "é", "💥", "\ud7ff"),
    *("\ud800", "a\udcffb", "\udfff\ud800", "a\x00b", "\x9b2J"),
    *("../..", "/", "/dev/zero", "/dev/null", ".", "..", "~/x", "*", "{}", "{flags}", "{trial}", "%s%n", "$HOME"),
    *("`id`", "'", '"', "#", "\\", "h0", "h0-h1", "h99", "lost", "back", "x" * 300, "x" * 5000, "9" * 4400, "(a+)+$"),
    *("[", "(?P<step_s>\\d+)", "sqlite://", "2x3", "1-9", "1-999999999x999999999", "0/0", "auto", "even", "selective"),
    *("modules:mlp", "FAILED oom", "SUSPECT"),
)
RAW = (
    *("1e400", "-1e400", "9" * 4400, "0x" + "f" * 40, "1__0", ".inf", "-.inf", ".nan", "NaN", "Infinity"),
    *("!!python/none x", "!!binary aGk=", "!!set {a}", "!!timestamp 2001-01-01", "!!int x", "!!float x"),
    *("!!bool maybe", "!!null 1", "!!map []", "!!seq {}", "!!str", "&a x", "*a", "&a [*a]", "? x", "<<: {a: 1}"),
    *("|\n  x", ">-\n  x", "[", "]", "{", "}", "'", '"', ",", "[" * 40 + "]" * 40, "{a: " * 40 + "1" + "}" * 40, "012"),
    *("12:30", "no", "2001-01-01", "0o17", "=", "%x", "@", "`"),
)
"""Text in place of a value, as it stands."""

BYTES = (
    *(b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[31m", b"\r", b"\n", b"\r\n", b"\t"),
    *(b"\x0b", b"\xc2\x85", b"\xe2\x80\xa8", b'"', b"'", b",", b":", b"- ", b"#", b"\\", b"${", b"$((", b"(("),
    *(b"<<E\n", b"`", b"&&", b"[" * 1200, b"{" * 1200, b'{"a":' * 1200, b"(" * 1200, b"9" * 5000, b"1e999", b"-"),
    *(b"\x1f\x8b\x08", b"---\n", b"..."),
)

Slot = tuple[MutableMapping[Any, Any] | MutableSequence[Any], Any]
"""A place of a tree: what holds the value, and its key there."""


def of_bytes(data: bytes, rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Bytes taken out, put in, doubled, or joined with those of another input."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        begin = rng.randrange(len(changed) + 1)
        end = min(len(changed), begin + rng.choice((0, 1, 1, 2, 8, 64)))
        other = rng.choice(seeds) if seeds else data
        start = rng.randrange(len(other) + 1)
        changed[begin:end] = rng.choice(
            (
                b"",
                bytes([rng.randrange(256)]),
                rng.choice(BYTES),
                bytes(changed[begin:end]) * 2,
                other[start : start + rng.choice((1, 8, 64))],
            )
        )
    return bytes(changed)


def of_yaml(data: bytes, rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A tree of YAML with changed values."""
    return _of_tree(data, rng, seeds, _read_yaml, _write_yaml)


def of_json(data: bytes, rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A tree of JSON with changed values."""
    return _of_tree(data, rng, seeds, json.loads, _write_json)


def of_table(data: bytes, rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A CSV file with changed cells, rows and columns."""
    try:
        rows = list(csv.reader(io.StringIO(data[:LARGEST].decode(), newline="")))
    except (UnicodeDecodeError, csv.Error):
        return of_bytes(data, rng, seeds)
    rows = rows or [[]]
    for _ in range(rng.choice((1, 1, 2, 3))):
        row = rng.choice(rows)
        match rng.randrange(7):
            case 0 if len(rows) > 1:
                rows.remove(row)
            case 1:
                rows.insert(rng.randrange(len(rows) + 1), list(row))
            case 2:
                row.insert(rng.randrange(len(row) + 1), _word(rng))
            case 3 if row:
                del row[rng.randrange(len(row))]
            case _ if row:
                at = rng.randrange(len(row))
                near = [other[at] for other in rows if at < len(other)]
                row[at] = rng.choice((_word(rng), str(_number(rng)), rng.choice(near), _changed_text(row[at], rng)))
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator=rng.choice(("\n", "\n", "\r\n"))).writerows(rows)
    return _encoded(written.getvalue())


def of_lines(data: bytes, rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Text with changed lines, words and numbers."""
    lines = data[:LARGEST].decode(errors="surrogateescape").splitlines(keepends=True) or [""]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2 if seeds:
                others = rng.choice(seeds).decode(errors="surrogateescape").splitlines(keepends=True) or [""]
                lines.insert(at, rng.choice(others))
            case _:
                lines[at] = _changed_text(lines[at], rng)
    return _encoded("".join(lines))


def _of_tree(
    data: bytes, rng: Random, seeds: Sequence[bytes], read: Callable[[bytes], Any], write: Callable[[Any], str]
) -> bytes:
    try:
        tree = read(data) if len(data) <= LARGEST else None
        other = read(rng.choice(seeds)) if seeds else tree
    except Exception:  # noqa: BLE001 # the libraries' readers raise what they like, which is why ours are tested
        return of_bytes(data, rng, seeds)
    if not isinstance(tree, dict | list):
        return of_bytes(data, rng, seeds)
    held, pool = {"": copy.deepcopy(tree)}, list(_slots({"": [tree, other]}))
    raw: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        slots = list(_slots(held))
        if not slots:
            break
        _change(*rng.choice(slots), rng, pool or slots, raw)
    try:
        text = write(held.get("", {}))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        return of_bytes(data, rng, seeds)
    for number, value in enumerate(raw):
        text = re.sub(rf"[\"']?@raw{number}@[\"']?", lambda _, value=value: value, text)
    return _encoded(text)


def _slots(tree: Any) -> Iterator[Slot]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _slots(value)


def _change(holder: Any, key: Any, rng: Random, pool: Sequence[Slot], raw: list[str]) -> None:
    """Changes one place of a tree."""
    value = holder[key]
    match rng.randrange(14):
        case 0:
            del holder[key]
        case 10 | 11 | 12 | 13 if isinstance(holder, dict):
            alike = [there[name] for there, name in pool if name == key and isinstance(there, dict)]
            holder[key] = copy.deepcopy(rng.choice([*alike, _changed_number(value, rng)]))
        case 1 if isinstance(holder, dict):
            others = [name for there, name in pool if isinstance(there, dict)]
            holder[rng.choice([*others, _word(rng)])] = holder.pop(key)
        case 2 if isinstance(value, dict | list):
            there, name = rng.choice(pool)
            if isinstance(value, dict):
                value[name if isinstance(there, dict) else _word(rng)] = copy.deepcopy(there[name])
            else:
                value.insert(rng.randrange(len(value) + 1), copy.deepcopy(there[name]))
        case 3:
            there, name = rng.choice(pool)
            holder[key] = copy.deepcopy(there[name])
        case 4:
            holder[key] = rng.choice(([], {}, [value], {"x": value}, [value, value], None, True, False, [[]], [None]))
        case 5:
            holder[key] = f"@raw{len(raw)}@"
            raw.append(rng.choice(RAW))
        case 6 if isinstance(value, str):
            holder[key] = _changed_text(value, rng)
        case 7:
            holder[key] = _word(rng)
        case _:
            holder[key] = _changed_number(value, rng)


def _changed_number(value: Any, rng: Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _number(rng)
    try:
        near = (value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, value / 3, str(value), float(value))
    except (OverflowError, ValueError):
        return _number(rng)
    return rng.choice((*near, _number(rng)))


def _number(rng: Random) -> int | float:
    return rng.choice(NUMBERS)


def _word(rng: Random) -> str:
    return rng.choice(WORDS)


def _changed_text(text: str, rng: Random) -> str:
    numbers = list(re.finditer(r"[0-9]+", text))
    if numbers and rng.random() < 0.4:
        found = rng.choice(numbers)
        return text[: found.start()] + str(_number(rng)) + text[found.end() :]
    begin = rng.randrange(len(text) + 1)
    end = min(len(text), begin + rng.choice((0, 1, 2, 10)))
    return text[:begin] + rng.choice(("", _word(rng), text[begin:end] * 2, chr(rng.randrange(1, 0x250)))) + text[end:]


def _read_yaml(data: bytes) -> Any:
    if b"*" in data or b"&" in data:
        raise ValueError("aliases may grow without end")
    return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 # both are safe


_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which stands in a file as an escape."""


def _write_json(tree: Any) -> str:
    text = json.dumps(tree, ensure_ascii=False)
    return json.dumps(tree) if _HALF.search(text) else text


def _write_yaml(tree: Any) -> str:
    is_whole = not _HALF.search(json.dumps(tree, ensure_ascii=False, default=str))
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper) if is_whole else yaml.SafeDumper  # libyaml refuses halves
    return str(yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10**6))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape" if re.search("[\udc80-\udcff]", text) else "surrogatepass")
