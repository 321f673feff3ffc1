"""The attributes that a run or a reader sets on a quantized model, such as ``save_pretrained``."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from quark.base.lazy import LazyRef
from quark.checkpoint.content import CheckpointContent
from quark.errors import UnsupportedError
from quark.models.hf.internals import source_of

_EXPORT = LazyRef("quark.checkpoint.export:export_safetensors")  # lazy, because the two modules import each other
_WITHOUT_EFFECT = ("max_shard_size", "save_peft_format", "save_original_format", "token")
_AS_ALWAYS = ("safe_serialization", "save_compressed")  # the second option comes from llm-compressor


def set_results(content: CheckpointContent) -> None:
    """Set attributes of a model that show how the model is quantized, and replace its ``save_pretrained``."""
    model: Any = content.model
    model.quant_config, model.quark_plan, model.quark_quantized = content.config, content.plan, True
    if hasattr(type(model), "save_pretrained"):
        model.__dict__["save_pretrained"] = SavesQuantized(model)


class SavesQuantized:
    """The ``save_pretrained`` of one quantized model. It writes the same files as `export_safetensors`.

    The method ``save_pretrained`` of the model's class would write rounded weights as floats, and no runtime
    would then quantize activations. This object has only a weak reference to the model. If the model is
    copied, for example with ``torch.save``, the copy gets a `SavesQuantized` of its own.

    Args:
        model: A quantized model of a class with ``save_pretrained``.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
        """Write the model to a directory, as a checkpoint in the Quark layout.

        Args:
            save_directory: The output directory (``output_dir`` in `export_safetensors`).
            is_main_process: Whether this process writes the files. If False, nothing happens.
            options: Options that ``save_pretrained`` has in transformers. ``max_shard_size`` and ``token``
                have no effect. Options that would change the content of the files are refused.

        Raises:
            UnsupportedError: An option would change the content of the files, or the model was loaded with
                ``from_pretrained``.
            OutputError: The directory is in use, or cannot be written.
        """
        model: Any = self._model()
        if getattr(model, "_hf_peft_config_loaded", False):  # only an adapter is saved
            type(model).save_pretrained(model, save_directory, is_main_process=is_main_process, **options)
            return
        if not getattr(model, "quark_quantized", False):
            raise UnsupportedError(
                f"this model was loaded quantized, from '{source_of(model.config)}', and cannot be saved again. Copy that "
                "directory, or read it with quark.checkpoint.import_model_from_safetensors, and write the model with export_safetensors"
            )
        asked = {name for name, value in options.items() if value not in (None, name in _AS_ALWAYS)}
        if asked := asked.difference(_WITHOUT_EFFECT):
            raise UnsupportedError(
                f"save_pretrained of a quantized model writes the Quark layout, and does not support {', '.join(sorted(asked))}. "
                "Leave out this argument, or use quark.checkpoint.export_safetensors, which has weight_format='fake_quantized' for floats"
            )
        if is_main_process:
            _EXPORT.load()(model, save_directory)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavesQuantized:
        return SavesQuantized(memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> tuple[Any, ...]:
        return SavesQuantized, (self._model(),)
