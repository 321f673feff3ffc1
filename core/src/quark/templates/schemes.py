"""Named schemes as documented: those that plugins register, and those that a program registers for itself while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnknownNameError
from quark.names import closest
from quark.plugins import SchemeRecord, schemes
from quark.plugins.attribution import attributed, origin
from quark.plugins.expected import described
from quark.plugins.options import called, checked, options_of


class QuantizationScheme:
    """A scheme: something with a layer configuration. Documented base of the scheme classes.

    Args:
        config: What a layer gets under this scheme; it is copied.
    """

    def __init__(self, config: QLayerConfig) -> None:
        if not isinstance(config, QLayerConfig):
            raise ConfigError(f"this scheme has no QLayerConfig but {config!r}")
        self._config = config.copied()

    @property
    def config(self) -> QLayerConfig:
        """What a layer gets under this scheme: a configuration of its own each time it is asked for."""
        return self._config.copied()


class _RegisteredScheme(QuantizationScheme):
    """A plugin's scheme; its configuration is built anew each time it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def config(self) -> QLayerConfig:
        return _built(self._name)


class QuantizationSchemeCollection:
    """All schemes on this machine by name, and what was registered at run time.

    Plugins' schemes are looked up in the registry whenever they are asked for; nothing is copied from there.
    """

    def __init__(self) -> None:
        self._custom: dict[str, QuantizationScheme] = {}

    def register_scheme(self, scheme_name: str, scheme: QuantizationScheme) -> None:
        """Add a scheme under a new name.

        Raises:
            ConfigError: (a ValueError) The name is taken, or ``scheme`` has no layer configuration.
        """
        if scheme_name in self._custom or scheme_name in schemes():
            raise ConfigError(f"Scheme '{scheme_name}' already registered, please use a different name.")
        if not isinstance(scheme.config, QLayerConfig):
            raise ConfigError(f"the scheme '{scheme_name}' has no QLayerConfig but {scheme.config!r}")
        self._custom[scheme_name] = scheme

    def unregister_scheme(self, scheme_name: str) -> None:
        """Remove a scheme that `register_scheme` added.

        Raises:
            ConfigError: (a ValueError) There is no such scheme, or it comes from an installed distribution.
        """
        if scheme_name in self._custom:
            del self._custom[scheme_name]
            return
        if scheme_name in schemes():
            raise ConfigError(
                f"Scheme '{scheme_name}' not registered as custom scheme, quark built-in schemes cannot be unregistered. "
                f"It comes from {schemes().source(scheme_name).distribution}; QUARK_DISABLED_PLUGINS leaves a plugin out"
            )
        raise UnknownNameError(
            f"Scheme '{scheme_name}' not found, please check the name.{self._hint(scheme_name)}",
            kind="scheme",
            name=scheme_name,
            known=self.get_supported_schemes(),
        )

    def get_supported_schemes(self) -> list[str]:
        """Names of all schemes: plugins' in alphabetical order, their aliases, then one's own in the order of registration."""
        return [*schemes().names(), *(alias for record in schemes() for alias in record.aliases), *self._custom]

    def get_scheme(self, scheme_name: str) -> QuantizationScheme:
        """The scheme of that name, or alias.

        Raises:
            UnknownNameError: (a ValueError) There is none; the closest match is named.
            AmbiguousNameError: Several distributions claim the name.
        """
        if scheme_name in self._custom:
            return self._custom[scheme_name]
        self.record(scheme_name)
        return _RegisteredScheme(scheme_name)

    def layer_config(self, scheme_name: str, options: Mapping[str, Any] | None = None) -> QLayerConfig:
        """What a layer gets under a scheme, built with its options.

        Raises:
            UnknownNameError: (a ValueError) There is no such scheme.
            ConfigError: (a ValueError) The scheme has no such option, or refuses its value; those that it has are named.
            PluginError: The scheme's function failed, or gives no layer configuration.
        """
        if not options:
            return self.get_scheme(scheme_name).config
        whose, record = f"the scheme '{scheme_name}'", self.record(scheme_name)
        build = None if record is None else schemes().load(scheme_name, "config")
        known = () if build is None else options_of(build)
        given = checked(whose, known, options)
        if build is None:
            raise ConfigError(f"{whose} was registered at run time and has no options: leave scheme_options out")
        return _built(scheme_name, given)

    def record(self, scheme_name: str) -> SchemeRecord | None:
        """What a plugin registered under that name; None for a scheme registered at run time. Raises as `get_scheme` does."""
        if scheme_name in self._custom:
            return None
        try:
            return schemes().get(scheme_name)
        except UnknownNameError as error:
            raise UnknownNameError(
                f"Unsupported quantization scheme: {scheme_name}{self._hint(scheme_name)}; {error}",
                kind="scheme",
                name=str(scheme_name),
                known=self.get_supported_schemes(),
            ) from None

    def _hint(self, scheme_name: str) -> str:
        """The closest of the names that only this process knows; the registry's own message covers the others."""
        near = closest(str(scheme_name), self._custom)
        return f" (did you mean '{near}', registered in this program?)" if near else ""


def _built(name: str, options: Mapping[str, Any] | None = None) -> QLayerConfig:
    """What the function of a plugin's scheme builds."""
    build, whose = schemes().load(name, "config"), origin("schemes", name)
    with attributed("building its configuration", whose):
        found = called(f"the scheme '{name}'", build, options) if options else build()
    if not isinstance(found, QLayerConfig):
        raise whose.error(f"builds {described(found)} where a QLayerConfig is wanted")
    return found.copied()  # one spec may serve two tensors in it, and nothing says that it is a new one each time


def scheme_part(scheme_name: str, part: str, what: str) -> QTensorConfig:
    """The tensor spec that a scheme offers for one part of attention.

    Args:
        scheme_name: Name of a registered scheme.
        part: Field of `SchemeRecord` that builds it: ``"kv_cache"`` or ``"attention"``.
        what: How messages call it, such as ``"KV cache scheme"``.

    Raises:
        UnknownNameError: (a ValueError) There is no such scheme, or it has no such part; those that have one are listed.
    """
    able = supported_for(part)
    if scheme_name not in schemes() or getattr(schemes().get(scheme_name), part) is None:
        near = closest(str(scheme_name), able)
        hint = f" Did you mean '{near}'?" if near else ""
        raise UnknownNameError(
            f"Unsupported {what}: {scheme_name}.{hint} Schemes that can serve: {', '.join(able) or 'none'}",
            kind=what,
            name=str(scheme_name),
            known=able,
        )
    build = schemes().load(scheme_name, part)
    with attributed(f"building its {what}", origin("schemes", scheme_name)):
        spec = build()
    if not isinstance(spec, QTensorConfig):
        source = schemes().source(scheme_name)
        raise ConfigError(f"the {what} '{scheme_name}' of {source} gives a {type(spec).__name__}, not a QTensorConfig: mend that plugin")
    return spec


def supported_for(part: str) -> list[str]:
    """Names of the schemes whose record has that part."""
    return [record.name for record in schemes() if getattr(record, part) is not None]
