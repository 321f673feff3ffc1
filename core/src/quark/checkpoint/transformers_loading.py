"""Functions that ``from_pretrained`` of transformers calls, and a function that registers layouts.

transformers itself supports ``quant_method: quark``, and then imports quark. For other values of
``quant_method``, a program must call `register_layouts` before ``from_pretrained``. The import of quark does
not register layouts, because the registration imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.version import refuse_unfit_environment, transformers_version
from quark.checkpoint.announced_tensors import refuse_misfits, refuse_misfits_of
from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, StoredConfig, layout_for, reader_of
from quark.checkpoint.provenance import refuse_unreadable
from quark.checkpoint.reader import import_model_from_safetensors, layers_to_tie, tied_codes
from quark.checkpoint.save_pretrained import SavesQuantized
from quark.config.model import QConfig
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.internals import (
    before_tying,
    directory_of,
    initialize,
    keep_from_initializing,
    on_missing,
    renamed_by_loader,
    renamed_scales,
    source_of,
    tied_on_loading,
)
from quark.models.hf.json_files import config_file, read_json
from quark.models.hf.loading import keeps_codes, load_model, torch_device, torch_dtype, unpack_all
from quark.models.hf.shards import INDEX, SINGLE, check_shards
from quark.models.hf.skeleton import empty_model
from quark.models.hf.tied_tensors import aliases, tie_equal
from quark.models.layers.experts import SeparateExperts
from quark.models.layers.packed_layers import PackedLayer, PackedScales
from quark.plugins import exporters

_IMPORTS_QUARK = "quark"
"""The ``quant_method`` for which transformers has a quantizer that imports this package."""


def register_layouts() -> list[str]:
    """Register each installed layout with transformers, under the names in the layout's ``quant_methods``.

    Names that transformers already supports are skipped. If a layout does not store tensors in safetensors
    files (`ReadsOwnFiles`), only `import_model_from_safetensors` can read it.

    Returns:
        The names that this call has registered.
    """
    refuse_unfit_environment()
    from transformers.quantizers import register_quantization_config, register_quantizer

    registered = []
    methods = {method for record in exporters() if record.reader is not None for method in record.quant_methods}
    for method in sorted(methods):
        with suppress(ValueError):  # transformers or an earlier call has registered the method
            register_quantization_config(method)(_config_class(method))
            register_quantizer(method)(_quantizer_class())
            registered.append(method)
    return registered


def is_read_here(method: str) -> bool:
    """Return whether ``from_pretrained`` calls one of quark's readers for this ``quant_method``.

    After a call of `register_layouts`, the result is True for every ``quant_method`` of an installed layout,
    except for those that transformers itself supports.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    quantizer = AUTO_QUANTIZER_MAPPING.get(method)
    return method == _IMPORTS_QUARK or (quantizer is not None and quantizer.__module__ == __name__)


def load_checkpoint(
    path: Path, dtype: str = "auto", device: str = "cpu", *, trust_remote_code: bool = False, packed: bool = False
) -> nn.Module:
    """Load a float or quantized checkpoint, and return the model in evaluation mode.

    The function registers layouts with transformers. Some quantized checkpoints can be read both by quark and
    by a library that transformers calls. `import_model_from_safetensors` reads these, and `load_model` reads
    all other checkpoints. In both cases, a quantized checkpoint must have exactly the tensors that its
    configuration announces. `load_model` has the same arguments and raises the same errors.
    """
    register_layouts()
    file = config_file(path)
    block = read_json(file).get("quantization_config")
    layout = exporters().fitting_one(block, "reader", file) if isinstance(block, dict) else None
    if isinstance(block, dict) and layout is not None and not is_read_here(str(block.get("quant_method"))):
        try:
            model = _read_here(path, dtype, device, trust_remote_code=trust_remote_code, packed=packed)
        except UnsupportedError as error:
            get_logger(__name__).info(f"transformers reads '{path}', because quark cannot read it: {error}")
        else:
            get_logger(__name__).info(f"quark's reader of the layout '{layout}' reads '{path}', not transformers.")
            return model
    refuse_misfits_of(path, trust_remote_code=trust_remote_code)
    return load_model(path, dtype, device, trust_remote_code=trust_remote_code, packed=packed)


def _read_here(path: Path, dtype: str, device: str, *, trust_remote_code: bool, packed: bool) -> nn.Module:
    """Read a quantized checkpoint with `import_model_from_safetensors`, and return the model."""
    target = str(torch_device(device))
    model = empty_model(path, None, trust_remote_code=trust_remote_code, dtype=torch_dtype(dtype))
    return import_model_from_safetensors(model, path, device=target, packed=packed)


def map_to_quark(model: nn.Module, quant_config: QConfig, pack_method: str = "reorder", custom_mode: str = "quark") -> nn.Module:
    """Change a float model in place so that the tensors of a checkpoint fit.

    The library transformers calls this function before it loads tensors.

    Args:
        model: A float model. Its weights are not used, and may be on any device.
        quant_config: The configuration from the ``quantization_config`` of the checkpoint.
        pack_method: The value of ``pack_method`` under ``export`` in the ``quantization_config``.
        custom_mode: The ``quant_method`` in the ``quantization_config``. It determines the layout.

    Returns:
        The argument ``model``.

    Raises:
        EnvironmentConflictError: This version of transformers is not supported.
        UnsupportedError: No registered layout reads this ``custom_mode``. Or the configuration quantizes
            attention, but the model cannot use quark's attention functions.
        MissingPluginError: An algorithm that runs as part of the model is not installed.
        ConfigError, UnknownNameError: The configuration does not fit the model, or needs a format that is not
            installed.
        CheckpointError: The checkpoint stores a format in a layout version that the installed distribution
            does not read.
    """
    refuse_unfit_environment()
    try:
        layout = layout_for({"quant_method": custom_mode}, Path("config.json"))
    except CheckpointError as error:
        raise UnsupportedError(f"checkpoints of custom_mode '{custom_mode}' cannot be read: {error}") from error
    _prepare(model, reader_of(layout), StoredConfig(config=quant_config, pack_method=pack_method), renames_scales=True)
    return model


def _prepare(model: nn.Module, reader: LayoutReader, stored: StoredConfig, *, renames_scales: bool = False) -> None:
    """Change a float model in place so that transformers can fill it with the tensors of a checkpoint.

    The function adds tensors to the model. If the checkpoint has no values for them, loading raises an error.

    Args:
        model: The float model.
        reader: Reader of the layout of the checkpoint.
        stored: The configuration of the checkpoint.
        renames_scales: Whether transformers renames scales while it loads (`renamed_scales`).
    """
    from transformers import PreTrainedModel

    before = model.state_dict(keep_vars=True)
    reader.prepare(model, stored)
    if not isinstance(model, PreTrainedModel):
        return
    directory = directory_of(model.config)
    if directory is not None and any((directory / name).is_file() for name in (INDEX, SINGLE)):
        refuse_misfits(model, reader, stored.config, directory)
    keep_from_initializing(model, [name for name, module in model.named_modules() if isinstance(module, SeparateExperts)])
    if renames_scales:
        _put_scales_where_the_loader_looks(model)
    known = {id(tensor) for tensor in before.values()}
    own = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in known}
    tied: set[str] = set()
    on_missing(model, partial(_fill_missing, model, own, tied))
    before_tying(model, partial(_end_loading, model, aliases(model), tied, keeps_codes()))


def _put_scales_where_the_loader_looks(model: nn.Module) -> None:
    """Move scales of packed layers into the same module as the weight if transformers does not rename them.

    The stored name of a scale is then also the name of the scale in the model.
    """
    renamed, is_another = renamed_scales(), renamed_by_loader(model)
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLayer):
            layer.put_beside_weight(lambda leaf, name=name: leaf not in renamed or is_another(f"{name}.{leaf}"))  # type: ignore[misc]


def _fill_missing(model: Any, own: set[str], tied: set[str], missing: set[str], give_memory: Callable[[], None]) -> None:
    """Fill tensors that a checkpoint need not contain, and raise an error if other tensors are missing.

    Missing zero points of symmetric specs become 0. If a checkpoint stores the codes and scales of tied
    layers only once, all these layers share them.

    Args:
        model: The model that transformers loads.
        own: Names of the tensors that quark has added to the model.
        tied: A set to which this function adds the names of missing tensors that a tied layer provides.
        missing: Names of the tensors that the checkpoint lacks. Filled tensors are removed from this set.
        give_memory: A function that moves missing tensors from the meta device into memory.

    Raises:
        CheckpointError: The checkpoint lacks tensors whose names are in ``own``.
        UnsupportedError: The checkpoint contains these tensors, but transformers does not load them.
    """
    shared = layers_to_tie(model, model.state_dict().keys() - missing)
    names = {module: name for name, module in model.named_modules()}
    tied |= missing & {f"{names[layer]}.{tensor}" for layer in shared for tensor in layer.weight_tensors()}
    own = own | tied_codes(model)
    missing -= tied | (tied_on_loading(model).keys() - tied_codes(model))
    scales = ((path, module) for path, module in model.named_modules() if isinstance(module, PackedScales | PackedLayer))
    zero_points = {f"{path}.{suffix}" for path, module in scales for suffix in module.zero_points_of_symmetric_specs()} & missing
    lost = sorted(own & missing - zero_points)
    if lost:
        directory, what = source_of(model.config), f"{len(lost)} tensor(s) of a {type(model).__name__}: {folded(lost)}"
        if _stored_names(directory).issuperset(map(_stored_name, lost)):
            raise UnsupportedError(
                f"transformers {transformers_version()} does not load {what}, but '{directory}' holds them. Read this checkpoint "
                "with quark.checkpoint.import_model_from_safetensors, or use another version of transformers"
            )
        raise CheckpointError(
            f"'{directory}' has no values for {what}. The checkpoint is incomplete, or it belongs to another model class. Fetch it again, "
            "or use quark.checkpoint.import_model_from_safetensors, which builds the class that config.json names"
        )
    give_memory()
    for layer, source in shared.items():
        layer.share_codes(source)
    for name in zero_points:
        model.get_buffer(name).zero_()


def _end_loading(model: Any, groups: list[list[str]], tied: set[str], keeps: bool, missing: set[str]) -> None:
    """Replace packed layers by quantized layers, after transformers has loaded the tensors of ``model``.

    Also remove the names in ``tied`` from ``missing``.
    """
    missing -= tied
    for layer in model.modules():
        if isinstance(layer, PackedLayer):
            layer.initialize_buffers(partial(initialize, model))
    unpack_all(model, Path(source_of(model.config)), keeps_codes=keeps, when_used=True)
    tie_equal(model, groups)
    model.__dict__["save_pretrained"] = SavesQuantized(model)


def _stored_names(directory: str) -> set[str]:
    """Return the names of the tensors in a checkpoint. The result is empty if the checkpoint is on a hub."""
    with suppress(CheckpointError):
        return {name for shard in check_shards(Path(directory)) for name in shard.tensors}
    return set()


def _stored_name(name: str) -> str:
    """Return the name under which a checkpoint stores the tensor ``name`` of a model.

    For example, the checkpoint stores ``weight_quantizer.scale`` as ``weight_scale``.
    """
    owner, _, leaf = name.rpartition(".")
    return f"{owner.removesuffix('_quantizer')}_{leaf}" if owner.endswith("_quantizer") else name


def _config_class(method: str) -> type[Any]:
    """Return a class of quantization configs for transformers. ``method`` is the ``quant_method``."""
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
    """Return a class of quantizers for transformers. The quantizers call the reader of a layout."""
    from transformers.core_model_loading import WeightRenaming
    from transformers.quantizers import HfQuantizer

    class LayoutQuantizer(HfQuantizer):
        """A quantizer for transformers that calls the reader of the layout."""

        requires_calibration = True

        def __init__(self, quantization_config: Any, **options: Any) -> None:
            super().__init__(quantization_config, **options)
            self._reader = _reader(quantization_config.block)

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            stored = self._reader.configuration(self.quantization_config.block, Path(source_of(model.config)))
            refuse_unreadable(stored.config, f"the checkpoint '{source_of(model.config)}'")
            _prepare(model, self._reader, stored)
            return model

        def get_weight_conversions(self) -> list[Any]:
            return [WeightRenaming(source, target) for source, target in self._reader.renamings]

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    return LayoutQuantizer


def _reader(block: dict[str, Any]) -> LayoutReader:
    """Return the reader for a ``quantization_config``.

    Raise ValueError if ``from_pretrained`` cannot use this reader.
    """
    layout = layout_for(block, Path("config.json"))
    reader = reader_of(layout)
    if isinstance(reader, ReadsOwnFiles):
        raise ValueError(
            f"from_pretrained cannot read the files of the layout '{layout}'. Use quark.checkpoint.import_model_from_safetensors"
        )
    return reader
