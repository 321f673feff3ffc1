"""Functions for sources of a run that are already quantized.

They find the float tensors that a quantized checkpoint or a quantized model represents.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import get_logger
from quark.errors import ConfigError
from quark.models.hf.dequantizer import FloatTensor, LayerCodes
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.json_files import config_file, naming, read_json
from quark.models.hf.shards import Shard
from quark.models.layers.coded_layer import CodedLayer
from quark.models.layers.layers_from_codes import Packed
from quark.models.layers.quantized_layers import QuantizedLayer
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.catalog import catalog
from quark.plugins.record_fields import described

_KEY = "quantization_config"
_OF_TRANSFORMERS = ("hf_quantizer", "is_quantized", "quantization_method")
"""Names of attributes that transformers sets on a quantized model that it has loaded."""


def float_tensors_of(directory: Path, shards: Sequence[Shard]) -> list[FloatTensor] | None:
    """Return a `FloatTensor` for each float tensor that a quantized checkpoint represents, or None for a
    float checkpoint.

    Args:
        directory: The checkpoint.
        shards: The files of the checkpoint, from `quark.models.hf.shards.check_shards`.

    Raises:
        ConfigError: No installed layout dequantizes the checkpoint.
        AmbiguousNameError: Several installed layouts dequantize the checkpoint.
        CheckpointError: Codes and scales do not fit each other.
        PluginError: The code of the dequantizer has failed.
    """
    layout = source_layout(directory)
    if layout is None:
        return None
    name, block = layout
    with naming(directory / "config.json"):
        float_tensors = checked_float_tensors(name, block, FileTensors(shards).meta, f"'{directory}'")
    get_logger(__name__).info(
        f"'{directory}' is quantized ({block.get('quant_method')}), so {len(float_tensors)} tensors are dequantized before they are "
        "quantized again. This loses accuracy, because values are rounded twice. Use the float checkpoint if there is one"
    )
    return float_tensors


def checked_float_tensors(name: str, block: Mapping[str, Any], stored: Mapping[str, Tensor], what: str) -> list[FloatTensor]:
    """Call the dequantizer of a layout, check the `FloatTensor` objects that it yields, and return them.

    Args:
        name: Name of the layout.
        block: The ``quantization_config``.
        stored: A dictionary from full name to stored tensor, on the meta device.
        what: A description of the checkpoint or model. Messages contain it.

    Raises:
        CheckpointError: Codes and scales do not fit each other.
        PluginError: The code of the dequantizer has failed.
    """
    whose, make = origin("exporters", name), exporters().load_dequantizer(name)
    with attributed(f"dequantizing {what}", whose):
        float_tensors = list(make().float_tensors(block, stored))
    for one in float_tensors:
        if not isinstance(one, FloatTensor):
            raise whose.error(f"yields {described(one)} from 'float_tensors' instead of a FloatTensor")
    return float_tensors


def without_quantization(config: Any) -> Any:
    """Remove all information about quantization from a transformers config, in place. Return the config."""
    for part in (config, getattr(config, "text_config", None)):
        if getattr(part, _KEY, None) is not None:
            delattr(part, _KEY)
    return config


def source_layout(directory: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name of the layout that dequantizes a checkpoint, and the ``quantization_config``.

    Return None for a float checkpoint.

    Raises:
        CheckpointError: There is no ``config.json``, or it is damaged.
        ConfigError: No installed layout dequantizes the checkpoint. The message names the ``quant_method`` of
            the checkpoint and the methods of installed layouts.
        AmbiguousNameError: Several installed layouts dequantize the checkpoint.
    """
    path = config_file(directory)
    config = read_json(path)
    with naming(path):
        block = _block(config)
    if block is None:
        return None
    name = exporters().fitting_one(block, "dequantizer", path)
    if name is None:
        raise ConfigError(
            f"'{directory}' is quantized already, by the quant_method {block.get('quant_method')!r}, which no installed layout dequantizes "
            f"(installed layouts dequantize {exporters().methods_with('dequantizer')}). Give the float checkpoint. "
            f"{catalog().missing((exporters().kind.distribution,))}".rstrip()
        )
    return name, block


def _block(config: Any) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a config.json, or None if the file has none.

    ``config`` is the content of the file. The ``quantization_config`` may be at the top level or in the text
    config.
    """
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    blocks = [part[_KEY] for part in parts if isinstance(part, dict) and part.get(_KEY) is not None]
    if blocks and not isinstance(blocks[0], dict):
        raise ConfigError(f"it is {described(blocks[0])} instead of a table")
    return blocks[0] if blocks else None


@attrs.frozen(eq=False)
class QuantizedModel:
    """A model in memory that another tool has quantized. An installed plugin can dequantize it.

    Attributes:
        model: The quantized model.
        twin: The float model of the same class, on the meta device.
        float_tensors: The float tensors that the codes and scales of ``model`` represent.
    """

    model: nn.Module
    twin: nn.Module
    float_tensors: tuple[FloatTensor, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return a `QuantizedModel` for ``model``, or None.

        The result is None if the model is float, or if no installed layout dequantizes the model. It is also
        None for a model that quark itself has loaded as a quantized model. Planning refuses such a model.

        Raises:
            CheckpointError: Codes and scales do not fit each other.
            PluginError: The code of the dequantizer has failed.
        """
        block = _block_of(getattr(model, "config", None))
        name = None if block is None else exporters().fitting_one(block, "dequantizer", Path("config.json"))
        if block is None or name is None or any(isinstance(module, QuantizedLayer | Packed) for module in model.modules()):
            return None
        stored = {n: tensor.detach().to("meta") for n, tensor in model.state_dict().items()}
        float_tensors = checked_float_tensors(name, block, stored, f"this {type(model).__name__}")
        if not float_tensors:
            return None
        config: Any = without_quantization(copy.deepcopy(model.config))
        dtype = next((t.dtype for t in stored.values() if t.dtype.is_floating_point and t.itemsize > 1), torch.float32)
        with torch.device("meta"):
            twin: nn.Module = type(model)(config).to(dtype)
        return cls(model, twin, tuple(float_tensors))

    @property
    def codes_of(self) -> dict[str, LayerCodes | None]:
        """A dictionary from full name of each layer that is quantized in the source to its `LayerCodes`.

        The value is None if no `QLayerConfig` expresses the quantization of the layer exactly.
        """
        known: dict[str, LayerCodes | None] = {codes.name: codes for one in self.float_tensors for codes in one.layers}
        return known | {one.name.removesuffix(".weight"): None for one in self.float_tensors if not one.layers}

    def coded(self, names: Iterable[str]) -> Mapping[str, CodedLayer]:
        """Return a dictionary from full name to `CodedLayer`, for the layers ``names``.

        Call this before `dequantize`.
        """
        state, chosen = self.model.state_dict(), set(names)
        return {
            codes.name: codes.read({name: state[name] for name in (*one.sources, *one.left_out)})
            for one in self.float_tensors
            for codes in one.layers
            if codes.name in chosen
        }

    @torch.no_grad()
    def dequantize(self) -> None:
        """Replace the quantized modules of the model by float modules, in place.

        This method also removes all attributes of the model that mark it as quantized.
        """
        of_module: dict[str, dict[str, FloatTensor]] = {}
        for one in self.float_tensors:
            owner, _, leaf = one.name.rpartition(".")
            of_module.setdefault(owner, {})[leaf] = one
        for owner, made in of_module.items():
            quantized, module = self.model.get_submodule(owner), self.twin.get_submodule(owner)
            own = {f"{owner}.{name}": tensor for name, tensor in quantized.state_dict().items()}
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    values: Tensor = made[leaf].make(own, parameter.dtype) if leaf in made else own[f"{owner}.{leaf}"]
                    module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = quantized._buffers.get(leaf, buffer)
            self.model.set_submodule(owner, module.train(quantized.training))
        without_quantization(self.model.config)
        for name in _OF_TRANSFORMERS:
            self.model.__dict__.pop(name, None)
        hook = self.model.__dict__.pop("ct_decompress_hook", None)  # with it, compressed-tensors would decompress in the first forward
        if hook is not None:
            hook.remove()


def _block_of(config: Any) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a transformers config as a config.json would contain it."""
    block: Any = getattr(config, "quantization_config", None)
    block = block.to_dict() if hasattr(block, "to_dict") else block
    plain: Any = json.loads(json.dumps(block, default=lambda value: getattr(value, "value", str(value))))
    return plain if isinstance(plain, dict) else None
