"""Imports the modules that records reference, in a separate process, and lists the tensors in these modules.

One process has the usual state. Another has an empty environment, another hash seed, meta as the default
device and bfloat16 as the default dtype, as if transformers were building a model. Each process imports this
module as ``__main__``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
from importlib_metadata import EntryPoint

from quark.plugins.discovery import GROUP, Candidate, Source
from quark_devkit.checks.distribution.listed_alone import modules_of, records_of
from quark_devkit.process_state import changes, shared_state

__all__ = ["Imported", "imported_alone"]

_TIMEOUT = 300
_DEPTH = 5
"""Depth of nested containers and objects of a module to which the search for tensors goes."""


@attrs.frozen
class Imported:
    """The observations of a process that imports the modules that the records of plugins reference.

    Attributes:
        error: Why there are no observations, as a predicate; empty after success.
        tensors: Digest of each tensor, by its module and its path in the module.
        changed: Names of the shared state that the imports changed.
    """

    error: str = ""
    tensors: Mapping[str, str] = attrs.field(factory=dict)
    changed: tuple[str, ...] = ()


def imported_alone(sources: tuple[Source, ...], *, is_plain: bool) -> Imported:
    """Return the observations of a fresh process with the import path of this process.

    Args:
        sources: The plugins, each with the module of its entry point.
        is_plain: Whether the process has the usual state, or the other state that the module's docstring
            describes.
    """
    return _imported(sources, tuple(entry or os.getcwd() for entry in sys.path), is_plain)


@lru_cache(maxsize=8)
def _imported(sources: tuple[Source, ...], path: tuple[str, ...], is_plain: bool) -> Imported:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        out = Path(directory) / "imported.json"
        usual = {key: value for key, value in os.environ.items() if not key.startswith("QUARK_")}
        needed = {key: value for key, value in usual.items() if key in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH")}
        environment = {**(usual if is_plain else needed), "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTHONHASHSEED": "1" if is_plain else "2", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, json.dumps([attrs.asdict(source) for source in sources]), str(out)]
        try:
            done = subprocess.run(
                [*command, "plain" if is_plain else "meta"],
                check=False,
                cwd=directory,
                env=environment,
                capture_output=True,
                timeout=_TIMEOUT,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Imported(error=f"is not imported within {_TIMEOUT} s")
        if not out.is_file():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return Imported(error=": ".join([f"ends the process that imports it, with exit code {done.returncode}", *last]))
        seen: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return Imported(tensors=seen["tensors"], changed=tuple(seen["changed"]))


def _main(plugins: str, out: str, state: str) -> None:
    """Import everything, and write the observations as JSON."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 - plugins of models import it; a later import would count as a change

    import quark.checkpoint
    import quark.runs  # noqa: F401 - the core, as in a program that quantizes
    from quark.plugins.catalog import Catalog

    sources = [Source(**row) for row in json.loads(plugins)]
    catalog = Catalog(Candidate(source, EntryPoint(source.entry_point, source.module, GROUP)) for source in sources)
    records = [record for _, record in records_of(catalog, sources)]
    packages = {module.partition(".")[0] for record in records for module in modules_of(record)}
    before = shared_state()
    if state == "plain":
        _import(records)
    else:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            _import(records)
        torch.set_default_dtype(torch.float32)
    changed = changes(before, shared_state())
    own = [name for name in sorted(sys.modules) if name.partition(".")[0] in packages - {"quark"}]
    tensors = dict(pair for name in own for pair in _tensors(name, sys.modules[name], packages, _DEPTH, set()))
    Path(out).write_text(json.dumps({"tensors": tensors, "changed": changed}), encoding="utf-8", newline="\n")


def _import(records: list[Any]) -> None:
    from contextlib import suppress

    from quark.base.lazy import LazyRef, imported

    for record in records:
        values = [*(getattr(record, field.name) for field in attrs.fields(type(record))), *record.exports.values()]
        for reference in (value for value in values if isinstance(value, LazyRef)):
            with suppress(Exception):  # another check loads every reference and reports the errors
                reference.load()
        for module in modules_of(record):
            with suppress(Exception):
                imported(module)


def _tensors(name: str, value: Any, packages: set[str], depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the path and the digest of each tensor in a value.

    The value may be a tensor. Otherwise the search goes into containers, modules, and objects whose class one
    of the packages defines.
    """
    from torch import Tensor

    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, _digest(value)
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            yield from _tensors(f"{name}[{key!r}]", one, packages, depth - 1, seen)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(f"{name}[{number}]", one, packages, depth - 1, seen)
    elif type(value).__name__ == "module" or _package_of(value) in packages:
        for key, one in list(getattr(value, "__dict__", {}).items()):
            if not key.startswith("__") and type(one).__name__ != "module":
                yield from _tensors(f"{name}.{key}", one, packages, depth - 1, seen)
        for key in getattr(type(value), "__slots__", ()):
            yield from _tensors(f"{name}.{key}", getattr(value, key, None), packages, depth - 1, seen)


def _package_of(value: Any) -> str:
    module = getattr(value, "__module__", "") if isinstance(value, type) else type(value).__module__
    return str(module).partition(".")[0]


def _digest(tensor: Any) -> str:
    where = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
    if tensor.device.type == "meta":
        return where
    content = tensor.detach().cpu().contiguous().double().numpy().tobytes()
    return f"{where}, {hashlib.sha256(content).hexdigest()[:16]}"


if __name__ == "__main__":
    _main(*sys.argv[1:])
