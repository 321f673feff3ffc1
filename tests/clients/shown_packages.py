"""Make our packages importable in an interpreter that does not have them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["shown_packages"]

_NEEDED = ("pluggy", "importlib-metadata")
"""Packages that plugin discovery needs and vLLM does not install."""


def shown_packages(site: Path) -> Path:
    """Return a new folder of links to our packages that ``pip install quark-vllm`` would install, with their entry points."""
    site.mkdir()
    brought = [Requirement(text) for text in distribution("quark-core").requires or ()]
    plugins = {one.name for one in brought if one.marker is not None and one.marker.evaluate({"extra": "all"})}
    for name in {"quark-core", "quark-vllm", *plugins, *(name for root in _NEEDED for name in _required(root))}:
        found = distribution(name)
        metadata = next(Path(str(found.locate_file(f))).parent for f in found.files or () if f.name == "METADATA")
        (site / metadata.name).symlink_to(metadata)
        for package in (found.read_text("top_level.txt") or name.replace("-", "_")).split():
            spec = find_spec(package)  # None for stubs, which are not modules
            if spec is not None and spec.submodule_search_locations:
                (site / package).symlink_to(spec.submodule_search_locations[0])
    return site


def _required(name: str) -> Iterator[str]:
    """Yield the name of a distribution and of all distributions that it requires."""
    yield name
    for requirement in map(Requirement, distribution(name).requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _required(requirement.name)
