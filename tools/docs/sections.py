"""Copy sections of the repository's documents into pages, so that each text is in one file."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from quark_devkit.new_plugin import PLUGIN_KINDS
from quark_devkit.new_plugin.distribution import Naming, rendered

__all__ = ["ROOT", "new_plugin_file", "section"]

ROOT = Path(__file__).resolve().parents[2]
_PAGES = {"ARCHITECTURE.md#glossary": "reference/glossary.md", "plugins/quark_algos/README.md": "explanation/algorithms.md"}
"""The site's page for each target of links in other documents of the repository."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)\s]+)\)")


def section(reference: str, page: str) -> str:
    """Return a section of a document without the section's heading. The levels of inner headings are adapted
    to the page.

    Args:
        reference: ``"FILE: HEADING"``, the file relative to the root of the repository.
        page: The page that shows the section; links become relative to this page.

    Raises:
        ValueError: The file has no such heading.
    """
    file, _, heading = reference.partition(": ")
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"docs/{page}: {file} has no heading '{heading}'")
    return _LINK.sub(lambda match: _link(match[1], match[2], file, page), found[2].strip())


def new_plugin_file(kind: str, file: str) -> str:
    """Return a file that ``quark new-plugin acme-quant`` writes for a kind of plugin, as a block of code.

    Args:
        kind: Name of one of `PLUGIN_KINDS`, such as ``"layout"``.
        file: Path of the file within the package, such as ``"box.py"``.
    """
    naming = Naming.of("acme-quant")
    texts = rendered(naming, [one for one in PLUGIN_KINDS if one.name == kind])
    return f'```python title="{naming.package}/{file}"\n{texts[f"src/{naming.package}/{file}"].strip()}\n```'


def _link(text: str, target: str, file: str, page: str) -> str:
    """Return a link to a page of the site, or only its text if there is no such page."""
    path, hash_sign, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path)) if path else file
    own = _PAGES.get(f"{path}{hash_sign}{anchor}") or _PAGES.get(path)
    return f"[{text}]({posixpath.relpath(own, posixpath.dirname(page))})" if own else f"`{text.strip('`')}`"
