"""Registration of the layouts with transformers, so that ``from_pretrained`` reads them.

transformers supports ``quant_method: quark`` itself and imports quark for it. For other methods, a program
calls `register_layouts` before ``from_pretrained``. Importing quark does not register them, since that would
import torch and transformers.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, RenamesTensors, layout_for, reader_of
from quark.checkpoint.provenance import refuse_unreadable
from quark.models.hf.internals import source_of
from quark.models.hf.loading import keeps_codes, unpack_all
from quark.plugins import exporters

__all__ = ["is_read_here", "register_layouts"]

_IMPORTS_QUARK = "quark"
"""The method for which transformers has a quantizer that imports this package."""


def register_layouts() -> list[str]:
    """Register each installed layout with transformers by its ``quant_methods``.

    Methods that transformers knows already are skipped.

    Layouts whose tensors are not in safetensors files (`ReadsOwnFiles`) can only be read by
    `import_model_from_safetensors`.

    Returns:
        The methods that this call has registered.
    """
    from transformers.quantizers import register_quantization_config, register_quantizer

    registered = []
    methods = {method for record in exporters() if record.reader is not None for method in record.quant_methods}
    for method in sorted(methods):
        with suppress(ValueError):  # the method is registered already, by transformers or an earlier call
            register_quantization_config(method)(_config_class(method))
            register_quantizer(method)(_quantizer_class())
            registered.append(method)
    return registered


def is_read_here(method: str) -> bool:
    """Return whether ``from_pretrained`` calls a layout's reader for checkpoints of that method.

    That is so after `register_layouts`.

    For other methods that it knows, transformers has readers of its own.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    quantizer = AUTO_QUANTIZER_MAPPING.get(method)
    return method == _IMPORTS_QUARK or (quantizer is not None and quantizer.__module__ == __name__)


def _config_class(method: str) -> type[Any]:
    """Return a class of transformers' quantization configs for that method."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class LayoutConfig(QuantizationConfigMixin):
        """The unparsed ``quantization_config`` of a checkpoint."""

        def __init__(self, **block: Any) -> None:
            self.quant_method = method
            self.block = {**block, "quant_method": method}

        def to_dict(self) -> dict[str, Any]:
            return dict(self.block)

    return LayoutConfig


def _quantizer_class() -> type[Any]:
    from transformers.core_model_loading import WeightRenaming
    from transformers.quantizers import HfQuantizer

    class LayoutQuantizer(HfQuantizer):
        """A quantizer of transformers that delegates to the layout's reader."""

        requires_calibration = True

        def __init__(self, quantization_config: Any, **options: Any) -> None:
            super().__init__(quantization_config, **options)
            self._reader = _reader(quantization_config.block)

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            stored = self._reader.configuration(self.quantization_config.block, Path(source_of(model.config)))
            refuse_unreadable(stored.config)
            self._reader.prepare(model, stored)
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            unpack_all(model, Path(source_of(model.config)), keeps_codes=keeps_codes())
            return model

        def get_weight_conversions(self) -> list[Any]:
            renamings = self._reader.renamings if isinstance(self._reader, RenamesTensors) else ()
            return [WeightRenaming(source, target) for source, target in renamings]

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    return LayoutQuantizer


def _reader(block: dict[str, Any]) -> LayoutReader:
    layout = layout_for(block, Path("config.json"))
    reader = reader_of(layout)
    if isinstance(reader, ReadsOwnFiles):
        raise ValueError(
            f"the layout '{layout}' has files of its own, which from_pretrained cannot read: use quark.torch.import_model_from_safetensors"
        )
    return reader
