"""``quark new-plugin``: write a small distribution with plugins, to begin one's own with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark_devkit.new_plugin import PLUGIN_KINDS, new_distribution

__all__ = ["new_plugin"]

_SUMMARIES = {kind.name: f"Write {kind.summary}." for kind in PLUGIN_KINDS}


def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as acme-quant.")],
    directory: Annotated[Path | None, typer.Option(help="Where to write; by default a new directory of that name.")] = None,
    scheme: Annotated[bool, typer.Option("--scheme", help=_SUMMARIES["scheme"])] = False,
    number_format: Annotated[bool, typer.Option("--format", help=_SUMMARIES["format"])] = False,
    observer: Annotated[bool, typer.Option("--observer", help=_SUMMARIES["observer"])] = False,
    rounding: Annotated[bool, typer.Option("--rounding", help=_SUMMARIES["rounding"])] = False,
    transform: Annotated[bool, typer.Option("--transform", help=_SUMMARIES["transform"])] = False,
    block_tuning: Annotated[bool, typer.Option("--block-tuning", help=_SUMMARIES["block_tuning"])] = False,
    template: Annotated[bool, typer.Option("--template", help=_SUMMARIES["template"])] = False,
    layout: Annotated[bool, typer.Option("--layout", help=_SUMMARIES["layout"])] = False,
    selector: Annotated[bool, typer.Option("--selector", help=_SUMMARIES["selector"])] = False,
    layer_type: Annotated[bool, typer.Option("--layer-type", help=_SUMMARIES["layer_type"])] = False,
    dataset: Annotated[bool, typer.Option("--dataset", help=_SUMMARIES["dataset"])] = False,
    metric: Annotated[bool, typer.Option("--metric", help=_SUMMARIES["metric"])] = False,
    graph_op: Annotated[bool, typer.Option("--graph-op", help=_SUMMARIES["graph_op"])] = False,
) -> None:
    """Write a distribution with a plugin of each chosen kind: typed code, conformance tests, a README, files
    for CI."""
    chosen = {
        "scheme": scheme,
        "format": number_format,
        "observer": observer,
        "rounding": rounding,
        "transform": transform,
        "block_tuning": block_tuning,
        "template": template,
        "layout": layout,
        "selector": selector,
        "layer_type": layer_type,
        "dataset": dataset,
        "metric": metric,
        "graph_op": graph_op,
    }
    out = new_distribution(name, [kind for kind, is_chosen in chosen.items() if is_chosen], directory)
    steps = [f"cd {out}", "pip install -e '.[test]'", "pytest"]
    typer.echo(
        "\n".join([f"Wrote {out}. Next:", "", *(f"  {step}" for step in steps), "", "The license is yours to choose: see README.md."])
    )
