"""The record of which distributions provide the formats, observers and algorithms of a checkpoint.

The record is the value of ``plugins`` in the ``quantization_config``. An export writes this value, and a
reader checks it. AMD Quark 0.13, transformers and vLLM ignore it. Example::

    {"formats": {"acme_nf3": {"distribution": "acme-quant", "version": "0.1.0", "layout_version": 1}},
     "observers": {"AcmeRmsObserver": {…}}, "algorithms": {"acme_weighted": {…}}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quark.config.layer import TensorSpec, levels
from quark.config.model import QConfig
from quark.errors import CheckpointError, UnknownNameError
from quark.numbers import canonicalize
from quark.plugins import Registry, algorithms, formats, observers

KEY = "plugins"
"""The key of the block in ``quantization_config``."""

_DISTRIBUTION, _VERSION = r"[a-z0-9]+(-[a-z0-9]+)*", r"[0-9a-z.+!-]+"


def provenance(config: QConfig) -> dict[str, Any]:
    """Return the value of ``plugins`` for a configuration, in JSON form.

    It contains the distribution and the version of every format, observer and algorithm.
    """
    specs = [level for spec in _specs(config) for level in (*levels(spec), *canonicalize(spec))]
    names = {level.dtype.name for level in specs}
    classes = {s.observer_cls if isinstance(s.observer_cls, str) else s.observer_cls.__name__ for s in specs if s.observer_cls is not None}
    return {
        "formats": {name: _entry(formats(), name) | {"layout_version": formats().get(name).layout_version} for name in sorted(names)},
        "observers": {record.class_name: _entry(observers(), record.name) for record in observers() if record.class_name in classes},
        "algorithms": {a.name: _entry(algorithms(), a.name) for a in config.algo_config or () if a.name in algorithms()},
    }


def refuse_unreadable(config: QConfig, checkpoint: str = "the checkpoint") -> None:
    """Check that formats and observers are installed in versions that can read a checkpoint.

    Checkpoints from other tools and from earlier versions name no distributions, so they are not checked.

    Args:
        config: The configuration of the checkpoint. ``config.written_with`` is the value of ``plugins`` in
            the checkpoint.
        checkpoint: A description of the checkpoint, for messages.

    Raises:
        UnknownNameError: A format or an observer is not installed. The message names the distribution that
            provides it.
        CheckpointError: The checkpoint stores a format in a layout version that the installed distribution
            does not read.
    """
    provenance_block = config.written_with
    for name, entry in _entries(provenance_block, "formats"):
        _require(formats(), name, entry, checkpoint)
        version, known = entry.get("layout_version"), formats().get(name).layout_version
        if isinstance(version, int) and not isinstance(version, bool) and version != known:
            source = formats().source(name)
            fix = f"Run pip install --upgrade {source.distribution}" if version > known else "Install the version that wrote the checkpoint"
            raise CheckpointError(
                f"{checkpoint} holds the format '{name}' in layout {version}, written with {_who(entry)}. The installed "
                f"{source.distribution} {source.version} reads only layout {known}. {fix}"
            )
    by_class = {record.class_name for record in observers()}
    for name, entry in _entries(provenance_block, "observers"):
        if name not in by_class:
            _require(observers(), name, entry, checkpoint)


def _specs(config: QConfig) -> Iterator[TensorSpec]:
    """Yield every spec of a configuration."""
    by_name = (config.layer_type_quant_config, config.layer_quant_config, config.kv_cache_quant_config)
    for layer in (config.global_quant_config, *(layer for layers in by_name for layer in layers.values())):
        yield from (s for s in (layer.weight, layer.bias, layer.input_tensors, layer.output_tensors) if s is not None)
    if config.softmax_quant_spec is not None:
        yield config.softmax_quant_spec


def _entry(registry: Registry[Any], name: str) -> dict[str, str]:
    """Return a dictionary with the distribution that registers ``name``, and the distribution's version."""
    source = registry.source(name)
    return {"distribution": source.distribution, "version": source.version}


def _entries(block: Any, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the value of each entry of one kind, such as ``"formats"``.

    Skip malformed entries.
    """
    entries = block.get(kind) if isinstance(block, Mapping) else None
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping):
            yield str(name), entry


def _require(registry: Registry[Any], name: str, entry: Mapping[str, Any], checkpoint: str) -> None:
    """Raise UnknownNameError if ``name`` is not registered.

    The error message names the distribution that ``entry`` contains.
    """
    try:
        registry.get(name)
    except UnknownNameError as error:
        message = f"{checkpoint} was written with the {registry.kind.name} '{name}' of {_who(entry)}. Install that distribution; {error}"
        raise error.saying(message) from None


def _who(entry: Mapping[str, Any]) -> str:
    """Return the distribution and the version in ``entry``, for messages.

    If a name or version is not well-formed, it is not returned, because the author of the file is unknown.
    """
    distribution, version = str(entry.get("distribution", "")), str(entry.get("version", ""))
    if not re.fullmatch(_DISTRIBUTION, distribution):
        return "a distribution that it does not name"
    return f"{distribution} {version}" if re.fullmatch(_VERSION, version) else distribution
