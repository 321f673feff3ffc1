"""Distributions with one thing wrong each: those of `quark new-plugin` with one file changed."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import attrs

from quark.plugins import Catalog, Record, SchemeRecord, Source
from quark.plugins.discovery import discover
from quark_devkit import Subject, find_subject
from quark_devkit.new_plugin import new_distribution

from .mutant import DISTRIBUTION, Mutant, plugin_of

__all__ = ["HEALTHY", "MUTANTS", "installed"]

PACKAGE = DISTRIBUTION.replace("-", "_")
PLUGIN = f"src/{PACKAGE}/plugin.py"
SCHEME = f"src/{PACKAGE}/w4a8.py"
Change = tuple[str, str, str]
"""A file, a text in it, and the text that takes its place."""


@contextmanager
def installed(
    directory: Path, *changes: Change, files: Mapping[str, str | None] | None = None, rivals: tuple[Record, ...] = ()
) -> Iterator[Subject]:
    """The distribution as a subject: its source, and the metadata of an editable installation.

    Args:
        directory: An empty one.
        changes: What differs from the distribution that is written.
        files: Files that are added, or, with None, taken away.
        rivals: Records of another third party that is there too.
    """
    source = new_distribution(DISTRIBUTION, ["scheme"], directory / "source")
    for name, old, new in changes:
        text = (source / name).read_text(encoding="utf-8")
        assert old in text, f"{name} holds no {old!r}: the mutant would be healthy"
        (source / name).write_text(text.replace(old, new), encoding="utf-8")
    for name, content in (files or {}).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).unlink() if content is None else (source / name).write_text(content, encoding="utf-8")
    site = _metadata(source, directory / "site")
    before = list(sys.path)
    sys.path[:0] = [str(site), str(source / "src")]
    importlib.invalidate_caches()
    try:
        catalog = Catalog(discover())
        if rivals:
            catalog.add(plugin_of(rivals), Source("rival-quant", "1.0", entry_point="rival"))
        yield attrs.evolve(find_subject(catalog, "distribution", DISTRIBUTION), source_directory=source)
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]


def _metadata(source: Path, site: Path) -> Path:
    """Lay out the metadata that the ``pyproject.toml`` stands for."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = site / f"{PACKAGE}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    requirements = [f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", ())]
    (folder / "METADATA").write_text("\n".join([*lines, *requirements, ""]), encoding="utf-8")
    points = [f"{name} = {module}" for name, module in project["entry-points"]["quark"].items()]
    (folder / "entry_points.txt").write_text("\n".join(["[quark]", *points, ""]), encoding="utf-8")
    return site


def mutant(
    check: str, about: str, *changes: Change, files: Mapping[str, str | None] | None = None, rivals: tuple[Record, ...] = ()
) -> Mutant:
    def subject(directory: Path) -> AbstractContextManager[Subject]:
        return installed(directory, *changes, files=files, rivals=rivals)

    return Mutant(f"distribution:{check}", about, subject=subject)


def above(text: str) -> Change:
    """Lines at the beginning of the plugin module."""
    return PLUGIN, "from collections.abc", f"{text}\nfrom collections.abc"


def in_scheme(text: str) -> Change:
    """Lines at the beginning of the module that the record points at."""
    return SCHEME, "from quark.config.layer", f"{text}\nfrom quark.config.layer"


def record(old: str, new: str) -> Change:
    """Another text in the record."""
    return PLUGIN, old, new


def hook(body: str) -> Change:
    """Lines at the end of the hook, behind its record."""
    return PLUGIN, 'for each token",\n    )\n', f'for each token",\n    )\n    {body}\n'


SCHEME_NAME = 'name="mutant_w4a8"'
SUMMARY = 'summary="INT4 weights in groups, INT8 inputs with a scale for each token"'
EXPORTER_HOOK = """
@hookimpl
def quark_register_exporters():
    from quark.plugins import ExporterRecord

    yield ExporterRecord(
        name="mutant_layout",
        summary="a layout",
        exporter="quark_exporters.quark_layout.layout:SafetensorsExporter",
        reader="quark_exporters.quark_layout.layout:QuarkReader",
        quant_methods=("quark",),
    )
"""


def listener(body: str) -> Change:
    """An event hook in the plugin module."""
    return PLUGIN, "\n\n@hookimpl\n", f"\n\n@hookimpl\ndef quark_on_event(event):\n    {body}\n\n\n@hookimpl\n"


COMMAND_HOOK = f"""
@hookimpl
def quark_register_commands():
    from quark.plugins import CommandRecord

    yield CommandRecord(name="mutant-count", summary="count", command="{PACKAGE}.counting:count")
"""
COMMAND: Change = (PLUGIN, "\n\n@hookimpl\n", f"\n{COMMAND_HOOK}\n\n@hookimpl\n")
COMMANDS = {f"src/{PACKAGE}/counting.py": "def count(file: 'Path') -> None:\n    print(file)\n"}
HEAVY_COMMANDS = {f"src/{PACKAGE}/counting.py": "import torch\n\n\ndef count(name: str) -> None:\n    print(torch.ones(len(name)))\n"}


LISTENER = listener("return event.name, event.to_dict()")
IN_A_FOLDER = {f"src/{PACKAGE}/parts/__init__.py": "", f"src/{PACKAGE}/parts/names.py": "NAME = 'mutant_w4a8'\n"}
ONE_PACKAGE = (
    "pyproject.toml",
    '[tool.setuptools.packages.find]\nwhere = ["src"]',
    f'[tool.setuptools]\npackages = ["{PACKAGE}"]\npackage-dir = {{ "" = "src" }}',
)
RIVAL = SchemeRecord(name="mutant_w4a8", summary="another", config="quark_schemes.schemes:int4_wo_64")
BUSY = "import time\nend = time.process_time() + 2\nwhile time.process_time() < end:\n    pass"

HEALTHY = None  # the distribution without a change, which test_distribution_checks.py runs every check on
MUTANTS = (
    mutant("is_found_by_an_entry_point", "raises when it is imported", above("raise RuntimeError('no licence file')")),
    mutant("is_found_by_an_entry_point", "exits when it is imported", above("raise SystemExit(3)")),
    mutant("is_found_by_an_entry_point", "names a module that is not there", ("pyproject.toml", f"{PACKAGE}.plugin", f"{PACKAGE}.plug")),
    mutant("fits_this_core", "is written for another API", record("QUARK_API = (2, 2)", "QUARK_API = (98, 99)")),
    mutant("fits_this_core", "requires a core of the future", ("pyproject.toml", "quark-core>=1.0.0a1,<2", "quark-core>=98,<99")),
    mutant("requires_the_core_within_bounds", "takes any core", ("pyproject.toml", "quark-core>=1.0.0a1,<2", "quark-core")),
    mutant("requires_the_core_within_bounds", "has no upper bound", ("pyproject.toml", "quark-core>=1.0.0a1,<2", "quark-core>=1.0.0a1")),
    mutant("requires_the_core_within_bounds", "does not require it", ("pyproject.toml", '  "quark-core>=1.0.0a1,<2",\n', "")),
    mutant("declares_its_range_of_api_versions", "states none", record("QUARK_API = (2, 2)", "API = (1, 1)")),
    mutant("has_hooks_that_are_called", "misspells a hook", record("def quark_register_schemes", "def quark_register_scheme")),
    mutant("has_hooks_that_are_called", "forgets the marker", record("@hookimpl\n", "")),
    mutant("has_hooks_that_are_called", "has no hook", record("@hookimpl\ndef quark_register_schemes", "def schemes")),
    mutant("registers_records_that_are_kept", "raises halfway", hook("raise OSError('no table of names')")),
    mutant("registers_records_that_are_kept", "yields a string", hook("yield 'mutant_w4a8'")),
    mutant("registers_records_that_are_kept", "has a name in capitals", record(SCHEME_NAME, 'name="Mutant_W4A8"')),
    mutant(
        "registers_a_bounded_number_of_records",
        "registers without end",
        hook(
            'import itertools\n    for i in itertools.count():\n        yield SchemeRecord(name=f"m_{i}", config="json:dumps", summary="s")'
        ),
    ),
    mutant("registers_without_torch", "imports torch in the plugin module", above("import torch")),
    mutant(
        "registers_without_torch",
        "imports torch in the scheme",
        (SCHEME, "from quark.config.layer", "import torch\nfrom quark.config.layer"),
    ),
    mutant("registers_quickly", "computes while it is imported", above(BUSY)),
    mutant("prints_nothing_when_it_is_listed", "greets", above("print('mutant-quant is here')")),
    mutant("does_nothing_else_when_it_is_listed", "sets a variable", above("import os\nos.environ['MUTANT_QUANT'] = '1'")),
    mutant("does_nothing_else_when_it_is_listed", "draws a random number", above("import random\nrandom.random()")),
    mutant("does_nothing_else_when_it_is_listed", "starts a program", above("import subprocess\nsubprocess.run(['true'])")),
    mutant("does_nothing_else_when_it_is_listed", "writes a file", above("open(__file__ + '.log', 'a').close()")),
    mutant("does_nothing_else_when_it_is_listed", "looks a host up", above("import socket\nsocket.gethostbyname('localhost')")),
    mutant("points_at_what_there_is", "names a function that is not there", record(":mutant_w4a8", ":mutant_w4a9")),
    mutant("points_at_what_there_is", "names a module", record(f"{PACKAGE}.w4a8:mutant_w4a8", "quark.config:layer")),
    mutant(
        "points_at_what_there_is", "exports what is not there", record(SUMMARY, f'{SUMMARY}, exports={{"MutantSpec": "json:MutantSpec"}}')
    ),
    mutant("imports_to_the_same_tensors", "has a table of hashes", in_scheme("import torch\nTABLE = torch.tensor([hash('int4') % 997])")),
    mutant(
        "imports_to_the_same_tensors",
        "has a table by a variable",
        in_scheme("import os\nimport torch\nTABLE = {'codes': torch.ones(len(os.environ))}"),
    ),
    mutant("changes_nothing_when_it_is_imported", "switches warnings off", in_scheme("import logging\nlogging.disable(logging.WARNING)")),
    mutant(
        "changes_nothing_when_it_is_imported",
        "replaces a method of the core",
        in_scheme("from quark.config.layer import QLayerConfig as core\ncore.to_dict = lambda self: {}"),
    ),
    mutant("claims_no_name_of_another", "shares a name with another", rivals=(RIVAL,)),
    mutant("replaces_a_built_in_only_by_saying_so", "has the name of a built-in", record(SCHEME_NAME, 'name="int4_wo_64"')),
    mutant(
        "replaces_a_built_in_only_by_saying_so", "has an alias of that name", record(SCHEME_NAME, f'{SCHEME_NAME}, aliases=("int4_wo_64",)')
    ),
    mutant(
        "replaces_a_built_in_only_by_saying_so",
        "replaces what is not there",
        record(SCHEME_NAME, f'{SCHEME_NAME}, replaces="quark-schemes"'),
    ),
    mutant(
        "replaces_a_built_in_only_by_saying_so",
        "reads the checkpoints of a built-in layout",
        (PLUGIN, "\n\n@hookimpl\n", f"\n\n{EXPORTER_HOOK}\n\n@hookimpl\n"),
    ),
    mutant("describes_every_record", "says nothing", record(SUMMARY, 'summary=""')),
    mutant("describes_every_record", "says it in two lines", record(SUMMARY, 'summary="INT4 weights.\\nINT8 inputs."')),
    mutant("has_texts_that_a_terminal_can_show", "clears the screen", record(SUMMARY, 'summary="INT4 \\x1b[2J weights"')),
    mutant("has_texts_that_a_terminal_can_show", "turns the text around", record(SUMMARY, f'{SUMMARY}, clients=("\\u202evllm",)')),
    mutant("hears_every_event", "wants a field that few events have", listener("event.block.upper()")),
    mutant("hears_every_event", "counts on a rate that is not known yet", listener("getattr(event, 'seconds_left', 0.0) + 1.0")),
    mutant("hears_every_event", "knows the names of today", listener("{'run_started': 1}[event.name]")),
    mutant("prints_nothing_when_it_hears", "prints", listener("print(event.name)")),
    mutant("hears_quickly", "computes", listener("sum(range(10_000_000))")),
    mutant("hears_quickly", "sleeps", listener("__import__('time').sleep(0.05)")),
    mutant("changes_nothing_when_it_hears", "silences warnings", listener("__import__('logging').disable(30)")),
    mutant("shows_the_help_of_its_commands", "annotates an argument with a type that is not imported", COMMAND, files=COMMANDS),
    mutant("shows_the_help_of_its_commands", "imports torch for a help text", COMMAND, files=HEAVY_COMMANDS),
    mutant("builds_a_wheel", "names a package that is not there", (*ONE_PACKAGE[:2], ONE_PACKAGE[2].replace(PACKAGE, "missing"))),
    mutant(
        "has_a_wheel_with_all_that_records_point_at",
        "leaves a folder out",
        ONE_PACKAGE,
        record(f"{PACKAGE}.w4a8:", f"{PACKAGE}.parts.w4a8:"),
        files={f"src/{PACKAGE}/parts/__init__.py": "", f"src/{PACKAGE}/parts/w4a8.py": "from mutant_quant.w4a8 import mutant_w4a8\n"},
    ),
    mutant("has_a_typed_wheel", "has no py.typed", files={f"src/{PACKAGE}/py.typed": None}),
    mutant(
        "registers_the_same_once_it_is_installed",
        "imports from a folder that is left out",
        ONE_PACKAGE,
        above(f"from {PACKAGE}.parts.names import NAME"),
        record(SCHEME_NAME, "name=NAME"),
        files=IN_A_FOLDER,
    ),
)
