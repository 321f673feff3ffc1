"""Docstrings for the API pages. They become Markdown, and names that have a page become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

from tools.docs.api import targets
from tools.docs.manual import as_markdown
from tools.docs.sections import ROOT

__all__ = ["Docstrings"]

_STUBS = ROOT / "plugins/quark_amd/src/quark-stubs/torch/__init__.pyi"
_NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")


class Docstrings(griffe.Extension):
    """An extension of griffe that rewrites every docstring, and adds the names in the stubs of
    `quark.torch`."""

    def on_package(self, *, pkg: Any, loader: Any, **_: Any) -> None:
        """Add the names of `quark.torch`, since griffe does not read partial stub packages such as that of
        quark-amd."""
        if pkg.path == "quark":
            loader.load("quark_amd")
            stubs = griffe.visit("torch", filepath=_STUBS, code=_STUBS.read_text("utf-8"), parent=pkg)
            for name, member in stubs.members.items():
                pkg["torch"].set_member(name, member)

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Replace the docstring of an object by the same text in Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_linked, as_markdown(obj.docstring.value))


def _linked(match: re.Match[str]) -> str:
    target = targets().get(match[1])
    return f"[`{match[1]}`][{target}]" if target else match[0]
