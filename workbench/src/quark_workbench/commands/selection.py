"""The options of ``quark quantize --mixed``, which selects schemes, and the printed result of a selection."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.base.names import folded
from quark.errors import ConfigError, OutputError
from quark_workbench.cli.tables import table, terminal_width
from quark_workbench.commands.given_options import given_options, size_in_bytes

if TYPE_CHECKING:
    from quark.config.model import QConfig
    from quark_workbench.mixed_precision import Budget, SelectionResult

__all__ = ["SelectionOptions", "selection_lines"]

_BAR = 24
_WRITTEN = (".svg", ".json")


@attrs.frozen(kw_only=True)
class SelectionOptions:
    """Command-line options for a selection of schemes, which ``--mixed`` starts.

    Raises:
        ConfigError: An option is given without ``--mixed``, no budget or more than one budget is given, or
            the name of the file for the curve ends in neither ``.svg`` nor ``.json``.
    """

    mixed: Annotated[
        str | None,
        typer.Option(
            help="Schemes to choose from for each layer, such as fp8,mxfp4,bf16 (bf16 leaves the layer in float); replaces --scheme."
        ),
    ] = None
    target_bits: Annotated[
        float | None, typer.Option(help="With --mixed: largest mean number of bits per weight. The bits of scales count too.")
    ] = None
    target_size: Annotated[str | None, typer.Option(help="With --mixed: largest size of all tensors, such as 90MB or 1.5GiB.")] = None
    kl_budget: Annotated[
        float | None, typer.Option(help="With --mixed: largest KL divergence from the float model on the calibration text, nats per token.")
    ] = None
    selector: Annotated[
        str | None, typer.Option(help="With --mixed: method that chooses the schemes; `quark selectors` lists the methods.")
    ] = None
    selector_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the selector, such as sensitivity=kl; `quark selectors NAME` shows its options. May be repeated."),
    ] = None
    runtime: Annotated[str | None, typer.Option(help="With --mixed: runtime that must load every scheme, such as vLLM.")] = None
    curve: Annotated[Path | None, typer.Option(help="With --mixed: file for the Pareto curve, .svg or .json.")] = None

    def __attrs_post_init__(self) -> None:
        budgets = {"--target-bits": self.target_bits, "--target-size": self.target_size, "--kl-budget": self.kl_budget}
        others = {"--selector": self.selector, "--selector-option": self.selector_option, "--runtime": self.runtime, "--curve": self.curve}
        if self.mixed is None:
            if idle := [flag for flag, value in (budgets | others).items() if value]:
                raise ConfigError(
                    f"{idle[0]} needs --mixed: name the schemes to choose from, as in --mixed fp8,mxfp4, or leave out {idle[0]}"
                )
            return
        if all(value is None for value in budgets.values()):
            raise ConfigError("--mixed needs a budget: add --target-bits 5, --target-size 90MB, or --kl-budget 0.05")
        # Refuse invalid options before the model is read.
        self.budget()
        given_options("--selector-option", self.selector_option)
        if self.curve is not None and self.curve.suffix not in _WRITTEN:
            raise ConfigError(f"--curve {self.curve} must end in one of {', '.join(_WRITTEN)}: rename the file")

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of the schemes to choose from. A name such as ``bf16`` means that a layer stays float."""
        return tuple(name.strip() for name in (self.mixed or "").split(",") if name.strip())

    def budget(self) -> Budget:
        """Return the budget. Raise ConfigError unless exactly one budget is given."""
        from quark_workbench.mixed_precision import Budget

        size = None if self.target_size is None else size_in_bytes(self.target_size, "--target-size")
        return Budget(bits=self.target_bits, size=size, kl=self.kl_budget)

    @property
    def base_scheme(self) -> str:
        """The name of the candidate whose settings for the whole model the configuration uses."""
        from quark_workbench.mixed_precision.select import base_scheme

        return base_scheme(self.candidates)

    def run(
        self, model: Path, base: QConfig, fixed: Iterable[str], data: Callable[[str], Any], device: str, dtype: str, *, is_quiet: bool
    ) -> SelectionResult:
        """Choose the schemes, print them unless ``is_quiet``, write the curve, and return the result."""
        from quark_workbench.mixed_precision import select_schemes
        from quark_workbench.report.selection_plots import curve_svg

        if self.curve is not None and not self.curve.absolute().parent.is_dir():
            raise OutputError(
                f"--curve {self.curve} cannot be written, since there is no directory '{self.curve.absolute().parent}': create it"
            )
        result = select_schemes(
            model,
            self.candidates,
            self.budget(),
            data,
            base=base,
            fixed=list(fixed),
            selector=self.selector,
            selector_options=given_options("--selector-option", self.selector_option),
            runtime=self.runtime,
            device=device,
            dtype=dtype,
        )
        if not is_quiet:
            typer.echo("\n".join(selection_lines(result)))
        if self.curve is not None:
            text = curve_svg(result.to_dict()) if self.curve.suffix == ".svg" else json.dumps(result.to_dict(), indent=2) + "\n"
            self.curve.write_text(text, encoding="utf-8", newline="\n")
        return result


def selection_lines(result: SelectionResult) -> list[str]:
    """Return the printed lines for a selection: its curve as a table, and the layers that get each scheme."""
    loss = "" if result.loss is None else f", predicted loss {result.loss:.4g} {result.selection.unit}"
    lines = [
        f"{result.selector}: {result.bits:.3f} bits per weight of at most {result.problem.budget}, "
        f"{result.total_bytes / 1e6:.1f} MB in all{loss}; {result.seconds:.1f} s"
    ]
    if result.selection.curve:
        lines += ["", *_curve_lines(result), ""]
    for name in result.problem.candidates:
        layers = [layer for g in result.problem.groups if result.selection.choices[g.name] == name for layer in g.layers]
        lines.append(f"  {name}: {folded(layers, most=12) if layers else 'no layer'}")
    return [*lines, *(f"  note: {note}" for note in result.selection.notes)]


def _curve_lines(result: SelectionResult) -> list[str]:
    problem, curve = result.problem, result.selection.curve
    largest = max((point.loss for point in curve), default=0.0) or 1.0
    rows = []
    for point in curve:
        counts = Counter(point.choices.values())
        rows.append(
            [
                f"{problem.bits_of(point.group_bytes):.3f}",
                f"{(point.group_bytes + problem.other_bytes) / 1e6:.1f}",
                f"{point.loss:.4g}",
                "" if point.measured_kl is None else f"{point.measured_kl:.4g}",
                "chosen" if dict(point.choices) == dict(result.selection.choices) else "",
                " ".join(f"{name} {counts[name]}" for name in problem.candidates if counts[name]),
                "#" * round(_BAR * point.loss / largest),
            ]
        )
    return table(["bits", "MB", "predicted", "measured KL", "", "groups", "loss"], rows, terminal_width())[0]
