"""Quantization of checkpoints without their models, by the names and shapes of tensors."""

from quark_workbench.without_model.named_model import NamedModel, named_model
from quark_workbench.without_model.quantize import quantize_without_model, refuse_forwards, refuse_transforms

__all__ = ["NamedModel", "named_model", "quantize_without_model", "refuse_forwards", "refuse_transforms"]
