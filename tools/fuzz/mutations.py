"""Damage the files of a checkpoint at random; the same seed gives the same damage."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.fuzz.sources import FILES, QUANTIZED

__all__ = ["DAMAGES", "damage", "damaged"]

VALUES: list[Any] = [None, True, -1, 0, 7, 10**6, 1.5, "", "x", [], {}, [[1]], {"a": 1}, "\u0000", [None], 10**30, float("nan")]
"""New values for a field of a JSON file."""
_INDEX = "model.safetensors.index.json"
_PLACES = ("../float/model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "\u0000", "gone.safetensors", "config.json")


def damage(directory: Path, source: str, rng: random.Random) -> str:
    """Damage a copy of a source in place, and return a description of the damage."""
    kinds = [name for name, (of, _) in DAMAGES.items() if source in of]
    return DAMAGES[rng.choice(kinds)][1](directory, source, rng)


def damaged(data: bytes, file: str, rng: random.Random) -> tuple[bytes, str]:
    """Return the changed contents of a file, and a description of the change."""
    if not file.endswith(".safetensors"):
        return (_with_a_field_changed if rng.random() < 0.6 else _with_bytes_changed)(data, rng)
    if rng.random() < 0.3:
        return _with_bytes_changed(data, rng)
    header, body = _split(data)
    return _joined(*_with_a_field_changed(header, rng), body)


def _file(directory: Path, source: str, rng: random.Random) -> str:
    name = rng.choice(FILES[source])
    data, what = damaged((directory / name).read_bytes(), name, rng)
    (directory / name).write_bytes(data)
    return f"{name}: {what}"


def _quantization_config(directory: Path, source: str, rng: random.Random) -> str:
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    changed, what = _with_a_field_changed(json.dumps(config["quantization_config"]).encode(), rng)
    file.write_text(json.dumps(config | {"quantization_config": json.loads(changed)}))
    return f"quantization_config: {what}"


def _two_fields(directory: Path, source: str, rng: random.Random) -> str:
    file = directory / "config.json"
    data, first = _with_a_field_changed(file.read_bytes(), rng)
    data, second = _with_a_field_changed(data, rng)
    file.write_bytes(data)
    return f"config.json: {first}; {second}"


def _nested(directory: Path, source: str, rng: random.Random) -> str:
    """Put a deeply nested value into the first object of a JSON file."""
    name = rng.choice([n for n in FILES[source] if not n.endswith(".safetensors")])
    text = (directory / name).read_text(encoding="utf-8")
    depth, marks = rng.choice([500, 990, 5000, 200_000]), rng.choice(["[]", "{}"])
    begin, end = (marks[0] * depth, marks[1] * depth) if marks == "[]" else ('{"a":' * depth + "1", "}" * depth)
    (directory / name).write_text(text.replace("{", f'{{"nested": {begin}{end},', 1), encoding="utf-8")
    return f"{name}: {depth} nested {marks}"


def _index_place(directory: Path, source: str, rng: random.Random) -> str:
    file = directory / _INDEX
    index = json.loads(file.read_bytes())
    tensor, place = rng.choice(sorted(index["weight_map"])), rng.choice(_PLACES)
    index["weight_map"][tensor] = place
    file.write_text(json.dumps(index))
    return f"{_INDEX}: {tensor} in {place!r}"


def _extra_file(directory: Path, source: str, rng: random.Random) -> str:
    """Copy a shard over another shard, or to a new name, so that the checkpoint has another set of files."""
    shards = sorted(directory.glob("*.safetensors"))
    from_, to = rng.choice(shards), directory / rng.choice([s.name for s in shards] + ["model.safetensors"])
    if from_ != to:
        shutil.copy(from_, to)
    return f"{from_.name} copied to {to.name}"


def _link(directory: Path, source: str, rng: random.Random) -> str:
    name = rng.choice(FILES[source])
    to = rng.choice(["/dev/zero", "/etc/hostname", "/", name, "../gone", "/dev/full"])
    (directory / name).unlink()
    with suppress(OSError):  # on Windows, few users may make links; then the file is missing
        os.symlink(to, directory / name)
    return f"{name}: link to {to}"


def _other_numbers(directory: Path, source: str, rng: random.Random) -> str:
    """Set all bytes of a file's data, or a part of them, to one of a few values, some of which make NaN."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    header, body = _split(file.read_bytes())
    begin = rng.randrange(len(body)) if rng.random() < 0.7 else 0
    length = min(len(body) - begin, rng.choice([2, 64, 4096, len(body)]))
    byte = rng.choice([0x00, 0xFF, 0x7F, 0x80])
    file.write_bytes(_joined(header, "", body[:begin] + bytes([byte]) * length + body[begin + length :])[0])
    return f"{file.name}: {length} bytes {byte:#x} at {begin}"


def _bit(directory: Path, source: str, rng: random.Random) -> str:
    """Flip one bit of a file with tensors, either in the header or anywhere in the file."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    place, bit = rng.randrange(8 + int.from_bytes(data[:8], "little") if rng.random() < 0.3 else len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"{file.name}: bit {bit} of byte {place}"


def _header_swap(directory: Path, source: str, rng: random.Random) -> str:
    """Give a tensor another tensor's entry, another name, or another dtype of the same width."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    header, body = _split(file.read_bytes())
    entries = json.loads(header)
    names = sorted(n for n in entries if n != "__metadata__")
    one, other = rng.choice(names), rng.choice(names)
    change = rng.choice(["swap", "rename", "dtype", "duplicate"])
    if change == "swap":
        entries[one], entries[other] = entries[other], entries[one]
    elif change == "rename":
        entries[rng.choice(["", "model", "x" * 5000, f"{other}.x", "model.layers.7.mlp.up_proj.weight", "\u0000"])] = entries.pop(one)
    elif change == "dtype":
        entries[one]["dtype"] = rng.choice(["F16", "I16", "U16", "F8_E4M3", "F4", "C64", "I32", "bf16"])
    text = json.dumps(entries).encode()
    if change == "duplicate":
        text = text[:-1] + b", " + json.dumps({one: entries[other]}).encode()[1:]
    file.write_bytes(_joined(text, "", body)[0])
    return f"{file.name}: {change} {one} {other}"


def _own_code(directory: Path, source: str, rng: random.Random) -> str:
    """Make a configuration name code that is in the checkpoint. This code would write a file if it ran."""
    name = rng.choice(["config.json", "tokenizer_config.json"])
    (directory / "own.py").write_text(f"open({str(directory.parent / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    kinds = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    data = json.loads((directory / name).read_bytes()) | {"auto_map": kinds}
    if rng.random() < 0.5:
        data |= {"model_type": "own", "tokenizer_class": "Own"}
    (directory / name).write_text(json.dumps(data))
    return f"{name}: code of its own"


_ALL = tuple(FILES)
DAMAGES: dict[str, tuple[tuple[str, ...], Callable[[Path, str, random.Random], str]]] = {
    "a field or bytes of one file": (_ALL, _file),
    "again, a field or bytes of one file": (_ALL, _file),
    "two fields of config.json": (_ALL, _two_fields),
    "a field of the quantization_config": (QUANTIZED, _quantization_config),
    "another field of the quantization_config": (QUANTIZED, _quantization_config),
    "a nested value": (_ALL, _nested),
    "a place in the index": (("sharded",), _index_place),
    "another set of files": (_ALL, _extra_file),
    "a link": (_ALL, _link),
    "other numbers": (_ALL, _other_numbers),
    "a flipped bit": (_ALL, _bit),
    "an entry of a header": (_ALL, _header_swap),
    "code of its own": (_ALL, _own_code),
}
"""Kinds of damage: their sources and functions."""


def _split(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def _joined(header: bytes, what: str, body: bytes) -> tuple[bytes, str]:
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body, what


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return paths to the values within a JSON value: at most sixty for each object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in list(items)[:60] for path in ((*at, key), *_places(inner, (*at, key)))]


def _with_a_field_changed(text: bytes, rng: random.Random) -> tuple[bytes, str]:
    data = json.loads(text)
    if not (places := _places(data)):
        return text, "nothing"
    *path, last = rng.choice(places)
    owner = data
    for key in path:
        owner = owner[key]
    value = rng.choice(VALUES)
    if gone := rng.random() < 0.2:
        del owner[last]
    else:
        owner[last] = value
    return json.dumps(data).encode(), f"{'.'.join(map(str, (*path, last)))} {'gone' if gone else f'= {value!r}'}"


def _with_bytes_changed(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    at = rng.randrange(min(len(data), 4000))
    return rng.choice(
        [
            (data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], f"another byte at {at}"),
            (data[:at], f"cut at {at}"),
            (data[:at] + b"\xff\xfe" + data[at:], f"no UTF-8 at {at}"),
            (b"", "empty"),
            (b"[" * 2000 + b"]" * 2000, "nested lists"),
            (b"[]", "a list"),
            (b"7", "a number"),
            (b"\0" * 40, "zeros"),
        ]
    )
