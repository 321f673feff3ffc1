"""Writes the files of a new distribution from templates, for some kinds of plugins and for the distribution's
name."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Self

import attrs

from quark.base.version import VERSION
from quark.errors import ConfigError, OutputError
from quark.plugins.api_version import API_VERSION
from quark.plugins.discovery import normalized
from quark.plugins.registries import KINDS
from quark.plugins.registry import Kind

__all__ = ["LINE_LENGTH", "PLUGIN_KINDS", "Naming", "PluginKind", "new_distribution", "rendered"]

LINE_LENGTH = 120
"""Longest line of generated code, as in the generated pyproject.toml."""
_TEMPLATES = files("quark_devkit.new_plugin") / "templates"
_SUFFIX = ".template"
_PARTS = ("record.py", "about.md")
"""Templates of a kind for plugin.py and the README. The other templates in its folder are modules."""
_WHOLE = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "ci.yml": ".github/workflows/ci.yml",
    "__init__.py": "src/{package}/__init__.py",
    "plugin.py": "src/{package}/plugin.py",
    "test_conformance.py": "tests/test_conformance.py",
}
"""Templates of files that every distribution has, with their paths."""


@attrs.frozen
class PluginKind:
    """A kind of plugin that the generator can write.

    Attributes:
        name: Name of the kind, and of the folder with its templates. The command-line option has ``-`` for
            ``_``.
        registry: Registry of the kind's records, such as ``"algorithms"``.
        ending: Suffix of the generated record's name: ``"w4a8"`` in ``"acme_w4a8"``.
        summary: Description for ``--help``.
        requires: Requirements of the code besides quark-core, without versions.
        subject: The conformance suite's name of the kind, if the suite does not use ``name``.
        companions: Plugins that the generator writes together with this kind, such as a scheme for a format.
    """

    name: str
    registry: str
    ending: str
    summary: str
    requires: tuple[str, ...] = ()
    subject: str = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True))
    companions: tuple[PluginKind, ...] = ()

    @property
    def plugins(self) -> tuple[PluginKind, ...]:
        """Return this kind and its companions. Each of them gets a record."""
        return (self, *self.companions)

    @property
    def option(self) -> str:
        """Return the command-line option that chooses this kind."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def hooked(self) -> Kind:
        """Return the `Kind` of this kind's records: their hook and their class."""
        return next(kind for kind in KINDS if kind.plural == self.registry)

    @property
    def conformance(self) -> str:
        """Return the class of `quark_devkit` whose subclasses test a plugin of this kind."""
        return f"{self.subject.title().replace('_', '')}Conformance"


PLUGIN_KINDS = (
    PluginKind("scheme", "schemes", "w4a8", "INT4 weights in groups, INT8 inputs per token, from existing formats", ("quark-schemes",)),
    PluginKind("format", "formats", "int3", "a number format: 3-bit integers and their packing", ("torch",)),
    PluginKind(
        "vector",
        "formats",
        "pairs",
        "a number format that rounds pairs of weights to a learned codebook, and its scheme",
        ("torch",),
        subject="format",
        companions=(PluginKind("vector_scheme", "schemes", "pairs_g32", "its scheme", ("quark-schemes",), subject="scheme"),),
    ),
    PluginKind("observer", "observers", "quantile", "an observer: a range from a quantile of the magnitudes", ("torch",)),
    PluginKind("rounding", "algorithms", "clipped", "a rounding: narrows ranges if that reduces the output error", ("attrs", "torch")),
    PluginKind(
        "transform", "algorithms", "balanced", "a transform: moves scale inside MLPs and keeps the model's function", ("attrs", "torch")
    ),
    PluginKind("block_tuning", "algorithms", "nudged", "a tuning: rescales norms if that improves a rounded block", ("attrs", "torch")),
    PluginKind(
        "branch", "algorithms", "channels", "a branch beside layers: adds the rounding error of a few channels in float", ("attrs", "torch")
    ),
    PluginKind("template", "templates", "lm", "a model family: its class, and the facts about its structure", ("torch", "transformers")),
    PluginKind("layout", "exporters", "box", "a checkpoint layout: its exporter and its reader", ("safetensors", "torch")),
    PluginKind(
        "selector", "selectors", "ends", "a selector of schemes: larger schemes for the first and last layers", ("quark-workbench",)
    ),
    PluginKind("layer_type", "layer_types", "gated", "a linear layer with a gain for each output", ("torch",)),
    PluginKind("dataset", "datasets", "dialogs", "a source of calibration text: reads each dialog of a file as a chat"),
    PluginKind("metric", "metrics", "rank", "a metric of evaluations: the rank of the right token", ("torch",)),
    PluginKind("quant_mode", "quant_modes", "whole", "a quantization mode: one scale for a whole model", ("torch",)),
    PluginKind("graph_op", "graph_ops", "mish", "an operator of FX graph mode: mish, which quark-graph leaves float", ("torch",)),
)
"""The kinds of plugins; each kind's templates are in the folder with its name."""


def new_distribution(name: str, kinds: Iterable[str], directory: Path | None = None) -> Path:
    """Write a distribution with a plugin of each kind, and return its directory.

    Args:
        name: Name of the distribution, such as ``"acme-quant"``.
        kinds: Names of `PLUGIN_KINDS`, at least one.
        directory: Where to write; None for a directory of the distribution's name in the working directory.

    Raises:
        ConfigError: The name is invalid, or a kind is unknown or missing.
        OutputError: The directory is not empty, is a file, or cannot be written.
    """
    naming, chosen = Naming.of(name), _chosen(kinds)
    out = Path(naming.distribution) if directory is None else directory
    if out.exists() and not out.is_dir():
        raise OutputError(f"'{out}' is a file: choose a directory that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"the directory '{out}' is not empty: choose another directory, since the command overwrites no files")
    texts = rendered(naming, chosen)
    try:
        for path, text in texts.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"'{out}' cannot be written ({error.strerror or error}): choose a directory that you can write to") from error
    return out


def rendered(naming: Naming, kinds: Sequence[PluginKind]) -> dict[str, str]:
    """Return the text of every file of a distribution, by its path."""
    kinds = [plugin for kind in kinds for plugin in kind.plugins]
    values = _values(naming, kinds)
    texts = {path.format(package=naming.package): _render(f"distribution/{name}", values) for name, path in _WHOLE.items()}
    texts[f"src/{naming.package}/py.typed"] = ""
    for kind in kinds:
        for module in _modules(kind):
            texts[f"src/{naming.package}/{module}"] = _render(f"{kind.name}/{module}", values)
    return texts


def _chosen(kinds: Iterable[str]) -> list[PluginKind]:
    """Return the kinds with these names, each once, in the order of `PLUGIN_KINDS`."""
    names = set(kinds)
    known = [kind.name for kind in PLUGIN_KINDS]
    if unknown := sorted(names - set(known)):
        raise ConfigError(f"there is no kind of plugin '{unknown[0]}': use one of {', '.join(known)}")
    if not names:
        raise ConfigError(f"nothing to write: choose at least one of {', '.join(kind.option for kind in PLUGIN_KINDS)}")
    return [kind for kind in PLUGIN_KINDS if kind.name in names]


def _values(naming: Naming, kinds: Sequence[PluginKind]) -> dict[str, str]:
    """Return the values for the placeholders in the templates."""
    names = {
        "distribution": naming.distribution,
        "package": naming.package,
        "prefix": naming.prefix,
        "Prefix": naming.class_prefix,
        "PREFIX": naming.prefix.upper(),
    }
    classes = {kind.conformance for kind in kinds} | {"DistributionConformance"}
    return names | {
        "api": str((API_VERSION, API_VERSION)),
        "kinds": _enumerated(list(dict.fromkeys(kind.subject.replace("_", " ") for kind in kinds))),
        "dependencies": "\n".join(f'  "{requirement}",' for requirement in _requirements(kinds)),
        "hooks": _hooks(kinds, names),
        "tests": "".join(_test(kind, naming) for kind in kinds).rstrip("\n"),
        "plugin_imports": _import("quark.plugins", {kind.hooked.record.__name__ for kind in kinds} | {"hookimpl"}),
        "test_imports": _import("quark_devkit", classes),
        "files": "\n".join(_file_row(kind, module, names) for kind in kinds for module in _modules(kind)),
        "abouts": "\n".join(_render(f"{kind.name}/about.md", names) for kind in kinds),
    }


def _hooks(kinds: Sequence[PluginKind], names: Mapping[str, str]) -> str:
    """Return the source of the hooks in ``plugin.py``: one hook for each registry. It yields the records of
    all kinds in that registry."""
    texts = []
    for registry in dict.fromkeys(kind.registry for kind in kinds):
        members = [kind for kind in kinds if kind.registry == registry]
        hooked = members[0].hooked
        records = "".join(_render(f"{kind.name}/record.py", names) for kind in members).rstrip("\n")
        things = hooked.name if len(members) == 1 else hooked.plural.replace("_", " ")
        values = {"hook": hooked.hook, "record": hooked.record.__name__, "things": things, "records": records}
        texts.append(_render("distribution/hook.py", {**names, **values}))
    return "".join(texts).rstrip("\n")


def _test(kind: PluginKind, naming: Naming) -> str:
    record_class, record_name = naming.class_of(kind.ending), f"{naming.prefix}_{kind.ending}"
    values = {"record_class": record_class, "conformance": kind.conformance, "record_name": record_name}
    return _render("distribution/test_of_record.py", values)


def _requirements(kinds: Sequence[PluginKind]) -> list[str]:
    """Return the sorted requirements. Requirements of this project's distributions are below the project's
    next major version."""
    bound = f">={VERSION},<{int(VERSION.partition('.')[0]) + 1}"
    names = {"quark-core", *(name for kind in kinds for name in kind.requires)}
    return sorted(f"{name}{bound}" if name.startswith("quark-") else name for name in names)


def _import(module: str, names: Iterable[str]) -> str:
    """Return an import in the formatter's style, on one line if it fits."""
    ordered = sorted(names)
    line = f"from {module} import {', '.join(ordered)}"
    return line if len(line) <= LINE_LENGTH else "\n".join([f"from {module} import (", *(f"    {name}," for name in ordered), ")"])


def _modules(kind: PluginKind) -> list[str]:
    """Return the names of the modules of a kind."""
    names = sorted(file.name.removesuffix(_SUFFIX) for file in (_TEMPLATES / kind.name).iterdir() if file.name.endswith(_SUFFIX))
    return [name for name in names if name not in _PARTS]


def _file_row(kind: PluginKind, module: str, names: Mapping[str, str]) -> str:
    """Return the row of a module in the README's table: its path and the first sentence of its docstring."""
    first = _render(f"{kind.name}/{module}", names).splitlines()[0].strip('"')
    return f"| `src/{names['package']}/{module}` | {first.partition('. ')[0].rstrip('.')} |"


def _render(name: str, values: Mapping[str, str]) -> str:
    return Template((_TEMPLATES / f"{name}{_SUFFIX}").read_text(encoding="utf-8")).substitute(values)


def _enumerated(nouns: Sequence[str]) -> str:
    """Return a capitalized phrase: ``"A scheme, a format and an observer"``."""
    *others, last = [f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" for noun in nouns]
    phrase = f"{', '.join(others)} and {last}" if others else last
    return phrase[0].upper() + phrase[1:]


_DISTRIBUTION = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
"""The names of distributions. Source: the specification of names and normalization of the Python Packaging
Authority (PEP 508, PEP 503).
"""
_SUBJECT_WORDS = {"plugin", "plugins", "quant", "quantization", "quantizer", "quark"}
"""Generic words of a distribution's name, which do not identify it."""
_TAKEN = {"attr", "attrs", "quark", "safetensors", "tests", "torch", "transformers", *sys.stdlib_module_names}
"""Names of packages that would collide with the new one."""


@attrs.frozen
class Naming:
    """The names of one distribution.

    Attributes:
        distribution: Normalized name, such as ``"acme-quant"``.
        package: Import name, such as ``"acme_quant"``.
        prefix: First part of the names of records, such as ``"acme"``.

    >>> naming = Naming.of("Acme.Quant")
    >>> naming.distribution, naming.package, naming.prefix, naming.class_prefix
    ('acme-quant', 'acme_quant', 'acme', 'Acme')
    """

    distribution: str
    package: str
    prefix: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the names of the distribution ``name``, in any spelling that package indexes accept.

        Raises:
            ConfigError: ``name`` is not a valid distribution name, or no package can be imported by the name
                that follows from it.
        """
        if not _DISTRIBUTION.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a distribution name: write ASCII letters and digits with '-', '_' or '.' between them, such as acme-quant"
            )
        distribution = normalized(name)
        package = distribution.replace("-", "_")
        if not package.isidentifier() or keyword.iskeyword(package):
            raise ConfigError(
                f"'{distribution}' would be imported as '{package}', which is not a valid name in Python: choose another name"
            )
        if package in _TAKEN:
            raise ConfigError(f"'{distribution}' would be imported as '{package}', which is another package: choose another name")
        own = "_".join(word for word in package.split("_") if word not in _SUBJECT_WORDS)
        return cls(distribution, package, own if own.isidentifier() else package)

    @property
    def class_prefix(self) -> str:
        """Return the first part of the names of classes, such as ``"Acme"``."""
        return "".join(word.capitalize() for word in self.prefix.split("_"))

    def class_of(self, ending: str) -> str:
        """Return the name of a class for the record whose name has the given ending: ``"AcmeInt3"`` for
        ``"int3"``."""
        return self.class_prefix + "".join(word.capitalize() for word in ending.split("_"))
