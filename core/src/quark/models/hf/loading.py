"""Functions that load the model of a checkpoint and its weights with transformers.

Dtypes and devices are passed to the functions as names, because users write names. transformers is imported
inside the functions. If it were imported at the top, the import of ``quark.runs``, which imports this
package, would be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.torch_state import building
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.internals import reading_files
from quark.models.hf.json_files import read_json, reading
from quark.models.hf.missing_tensors import beside_others, refuse_missing, refuse_unannounced
from quark.models.hf.model_class import model_class
from quark.models.hf.model_config import model_config
from quark.models.hf.shards import DTYPES, check_shards, refuse_codes, unchanged
from quark.models.hf.tied_tensors import other_names
from quark.models.layers import share_codes
from quark.models.layers.layers_from_codes import Packed, until_used
from quark.models.layers.quantized_layers import held_weight

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype called ``name``, or None for ``auto``. Raise ConfigError for any other name."""
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"the dtype {name!r} cannot be used: use auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def torch_device(name: str) -> torch.device:
    """Return the device called ``name``. Raise ConfigError if torch cannot use this device here."""
    try:
        target = torch.device(name)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {name!r} cannot be used here: {error}") from error
    return target


def first_dtype(path: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's first tensor that is not codes. Return float32 if there is no such
    tensor."""
    stored = (DTYPES.get(name, torch.uint8) for shard in check_shards(path) for name, _ in shard.tensors.values())
    return next((dtype for dtype in stored if dtype.is_floating_point and dtype.itemsize > 1), torch.float32)


_KEEPS_CODES = ContextVar("keeps_codes", default=False)


@contextmanager
def running_from_codes(wanted: bool = True) -> Iterator[None]:
    """Inside this ``with`` block, let ``from_pretrained`` of transformers keep the weights of a quantized
    checkpoint as codes.

    The layers then compute from these codes, like after ``import_model_from_safetensors(…, packed=True)``.
    transformers has no option for this, so this context sets a context variable to ``wanted``.
    """
    token = _KEEPS_CODES.set(wanted)
    try:
        yield
    finally:
        _KEEPS_CODES.reset(token)


def keeps_codes() -> bool:
    """Return whether the program is inside ``with running_from_codes()``."""
    return _KEEPS_CODES.get()


def load_model(path: Path, dtype: str = "auto", device: str = "cpu", *, trust_remote_code: bool = False, packed: bool = False) -> nn.Module:
    """Return the model of a float or quantized checkpoint, in evaluation mode.

    Args:
        path: Checkpoint directory.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the dtype in the checkpoint.
        device: Name of a torch device, such as ``"cuda:0"``.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        packed: Whether layers of a quantized checkpoint keep their codes and compute from them. This has no
            effect if transformers reads the checkpoint without quark.

    Raises:
        ConfigError: The dtype or the device is unknown.
        CheckpointError: A shard is missing or truncated, is outside the directory, or changes while it is
            read. Or the weights and config.json do not belong together.
    """
    model_dtype = torch_dtype(dtype) or "auto"
    config = model_config(path, trust_remote_code=trust_remote_code)
    kind = model_class(config, path / "config.json", trust_remote_code=trust_remote_code)
    shards = check_shards(path)
    block = getattr(config, "quantization_config", None)
    if block is None:
        refuse_codes(shards, path)
    else:
        _refuse_unknown_method(block, path)
    target = torch_device(device)
    if (path / "generation_config.json").is_file():
        read_json(path / "generation_config.json")  # transformers reads it without bounds, and ignores a damaged one
    with (
        unchanged(shards),
        building(),
        running_from_codes(packed),
        reading_files(),
        reading(path, "its weights do not fit the model that its config.json names; fetch both again"),
    ):
        model, report = kind.load(path, dtype=model_dtype, output_loading_info=True)
    refuse_missing(sorted(report["missing_keys"]), model, path)  # transformers only warns, and fills them with random numbers
    if block is not None:
        is_beside = beside_others(model)
        refuse_unannounced(sorted(filter(is_beside, report["unexpected_keys"])), path)  # transformers only reports them
    loaded: nn.Module = model.eval().to(target)
    unpack_all(loaded, path, keeps_codes=packed)
    return loaded


def _refuse_unknown_method(block: Any, path: Path) -> None:
    """Raise an error if transformers does not support the ``quant_method`` of a checkpoint.

    Without this check, transformers would load the codes as if they were float weights.

    Raises:
        CheckpointError: transformers does not support the ``quant_method``.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = block.get("quant_method") if isinstance(block, Mapping) else getattr(block, "quant_method", None)
    if getattr(method, "value", method) not in AUTO_QUANTIZER_MAPPING:
        raise CheckpointError(
            f"'{path}' is quantized by the quant_method {method!r}, which neither transformers nor an installed layout reads: correct its "
            "config.json, or install the distribution that provides it"
        )


def unpack_model(model: nn.Module) -> nn.Module:
    """Unpack the weights of all layers that compute from codes. Change ``model`` in place, and return it."""
    unpack_all(model, Path())
    return model


def unpack_all(
    model: nn.Module,
    directory: Path,
    chosen: Callable[[str], bool] = lambda _: True,
    *,
    keeps_codes: bool = False,
    when_used: bool = False,
) -> None:
    """Replace each `Packed` module of a model by the quantized module that its stored tensors describe.

    The function changes the model in place.

    Args:
        model: The model.
        directory: The directory of the checkpoint. Messages name it.
        chosen: A function that returns whether to replace the module with this full name.
        keeps_codes: Whether weights stay codes, and layers compute from these codes.
        when_used: Whether a weight is unpacked only when its layer is called or the weight is accessed.

    Raises:
        CheckpointError: A stored scale is not valid. The message names the directory and the layer.
    """
    last = "."
    others = other_names(model)
    first_with: dict[object, nn.Module] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Packed) and chosen(name) and not name.startswith(f"{last}."):
            last = name
            try:
                module = layer.from_codes() if keeps_codes or when_used else layer.unpack()
                module = module if keeps_codes else until_used(module)
                held = held_weight(layer)
                if held[0] is not None and (source := first_with.setdefault(held, module)) is not module:
                    share_codes(module, source)  # type: ignore[arg-type]
                for place in (name, *others.get(name, ())):
                    model.set_submodule(place, module)
            except CheckpointError as error:
                raise CheckpointError(f"'{directory}' cannot be used: {error}") from error
