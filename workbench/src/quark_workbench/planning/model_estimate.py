"""The function `estimate_model`, which tells what the quantization and export of a model in memory need."""

from __future__ import annotations

import copy

import torch
from torch import nn

from quark.checkpoint.export import exporter_of
from quark.checkpoint.exporter import ExportOptions
from quark.config.model import QConfig
from quark.models.hf.quantized_source import QuantizedModel
from quark.models.plan.one_layer import as_model
from quark.models.plan.quant_plan import CodesOf
from quark.runs.run import plan_run
from quark_workbench.planning.estimate import Estimate, estimate
from quark_workbench.planning.workload import Calibration

__all__ = ["estimate_model"]


def estimate_model(
    model: nn.Module,
    config: QConfig,
    calibration: Calibration = Calibration(),  # noqa: B008 - frozen
    *,
    exporter: str = "safetensors",
    options: ExportOptions | None = None,
    probing: bool = True,
) -> Estimate:
    """Return the `Estimate` for `ModelQuantizer.quantize_model` followed by an export.

    Args:
        model: Any module, which does not change. Its tensors can be on the meta device.
        config: The configuration.
        calibration: The size of the calibration data, if any are needed.
        exporter: Name of the exporter.
        options: Options of the export.
        probing: Whether to measure this machine for a few seconds to estimate the time.

    Raises:
        ConfigError: The configuration does not fit the model.
        UnknownNameError: There is no such exporter.

    Example:
        >>> from quark_tiny_model import tiny_model, tiny_template
        >>> estimate = estimate_model(tiny_model(), tiny_template().get_config("int4_wo_64"), probing=False)
        >>> round(estimate.output.bits_per_quantized_weight, 2)
        4.56
    """
    source = QuantizedModel.of(model)
    whole = as_model(model) if source is None else source.twin
    codes_of: CodesOf = {} if source is None else source.codes_of
    in_memory = not any(p.is_meta for p in model.parameters())
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    twin = copy.deepcopy(whole, {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in whole.parameters()})
    run, own = plan_run(twin, config, codes_of).for_data(twin, calibration.calls(), device), options or ExportOptions()
    return estimate(twin, run, calibration, exporter_of(exporter, own), own, device, in_memory=in_memory, probing=probing)
