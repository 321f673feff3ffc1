"""Quantization of checkpoints without a model class, from the names and shapes of their tensors."""

from quark_workbench.without_model.named_model import NamedModel, named_model
from quark_workbench.without_model.quantize import quantize_without_model, refuse_forwards, refuse_transforms

__all__ = ["NamedModel", "named_model", "quantize_without_model", "refuse_forwards", "refuse_transforms"]
