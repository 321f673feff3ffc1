"""AMD Quark's public classes for schemes, and functions that look up a scheme's configuration by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quark.base.lazy import ObjectRef
from quark.base.names import closest
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnknownNameError
from quark.plugins import SchemeRecord, schemes
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import called, checked
from quark.plugins.record_fields import described
from quark.plugins.records import RunTimeScheme

RUN_TIME_SUMMARY = "registered by this program"
"""Summary of a scheme or a template that the program has registered, and no plugin."""


class QuantizationScheme:
    """A scheme. A layer configuration defines it. In AMD Quark, the base class of schemes has this name.

    Args:
        config: Configuration of a layer under this scheme. The scheme stores a copy.
    """

    def __init__(self, config: QLayerConfig) -> None:
        if not isinstance(config, QLayerConfig):
            raise ConfigError(f"the configuration of a scheme must be a QLayerConfig, not {config!r}")
        self._config = config.copied()

    @property
    def config(self) -> QLayerConfig:
        """Configuration of a layer under this scheme. Each access returns a new copy."""
        return self._config.copied()


class QuantizationSchemeCollection:
    """AMD Quark's interface for schemes. All instances use the same registry (`quark.plugins.schemes`)."""

    def register_scheme(self, scheme_name: str, scheme: QuantizationScheme) -> None:
        """Add a scheme under a new name.

        Raises:
            ConfigError: (a ValueError) The name is taken or contains a colon, or ``scheme`` has no layer
                configuration.
        """
        if scheme_name in schemes():
            raise ConfigError(f"Scheme '{scheme_name}' already registered, please use a different name.")
        if not isinstance(scheme.config, QLayerConfig):
            raise ConfigError(f"the configuration of the scheme '{scheme_name}' must be a QLayerConfig, not {scheme.config!r}")
        attention = None if _attention_config(scheme.config) is None else ObjectRef(lambda: _attention_config(scheme.config))
        try:
            record = RunTimeScheme(
                name=scheme_name,
                summary=RUN_TIME_SUMMARY,
                config=ObjectRef(lambda: scheme.config),
                kv_cache=attention,
                attention=attention,
                scheme=scheme,
            )
        except ValueError as error:
            raise ConfigError(f"this scheme cannot be registered: {error}") from None
        schemes().register(record)

    def unregister_scheme(self, scheme_name: str) -> None:
        """Remove a scheme that `register_scheme` added.

        Raises:
            ConfigError: (a ValueError) There is no such scheme, or it comes from an installed distribution.
        """
        if scheme_name in schemes().run_time_names():
            schemes().unregister(scheme_name)
            return
        if scheme_name in schemes():
            raise ConfigError(
                f"Scheme '{scheme_name}' not registered as custom scheme, quark built-in schemes cannot be unregistered. "
                f"It comes from {schemes().source(scheme_name).distribution}; to leave that plugin out, set QUARK_DISABLED_PLUGINS"
            )
        raise UnknownNameError(
            f"Scheme '{scheme_name}' not found, please check the name.{_run_time_hint(scheme_name)}",
            kind="scheme",
            name=scheme_name,
            known=self.get_supported_schemes(),
        )

    def get_supported_schemes(self) -> list[str]:
        """Return the names of all schemes.

        The list begins with the sorted names of the plugins' schemes. Then follow their aliases, and then the
        names of the schemes that the program has registered.
        """
        own = schemes().run_time_names()
        return [*schemes().plugin_names(), *(alias for record in schemes() for alias in record.aliases), *own]

    def get_scheme(self, scheme_name: str) -> QuantizationScheme:
        """Return the scheme whose name or alias is ``scheme_name``.

        Raises:
            UnknownNameError: (a ValueError) There is no such scheme. The message names the closest match.
            AmbiguousNameError: Several distributions register the name.
            PluginError: The function of the scheme failed, or returned no `QLayerConfig`.
        """
        record = scheme_record(scheme_name)
        return record.scheme if isinstance(record, RunTimeScheme) else QuantizationScheme(_built(scheme_name))


def scheme_record(scheme_name: str) -> SchemeRecord:
    """Return the record of a scheme.

    Raises:
        UnknownNameError: (a ValueError) There is no such scheme. The message names the closest match.
        AmbiguousNameError: Several distributions register the name.
    """
    try:
        return schemes().get(scheme_name)
    except UnknownNameError as error:
        raise error.saying(f"Unsupported quantization scheme: {scheme_name}{_run_time_hint(scheme_name)}; {error}") from None


def scheme_config(scheme_name: str, options: Mapping[str, Any] | None = None) -> QLayerConfig:
    """Create and return the layer configuration of a scheme. ``options`` are options of the scheme.

    Raises:
        UnknownNameError: (a ValueError) There is no such scheme.
        ConfigError: (a ValueError) The scheme has no such option, or refuses the value of an option. The
            message lists the options of the scheme.
        PluginError: The function of the scheme failed, or returned no `QLayerConfig`.
    """
    record = scheme_record(scheme_name)
    if not options:
        return _built(scheme_name)
    if isinstance(record, RunTimeScheme):
        raise ConfigError(f"the scheme '{scheme_name}' was registered at run time and has no options: leave scheme_options out")
    return _built(scheme_name, checked(f"the scheme '{scheme_name}'", schemes().options(scheme_name), options))


def _run_time_hint(scheme_name: str) -> str:
    """Return a hint that names the most similar scheme that this program registered, or an empty text."""
    near = closest(str(scheme_name), schemes().run_time_names())
    return f" (did you mean '{near}', registered in this program?)" if near else ""


def _built(name: str, options: Mapping[str, Any] | None = None) -> QLayerConfig:
    """Return the `QLayerConfig` that a scheme's function builds. Raise an error for any other result."""
    build, whose = schemes().load_config(name), origin("schemes", name)
    with attributed("building its configuration", whose):
        layer = called(f"the scheme '{name}'", build, options) if options else build()
    if not isinstance(layer, QLayerConfig):
        raise whose.error(f"builds {described(layer)} instead of a QLayerConfig")
    return layer.copied()  # two tensors may share a spec, and the function may return the same object twice


def _attention_config(layer: QLayerConfig) -> QTensorConfig | None:
    """Return the configuration of the KV cache and attention for a scheme.

    ``layer`` is the layer configuration of the scheme. The result is ``layer.output_tensors``, or
    ``layer.input_tensors`` if outputs stay float. Return None if this configuration is dynamic or has
    several levels.
    """
    spec = layer.output_tensors or layer.input_tensors
    return spec if isinstance(spec, QTensorConfig) and not spec.is_dynamic else None


def scheme_part(scheme_name: str, part: Literal["kv_cache", "attention"], what: str) -> TensorSpec:
    """Return the tensor configuration that a scheme provides for one part of attention.

    Args:
        scheme_name: Name of a registered scheme.
        part: The field of `SchemeRecord` whose function builds the configuration.
        what: Description of the part for messages, such as ``"KV cache scheme"``.

    Raises:
        UnknownNameError: (a ValueError) There is no such scheme, or the scheme has no configuration for this
            part. The message lists the schemes that have one.
    """
    able = [record.name for record in schemes() if getattr(record, part) is not None]
    record = schemes().get(scheme_name) if scheme_name in schemes() else None
    if record is None or getattr(record, part) is None:
        near = closest(str(scheme_name), able)
        hint = f" Did you mean '{near}'?" if near else ""
        raise UnknownNameError(
            f"Unsupported {what}: {scheme_name}.{hint} Schemes that provide one: {', '.join(able) or 'none'}",
            kind=what,
            name=str(scheme_name),
            known=able,
        )
    build = schemes().load_kv_cache(scheme_name) if part == "kv_cache" else schemes().load_attention(scheme_name)
    with attributed(f"building its {what}", origin("schemes", scheme_name)):
        spec = build()
    if isinstance(spec, QTensorConfig):
        return spec
    if part == "kv_cache" and isinstance(spec, list) and spec and all(isinstance(level, QTensorConfig) for level in spec):
        return spec
    source = schemes().source(scheme_name)
    raise ConfigError(f"the {what} '{scheme_name}' of {source} returns a {type(spec).__name__}, not a QTensorConfig: fix that plugin")
