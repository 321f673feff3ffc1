"""``quark quantize``: a checkpoint in, a quantized checkpoint out."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quark.cli.given_options import given_algorithm_options, given_options
from quark.cli.sizes import size_in_bytes
from quark.errors import CalibrationError, ConfigError
from quark.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quark.checkpoint import ExportOptions
    from quark.config.model import QConfig
    from quark.ranks import Ranks

__all__ = [
    "AlgorithmOptions",
    "AllExperts",
    "CalibrationText",
    "Deterministic",
    "Exclude",
    "ExporterOptions",
    "MaxShardSize",
    "Output",
    "PostRope",
    "Probe",
    "Restart",
    "Resume",
    "SchemeOptions",
    "SeparateKv",
    "ShareFused",
    "Strict",
    "TrustRemoteCode",
    "make_config",
    "quantize",
    "register",
]


PostRope = Annotated[
    bool | None,
    typer.Option(
        "--kv-cache-post-rope/--no-kv-cache-post-rope",
        help="Quantize keys of the cache as runtimes hold them, after norms and the rotary embedding, or as the projection's output; by "
        "default the former wherever the model allows it. Needs --kv-cache.",
    ),
]
AllExperts = Annotated[
    bool,
    typer.Option("--calibrate-all-experts", help="Calibrate every expert of a mixture on every token, not only on those routed to it."),
]
SeparateKv = Annotated[
    bool, typer.Option("--separate-kv-scales", help="Keys and values keep separate scales; by default they share the larger scale.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Pattern of layers to leave in float, added to those that the model's template leaves in float; may be repeated."),
]
SchemeOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme-option", help="KEY=VALUE for the scheme, such as block_size=32; `quark schemes NAME` shows its options. May be repeated."
    ),
]
AlgorithmOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--algorithm-option",
        help="NAME.KEY=VALUE for an algorithm, such as gptq.damp_percent=0.05; `quark algorithms NAME` shows its options. May be repeated.",
    ),
]
ExporterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--exporter-option",
        help="KEY=VALUE for the exporter, such as pack_method=order; `quark exporters NAME` shows its options. May be repeated.",
    ),
]
CalibrationText = Annotated[
    Path | None, typer.Option(help="Text file, or directory of .txt files, for static activation scales and calibrated rounding.")
]
Output = Annotated[Path | None, typer.Argument(help="Directory to write; must not exist or be empty.")]
Probe = Annotated[
    bool, typer.Option("--probe/--no-probe", help="Measure this machine for a plan's estimate of the time, in less than two seconds.")
]
Strict = Annotated[bool, typer.Option("--strict", help="A pattern that matches no layer is an error, not a warning.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with the checkpoint; without, one that needs it is refused.")
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Sum over calibration samples in an order that does not depend on the number of processes: the same bytes by one and by many. "
        "Takes more memory.",
    ),
]
ShareFused = Annotated[
    bool,
    typer.Option(
        "--share-fused-scales",
        help="One scale for layers that runtimes fuse (q/k/v, gate/up). With one scale per tensor, vLLM otherwise requantizes all of "
        "them to the largest, which loses precision.",
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option(help="Largest size of one file of the checkpoint, such as 5GB, which is the default, or 512MiB.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the finished blocks of an earlier run to OUT that did not end; without any, start from the beginning."
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the finished blocks of an earlier run to OUT that did not end.")]
Report = Annotated[
    str,
    typer.Option(
        help="What the report measures, standard or full: full also hashes the weights and compares hidden states on a few samples. The "
        "report lies in OUT: quark_report.html, and the same as JSON."
    ),
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no report.")]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("quantize")(quantize)


def quantize(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint: float, or in a layout that can be dequantized.")],
    out: Output,
    scheme: Annotated[str, typer.Option(help="Scheme of all linear layers; `quark schemes` lists them.")],
    scheme_option: SchemeOptions = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="Algorithm to apply; may be repeated, in order.")] = None,
    algorithm_option: AlgorithmOptions = None,
    kv_cache: Annotated[str | None, typer.Option(help="Scheme of the key-value cache, such as fp8.")] = None,
    kv_cache_post_rope: PostRope = None,
    attention_scheme: Annotated[str | None, typer.Option(help="Scheme of attention probabilities and queries, such as fp8.")] = None,
    exclude: Exclude = None,
    layer: Annotated[list[str] | None, typer.Option(help="PATTERN=SCHEME for some layers; may be repeated.")] = None,
    calib: CalibrationText = None,
    num_calib: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a calibration sequence.")] = 512,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint says.")] = "auto",
    exporter: Annotated[str, typer.Option(help="Exporter; `quark exporters` lists them.")] = "safetensors",
    exporter_option: ExporterOptions = None,
    separate_kv_scales: SeparateKv = False,
    calibrate_all_experts: AllExperts = False,
    share_fused_scales: ShareFused = False,
    strict: Strict = False,
    trust_remote_code: TrustRemoteCode = False,
    max_shard_size: MaxShardSize = None,
    resume: Resume = False,
    restart: Restart = False,
    deterministic: Deterministic = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what `quark plan` prints, and stop.")] = False,
    probe: Probe = True,
    report: Report = "standard",
    no_report: NoReport = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quantize the checkpoint MODEL and write the result to OUT.

    Several processes share the work: torchrun --nproc-per-node N -m quark quantize …
    """
    # Torch and transformers are imported here, not above: `quark --help` and the listings do without them.
    import attrs

    from quark.checkpoint.destination import refuse_used_directory
    from quark.cli.planned import print_planned
    from quark.hf.skeleton import meta_model
    from quark.hf.tokenizer import load_tokenizer
    from quark.runs import ReportOptions, quantize_checkpoint

    started = time.perf_counter()

    def config_for(model: nn.Module) -> QConfig:
        options = scheme_option, algorithm_option
        config = make_config(
            model, scheme, algorithm, kv_cache, exclude, layer, share_fused_scales, attention_scheme, kv_cache_post_rope, *options
        )
        return attrs.evolve(config, separate_kv_scales=separate_kv_scales, calibrate_all_experts=calibrate_all_experts, strict=strict)

    if dry_run or out is None:
        given: dict[str, Any] = {"calib": calib, "num_calib": num_calib, "seq_len": seq_len, "device": device, "dtype": dtype}
        given |= {"exporter": exporter, "exporter_option": exporter_option, "probe": probe, "trust_remote_code": trust_remote_code}
        print_planned(model, out, config_for, given=given, as_json=as_json)
        return
    refuse_used_directory(out)
    export = _export_options(exporter, exporter_option, max_shard_size)
    config = config_for(meta_model(model, trust_remote_code=trust_remote_code))
    export = attrs.evolve(export, tokenizer=load_tokenizer(model, trust_remote_code=trust_remote_code))
    data = partial(_calibration, export.tokenizer, calib, num_calib, seq_len)
    reporting = None if no_report else ReportOptions(report, shlex.join(["quark", *sys.argv[1:]]), started)
    where: Any = {"dtype": dtype, "exporter": exporter, "trust_remote_code": trust_remote_code, "resume": resume, "restart": restart}
    with _ranks(device, deterministic) as (ranks, own):
        plan = quantize_checkpoint(model, out, config, data, device=own, options=export, report=reporting, ranks=ranks, **where)
    if ranks.is_first:
        _print_result(out, scheme, len(plan.quantized), time.perf_counter() - started, as_json)


def make_config(
    model: nn.Module,
    scheme: str,
    algorithm: list[str] | None,
    kv_cache: str | None,
    exclude: list[str] | None,
    layer: list[str] | None,
    share_fused_scales: bool = False,
    attention_scheme: str | None = None,
    kv_cache_post_rope: bool | None = None,
    scheme_option: list[str] | None = None,
    algorithm_option: list[str] | None = None,
) -> QConfig:
    """Return the configuration for the options, from the template of the model's family."""
    from quark.planning.family import template_of

    template = template_of(model)
    return template.get_config(
        scheme=scheme,
        algorithm=algorithm or None,
        kv_cache_scheme=kv_cache,
        attention_scheme=attention_scheme,
        kv_cache_post_rope=kv_cache_post_rope,
        scheme_options=given_options("--scheme-option", scheme_option),
        algorithm_options=given_algorithm_options("--algorithm-option", algorithm_option),
        layer_config=dict(_pair(text) for text in layer or []) or None,
        shared_scale_groups=[list(g) for g in template.architecture.fused] if share_fused_scales and template.architecture else None,
        exclude_layers=[*template.exclude_layers_name, *exclude] if exclude else None,
    )


def _export_options(exporter: str, exporter_option: list[str] | None, max_shard_size: str | None) -> ExportOptions:
    """Return the options of the export."""
    from quark.checkpoint.export import export_options

    chosen = given_options("--exporter-option", exporter_option)
    if max_shard_size is not None:
        chosen["max_shard_bytes"] = size_in_bytes(max_shard_size, "--max-shard-size")
    return export_options(exporter, chosen)


@contextmanager
def _ranks(device: str, is_deterministic: bool) -> Iterator[tuple[Ranks, str]]:
    """Yield the processes of the run and this one's device; all but the first log errors alone."""
    from quark.hf.dtype_and_device import torch_device
    from quark.process_group import ranks_of_environment

    with ranks_of_environment(torch_device(device), is_deterministic=is_deterministic) as (ranks, own):
        if not ranks.is_first:
            get_logger().setLevel(logging.ERROR)
        yield ranks, str(own)


def _calibration(tokenizer: Any, calib: Path | None, count: int, length: int, wanted_by: str) -> list[Tensor]:
    """Return ``count`` calibration sequences of ``length`` tokens."""
    from quark.hf.calibration_text import calibration_tokens

    if calib is None:
        raise CalibrationError(f"calibration text is needed by {wanted_by}: give --calib FILE or DIR")
    return calibration_tokens(tokenizer, calib, count, length)


def _pair(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.rpartition("=")
    if not (pattern and separator and scheme):
        raise ConfigError(f"--layer {text!r} is not of the form PATTERN=SCHEME, such as '*.down_proj=fp8'")
    return pattern, scheme


def _print_result(out: Path, scheme: str, layers: int, seconds: float, as_json: bool) -> None:
    size = sum(f.stat().st_size for f in out.iterdir() if f.is_file())
    if as_json:
        typer.echo(json.dumps({"out": str(out), "scheme": scheme, "layers": layers, "bytes": size, "seconds": round(seconds, 3)}))
    else:
        typer.echo(f"{out}: {layers} layers in {scheme}, {size / 1e6:.1f} MB, {seconds:.1f} s")
