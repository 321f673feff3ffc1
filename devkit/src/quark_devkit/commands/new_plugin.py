"""``quark new-plugin``: write a small distribution with plugins, from which you can start your own."""

from __future__ import annotations

from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from quark_devkit.new_plugin import PLUGIN_KINDS, new_distribution

__all__ = ["new_plugin"]


def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as acme-quant.")],
    directory: Annotated[Path | None, typer.Option(help="Directory to write; by default a new one with that name.")] = None,
    **kinds: Any,
) -> None:
    """Write a distribution with plugins of the chosen kinds: typed code, conformance tests, a README, files
    for CI.
    """
    out = new_distribution(name, [kind for kind, is_chosen in kinds.items() if is_chosen], directory)
    steps = [f"cd {out}", "pip install -e '.[test]'", "pytest"]
    typer.echo("\n".join([f"Wrote {out}. Next:", "", *(f"  {step}" for step in steps), "", "Choose a license: see README.md."]))


def _with_an_option_for_each_kind() -> None:
    """Replace ``**kinds`` in the command's signature by one option for each kind, since typer reads the
    signature."""
    own = signature(new_plugin, eval_str=True)
    options = []
    for kind in PLUGIN_KINDS:
        hint = Annotated[bool, typer.Option(kind.option, help=f"Write {kind.summary}.")]
        options.append(Parameter(kind.name, Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=hint))
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    new_plugin.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]


_with_an_option_for_each_kind()
