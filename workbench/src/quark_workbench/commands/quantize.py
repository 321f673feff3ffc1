"""``quark quantize`` quantizes a checkpoint and writes the result as a new checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quark.base.log import get_logger
from quark.errors import ConfigError
from quark_workbench.commands.config_options import ConfigOptions
from quark_workbench.commands.event_lines import print_result
from quark_workbench.commands.given_options import command
from quark_workbench.commands.plan import print_planned
from quark_workbench.commands.run_options import (
    GROUPS,
    CalibrationChoices,
    ExportChoices,
    Probe,
    TrustRemoteCode,
    WithoutModel,
    WritingChoices,
)
from quark_workbench.commands.selection import SelectionOptions

if TYPE_CHECKING:
    from quark.base.ranks import Ranks
    from quark_workbench.mixed_precision import SelectionResult

__all__ = ["quantize"]

Output = Annotated[Path | None, typer.Argument(help="Directory to write. It must not exist, or it must be empty.")]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Write the same bytes for any number of processes, by summing over calibration samples in a fixed order. Takes more memory.",
    ),
]

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON lines: the events of the run, and the result on the last line. With --dry-run, the plan is one JSON value.",
    ),
]


@command("quantize", **GROUPS, writing=WritingChoices, selection=SelectionOptions)
def quantize(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint, which is float or has a layout that quark can dequantize.")],
    out: Output,
    config: ConfigOptions,
    calibration: CalibrationChoices,
    export: ExportChoices,
    writing: WritingChoices,
    selection: SelectionOptions,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the dtype of the checkpoint).")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    without_model: WithoutModel = False,
    deterministic: Deterministic = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what `quark plan` prints, and stop.")] = False,
    probe: Probe = True,
    as_json: AsJson = False,
) -> None:
    """Quantize the checkpoint MODEL and write the result to OUT.

    Several processes share the work: torchrun --nproc-per-node N -m quark quantize …
    """
    # Torch and transformers are imported here, not above: `quark --help` and the listings do without them.
    from quark.checkpoint.destination import refuse_used_directory
    from quark.models.hf.skeleton import meta_model
    from quark.runs import quantize_checkpoint
    from quark_workbench.without_model import named_model, quantize_without_model

    started = time.perf_counter()
    if without_model and (selection.mixed is not None or trust_remote_code):
        raise ConfigError("--without-model runs no model and no code: leave out --mixed, which measures outputs, and --trust-remote-code")
    where: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if dry_run and selection.mixed is None:
        where["without_model"] = without_model
        print_planned(model, out, config.config_for, calibration, export, probe=probe, as_json=as_json, **where)
        return
    assert out is not None
    refuse_used_directory(out, export.exporter, resume=writing.resume, source=model)
    export.options()  # refuse wrong options before anything is read
    base = _base_scheme(config, selection)
    skeleton = named_model(model, dtype) if without_model else meta_model(model, trust_remote_code=trust_remote_code)
    quant_config = config.config_for(skeleton, base)
    data, chosen = calibration.of(model, skeleton, dtype, trust_remote_code=trust_remote_code), None
    if selection.mixed is not None:
        chosen = selection.run(model, quant_config, config.named_layers, data, device, dtype, is_quiet=as_json)
        quant_config = chosen.config
    if dry_run:
        own = quant_config
        where["without_model"] = without_model
        print_planned(model, out, lambda _: own, calibration, export, probe=probe, as_json=as_json, chosen=chosen, **where)
        return
    arguments = writing.arguments(started, chosen) | {"dtype": dtype, "exporter": export.exporter}
    with _ranks(device, deterministic) as (ranks, device):
        arguments |= {"device": device, "ranks": ranks}
        if without_model:  # copies the tokenizer's files, since to load it may run code
            plan = quantize_without_model(model, out, quant_config, options=export.options(), **arguments)
        else:
            options = export.options(data.tokenizer)
            plan = quantize_checkpoint(model, out, quant_config, data, options=options, trust_remote_code=trust_remote_code, **arguments)
    if ranks.is_first:
        writing.add_metrics(out, model, calibration, device=device, trust_remote_code=trust_remote_code)
        scheme = str(config.scheme) if chosen is None else " + ".join(dict.fromkeys(chosen.selection.choices.values()))
        _print_result(out, scheme, len(plan.quantized), time.perf_counter() - started, as_json, chosen)


def _base_scheme(config: ConfigOptions, selection: SelectionOptions) -> str | None:
    """Return the scheme from which a selection starts, or None if there is no selection.

    Raises:
        ConfigError: ``--mixed`` is combined with ``--scheme``, with ``--scheme-option`` or with torchrun.
    """
    if selection.mixed is None:
        return None
    from quark_workbench.process_group import is_one_of_many

    if config.scheme is not None:
        raise ConfigError(
            f"--scheme {config.scheme} sets one scheme for all layers, but --mixed chooses among several: leave one of them out"
        )
    if config.scheme_option:
        raise ConfigError("--scheme-option has no effect with --mixed, only with --scheme. Leave out --scheme-option")
    if is_one_of_many():
        raise ConfigError("--mixed measures and chooses in one process: run it without torchrun")
    return selection.base_scheme


@contextmanager
def _ranks(device: str, is_deterministic: bool) -> Iterator[tuple[Ranks, str]]:
    """Yield the processes of the run, and the device of this process.

    Processes other than the first one log only errors.
    """
    from quark.models.hf.loading import torch_device
    from quark_workbench.process_group import ranks_of_environment

    with ranks_of_environment(torch_device(device), is_deterministic=is_deterministic) as (ranks, own):
        if not ranks.is_first:
            get_logger().setLevel(logging.ERROR)
        yield ranks, str(own)


def _print_result(out: Path, scheme: str, layers: int, seconds: float, as_json: bool, chosen: SelectionResult | None) -> None:
    size = sum(f.stat().st_size for f in out.iterdir() if f.is_file())
    if as_json:
        facts = {"out": str(out), "scheme": scheme, "layers": layers, "bytes": size, "seconds": round(seconds, 3)}
        print_result(facts if chosen is None else facts | {"selection": chosen.to_dict()})
    else:
        typer.echo(f"{out}: {layers} layers in {scheme}, {size / 1e6:.1f} MB, {seconds:.1f} s")
