"""The report of an existing export, made from its files, the report of its run, and the float checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.torch_state import own_torch_state
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.reader import import_model_from_safetensors, packed_content
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantizedLayer
from quark.models.layers.packed_layers import PackedLayer
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of
from quark.models.plan.mixtures import separate_experts
from quark.plugins import algorithms
from quark.plugins.run_events import RunEvents, running
from quark.runs.from_disk import opened_checkpoint
from quark.runs.source import CheckpointSource
from quark_workbench.report.contents import Facts, contents_of, with_flags
from quark_workbench.report.files import read_report
from quark_workbench.report.hidden_states import NOT_COMPARABLE, hidden_errors
from quark_workbench.report.layer_figures import LayerFigures

__all__ = ["export_report"]


def export_report(
    directory: Path, float_model: Path | None = None, samples: Iterable[Any] | None = None, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the contents of an export's report.

    Args:
        directory: Directory of the export. If it has the report of its run, the measurements in this report
            are kept. Otherwise the result has only sizes, settings and files.
        float_model: Directory of the float checkpoint from which the export was made. Weights are compared
            with this checkpoint, unless a transform changed them before rounding. Memory holds the packed
            export, one float block and one unpacked layer.
        samples: Calibration data. Hidden states are compared on the first of these samples; this unpacks the
            whole export and needs ``float_model``.
        trust_remote_code: Whether code that comes with the checkpoints may run.

    Raises:
        CheckpointError: The export or the float checkpoint cannot be read, or they belong to different
            models.
        ConfigError: Samples are given without a float checkpoint.
    """
    with own_torch_state(), running("report", source=str(directory)) as events:
        events.phase("plan")
        earlier = read_report(directory)
        if float_model is None and samples is not None:
            raise ConfigError("the comparison of hidden states needs the float model: give the directory float_model too")
        if float_model is None and earlier is not None:
            return with_flags(earlier)
        content, report = packed_content(directory, trust_remote_code=trust_remote_code), CalibrationReport()
        if float_model is not None and not _is_transformed(content.config):
            _measure(_opened(float_model, content, trust_remote_code), content.model, report, events)
        events.phase("report")
        contents = contents_of(content, report, directory, Facts(is_probed=False))
        if float_model is not None and samples is not None:
            events.phase("compare")
            source = _opened(float_model, content, trust_remote_code)
            quantized = import_model_from_safetensors(None, directory, device="cpu", trust_remote_code=trust_remote_code)
            hidden = hidden_errors(source, source.model, quantized, calls(samples, model=source.model))
            rows = [{"block": name, **row} for name, row in hidden.items()]
            contents["depth"] = {"measured": "afterwards", "blocks": rows} | ({} if rows else {"reason": NOT_COMPARABLE})
        return with_flags(contents if earlier is None else _merged(earlier, contents))


def _merged(earlier: Mapping[str, Any], contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report ``earlier``, in which values of ``contents`` replace missing values."""
    now = {layer["name"]: layer for layer in contents["layers"]}
    layers = []
    for layer in earlier["layers"]:
        known = now.get(layer["name"], {})
        layers.append(layer | {key: value for key, value in known.items() if layer.get(key) is None and value is not None})
    depth = contents["depth"] if contents["depth"]["blocks"] else earlier["depth"]
    return {**earlier, "layers": layers, "depth": depth, "histograms": earlier["histograms"] or contents["histograms"]}


def _opened(float_model: Path, content: CheckpointContent, trust_remote_code: bool) -> CheckpointSource:
    """Return a source of the float checkpoint, whose experts are separate layers as in the export."""
    _, source = opened_checkpoint(float_model, trust_remote_code=trust_remote_code)
    separate_experts(source.model, content.config)
    source.prepare(content.plan)
    return source


def _is_transformed(config: QConfig) -> bool:
    """Return whether an algorithm of the export changes weights before they are rounded.

    If so, the weights before rounding differ from the float checkpoint.
    """
    known = algorithms()
    return any(a.name not in known or known.get(a.name).kind == "transform" for a in config.algo_config or ())


@torch.no_grad()
def _measure(source: CheckpointSource, quantized: nn.Module, report: CalibrationReport, events: RunEvents) -> None:
    """Compare the weights of all layers with the float checkpoint, block by block."""
    figures = LayerFigures(report.weights, report.histograms)
    names = [n for n, m in quantized.named_modules() if isinstance(m, PackedLayer | QuantizedLayer)]
    blocks = decoder_blocks(source.model, architecture_of(source.model))
    events.phase("load")
    source.load(None)
    for block in events.blocks(blocks):
        source.load(block)
        _compare(source.model, quantized, [n for n in names if block.owns(n)], figures)
        source.release(block)
    _compare(source.model, quantized, [n for n in names if not any(block.owns(n) for block in blocks)], figures)


def _compare(model: nn.Module, quantized: nn.Module, names: Iterable[str], figures: LayerFigures) -> None:
    for name in names:
        layer = quantized.get_submodule(name)
        whole = layer.unpack() if isinstance(layer, PackedLayer) else layer
        assert isinstance(whole, QuantizedLayer)
        figures.add({name: model.get_submodule(name)}, {name: whole}, {})
