"""Hooks of MkDocs, which add the pages of the Python API, expand marks, and turn equations into MathML."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File

from tools.docs import api, equations, marks


def on_config(config: Any) -> Any:
    """Put the pages of the Python API into the navigation."""
    for section in config.nav:
        for entries in section.values():
            for entry in entries:
                if "Python API" in entry:
                    entry["Python API"] = [{page.title: page.path} for page in api.pages()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the Python API."""
    for page in api.pages():
        files.append(File.generated(config, page.path, content=page.markdown))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Expand the marks of a page."""
    return marks.expand(markdown, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Replace equations in TeX by MathML, which needs no script."""
    return equations.as_mathml(html)
