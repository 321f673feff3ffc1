"""Marks in the documentation's sources: a line ``{{ word argument }}`` stands for text from the code.

========================  ==========================================================================
``{{ table KIND }}``      the records of a kind, such as ``schemes``
``{{ options KIND }}``    the options of each of these records
``{{ clients }}``         which program loads checkpoints of which scheme
``{{ client_results }}``  the results of these programs by `make clients`
``{{ neighbours }}``      the results of `make neighbours` beside other libraries
``{{ protocols }}``       the protocols of perplexity
``{{ capabilities }}``    the capabilities that a record may declare
``{{ hook NAME }}``       the docstring of a hook, with its example
``{{ events }}``          the events of a run with their fields
``{{ commands }}``        the command line: each command with its arguments
``{{ plan ARGUMENTS }}``  the plan by ``quark quantize MODEL OUT ARGUMENTS --dry-run`` for the tiny model
``{{ section FILE: HEADING }}``  a section of another document of the repository
``{{ new_plugin KIND FILE }}``  a file of what ``quark new-plugin acme-quant`` writes for a kind of plugin
``{{ conformance }}``     the checks of the conformance suite
``{{ outcomes }}``        the outcomes of a check
``{{ benchmarks }}``      the page of benchmarks
``{{ costs }}``           the counted costs of runs
``{{ defaults }}``        comparisons of settings on several models
``{{ heads }}``           the measured heads that are tied to embeddings
``{{ low_bits }}``        the measured models in 2 and 3 bits
``{{ measured }}``        the table of measured accuracy
``{{ mixed }}``           the tables of measured choices of mixed precision
``{{ peers }}``           the tables of comparisons with other programs
``{{ versions }}``        the versions of Python, torch and transformers that are tested together
``{{ picture NAME: caption }}``  a drawing of `tools.docs.pictures`
========================  ==========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.docs import (
    benchmark_page,
    client_results,
    command_line,
    conformance,
    costs,
    defaults,
    events,
    heads,
    low_bits,
    manual,
    measured,
    mixed,
    neighbours,
    peers,
    pictures,
    sections,
    tables,
    versions,
)

__all__ = ["MARK", "expand"]

MARK = re.compile(r"^\{\{ (\w+)(?: (.*?))? \}\}$", flags=re.MULTILINE)

_GENERATORS: dict[str, Callable[[str, str], str]] = {
    "table": lambda kind, _: tables.table_of(kind),
    "options": lambda kind, _: tables.options_of(kind),
    "clients": lambda _, __: tables.clients(),
    "client_results": lambda _, __: client_results.tables(),
    "neighbours": lambda _, __: neighbours.table(),
    "protocols": lambda _, __: tables.protocols(),
    "capabilities": lambda _, __: tables.capabilities(),
    "hook": lambda name, _: manual.hook(name),
    "events": lambda _, __: events.events(),
    "commands": lambda _, __: command_line.reference(),
    "plan": lambda arguments, _: command_line.plan_of_the_tiny_model(arguments),
    "section": sections.section,
    "new_plugin": lambda text, _: sections.new_plugin_file(*text.split()),
    "conformance": lambda _, __: conformance.checks(),
    "outcomes": lambda _, __: conformance.outcomes(),
    "benchmarks": lambda _, __: benchmark_page.page(),
    "costs": lambda _, __: costs.table(),
    "defaults": lambda _, __: defaults.page(),
    "heads": lambda _, __: heads.table(),
    "low_bits": lambda _, __: low_bits.table(),
    "measured": lambda _, __: measured.table(),
    "mixed": lambda _, __: mixed.table(),
    "peers": lambda _, __: peers.table(),
    "versions": lambda _, __: versions.table(),
    "picture": lambda text, _: pictures.figure(*text.split(": ", 1)),
}


def expand(markdown: str, page: str) -> str:
    """Return the source of a page with each mark replaced by its text.

    Args:
        markdown: The source.
        page: The path of the page below ``docs/``, such as ``"reference/schemes.md"``.

    Raises:
        ValueError: A mark is unknown.
    """

    def generated(match: re.Match[str]) -> str:
        generator = _GENERATORS.get(match[1])
        if generator is None:
            raise ValueError(f"docs/{page}: '{match[0]}' is not a mark: write one of {', '.join(_GENERATORS)}")
        return generator((match[2] or "").strip(), page)

    return MARK.sub(generated, markdown)
