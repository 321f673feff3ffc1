"""The command ``quark demo``. It quantizes, exports, reloads and evaluates a small language model with every
scheme."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quark_tiny_model.demo_run import Bench, Refusal, Row

__all__ = ["demo"]


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Directory in which to keep the exported checkpoints. It must not exist, or it must be empty.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the table, as JSON.")] = False,
) -> None:
    """Quantize the bundled tiny model with every scheme, export it, load it again and compare it with the
    original.
    """
    # Rich, torch and transformers are imported here, not above: `quark --help` and the listings do without
    # them.
    from rich.console import Console

    from quark.checkpoint.destination import refuse_used_directory

    started = time.perf_counter()
    # A file has no width; the table must not be wrapped there.
    console = Console(quiet=as_json, highlight=False, width=None if sys.stdout.isatty() else 110)
    if out is not None:
        refuse_used_directory(out)
    console.print("Loading torch and the bundled model …")
    from quark.base.parallel import one_thread  # matrices this small gain nothing by more
    from quark_tiny_model.demo_run import Bench

    bench = Bench.bundled()
    _introduce(console, bench)
    with one_thread(), tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder:
        rows, refusals = _run(console, bench, Path(folder))
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps(_as_json(rows, refusals, seconds), indent=2))
    else:
        _conclude(console, rows, refusals, out, seconds)
    if len(rows) == 1 or not all(row.reload_equal for row in rows) or not all(refusal.expected for refusal in refusals):
        raise typer.Exit(1)


def _introduce(console: Console, bench: Bench) -> None:
    parameters = sum(p.numel() for p in bench.reference.parameters())
    console.print(
        f"\nThis is a Llama of {parameters / 1e6:.1f} million parameters, trained on the King James Bible and The Devil's Dictionary. "
        "For every installed scheme it is now [bold]quantized[/] block by block, [bold]exported[/] to safetensors, "
        "[bold]loaded again[/] from disk, and [bold]compared[/] with the original on "
        f"{bench.windows.numel():,} tokens that it was not trained on.\n"
    )


def _run(console: Console, bench: Bench, folder: Path) -> tuple[list[Row], list[Refusal]]:
    """Run all schemes, and return the rows of the table, and the schemes that were refused or failed.

    The first row is the float model. The other rows are sorted by the number of bits, from most to fewest.
    """
    from quark_tiny_model.demo_run import Refusal, job_name

    rows: list[Row] = []
    refusals: list[Refusal] = []
    layers: tuple[Any, ...] = ()
    jobs = bench.jobs()
    for number, (scheme, cache) in enumerate(jobs, 1):
        name = job_name(scheme, cache)
        console.print(f"  {number:>2}/{len(jobs)}  {name:<24}", end="", markup=False)
        result, quantized = bench.try_scheme(scheme, cache, folder / name.replace(" ", ""))
        if isinstance(result, Refusal):
            refusals.append(result)
            console.print("refused" if result.expected else "[red]failed[/]")
            continue
        rows.append(result)
        layers = max(layers, quantized, key=len)
        reload = "equal" if result.reload_equal else "[red]different[/]"
        console.print(f"quantized and exported in {result.seconds:4.1f} s   reload = {reload}")
    rows.sort(key=lambda row: (-row.size.bits, row.name))
    return [bench.float_row(layers), *rows], refusals


def _conclude(console: Console, rows: list[Row], refusals: list[Refusal], out: Path | None, seconds: float) -> None:
    from quark_tiny_model.demo_run import PROMPT

    console.print(_table(rows))
    for reason in dict.fromkeys(refusal.reason for refusal in refusals):
        names = ", ".join(refusal.name for refusal in refusals if refusal.reason == reason)
        console.print(f"{names}: {reason}", markup=False)
    console.print(
        "\nBits: size of a weight on disk, its share of scales and zero points included. Perplexity: the number of tokens among which the "
        "model is undecided; lower is better. KL: divergence of its predictions from the original's, in nats per token. Top-1: how often "
        "both predict "
        "the same token. Reload = equal: the model read from disk gives the same logits as the one in memory, bit for bit.\n"
    )
    last = min(rows, key=lambda row: row.size.bits)
    for row in (rows[0], last) if last is not rows[0] else (rows[0],):
        console.print(f"{row.name} goes on: {PROMPT} … {row.words}", markup=False)
    location = "The checkpoints were temporary: keep them with --out DIR." if out is None else f"The checkpoints are in {out}."
    console.print(f"\n{seconds:.0f} s in all. {location} Your own model: quark quantize MODEL OUT --scheme NAME", markup=False)


def _table(rows: list[Row]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title="The bundled model in each scheme", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("scheme")
    for heading in ("weights\nkB", "total\nkB", "bits", "perplexity", "KL", "top-1", "seconds", "reload"):
        table.add_column(heading, justify="right")
    for row in rows:
        first = row is rows[0]
        table.add_row(
            Text(row.name),
            f"{row.size.weight_bytes / 1e3:,.0f}",
            f"{row.size.total_bytes / 1e3:,.0f}",
            f"{row.size.bits:.2f}",
            f"{row.comparison.perplexity:.2f}",
            "" if first else f"{row.comparison.mean_kl:.4f}",
            "" if first else f"{row.comparison.top1_agreement:.1%}",
            "" if first else f"{row.seconds:.2f}",
            "" if first else "equal" if row.reload_equal else "[red]different[/]",
            end_section=first,
        )
    return table


def _as_json(rows: list[Row], refusals: list[Refusal], seconds: float) -> dict[str, Any]:
    import attrs

    return {
        "rows": [attrs.asdict(row) for row in rows],
        "refused": [attrs.asdict(refusal) for refusal in refusals],
        "seconds": round(seconds, 2),
    }
