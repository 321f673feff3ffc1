"""The manual of plugin authors, from the docstrings of `quark.plugins.hookspecs`."""

from __future__ import annotations

import inspect
import re
from textwrap import dedent

from quark.plugins import QuarkHooks

__all__ = ["as_markdown", "hook"]


def hook(name: str) -> str:
    """Return the docstring and the example of a hook, with a block of code for each file.

    Args:
        name: Name of the hook, such as ``"quark_register_formats"``; ``"all"`` for the rules of every hook.
    """
    if name == "all":
        text = inspect.getdoc(QuarkHooks) or ""
        return as_markdown(text.partition("\n\n")[2])
    text, _, example = (inspect.getdoc(getattr(QuarkHooks, name)) or "").partition("Example::\n")
    files = re.split(r"^# (\w+/\w+\.py)\n", dedent(example).strip("\n"), flags=re.MULTILINE)
    blocks = [f'```python title="{path}"\n{code.strip()}\n```' for path, code in zip(files[1::2], files[2::2], strict=True)]
    return "\n\n".join([f"Hook: `{name}`", as_markdown(text.partition("Args:")[0].strip()), *blocks])


def as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: without double backticks and literal blocks of reStructuredText."""
    text = re.sub(r"``(.+?)``", r"`\1`", docstring)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
