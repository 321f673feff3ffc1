"""The plugin of quark-tiny-model, which registers the command ``quark demo``. It does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import CommandRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_commands"]

QUARK_API = (2, 2)


@hookimpl
def quark_register_commands() -> Iterator[CommandRecord]:
    """Yield the record of the command ``quark demo``."""
    yield CommandRecord(
        name="demo",
        summary="Quantize the bundled tiny model with every scheme, export it, load it again and compare it with the original.",
        command="quark_tiny_model.demo:demo",
    )
