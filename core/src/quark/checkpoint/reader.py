"""Functions that read checkpoints of any registered layout.

A model that was read computes the same logits as the model that was exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.names import folded
from quark.base.version import refuse_unfit_environment
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, StoredConfig, layout_for, quantization_block, reader_of
from quark.checkpoint.provenance import refuse_unreadable
from quark.checkpoint.restorers import missing_algorithms, restorers_of
from quark.checkpoint.save_pretrained import set_results
from quark.config.layer import PARAMETERS
from quark.config.model import QConfig
from quark.errors import AmbiguousNameError, CheckpointError, ConfigError, QuarkError, UnknownNameError, UnsupportedError
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.internals import tied_on_loading
from quark.models.hf.loading import unpack_all
from quark.models.hf.missing_tensors import left_out_by, misfit, without_source
from quark.models.hf.shards import Shard, check_shards
from quark.models.hf.skeleton import empty_model
from quark.models.hf.tied_tensors import aliases, module_at, put_tensor, tie_equal
from quark.models.layers.packed_layers import PackedLayer, PackedScales
from quark.models.plan.one_layer import as_model, put_back
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import Origin, attributed, origin
from quark.plugins.record_fields import described


@attributed("reading a checkpoint")
def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | Path,
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: str = "cuda",
    multi_gpu: bool = False,
    *,
    packed: bool = False,
) -> nn.Module:
    """Return the quantized model that an export contains.

    The ``config.json`` of the export determines the layout. Every registered layout with a reader can be
    read.

    Args:
        model: A float model of the same structure. It is changed in place. If None, the model is built from
            the ``config.json`` of the export. This is possible only for transformers models.
        model_dir: Directory of the export.
        multi_device: This argument has no effect. It exists because AMD Quark's public API has it.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run. The argument matters
            only if ``model`` is None.
        attn_implementation: Attention implementation of the model that is built if ``model`` is None. None
            means the default of transformers.
        device: The device of the loaded model. On a machine without CUDA, ``"cuda"`` means the CPU.
        multi_gpu: This argument has no effect. It exists because AMD Quark's public API has it.
        packed: Whether weights stay packed in memory, in the same form as in the files. Each forward pass
            then unpacks them. The model needs only as much memory as its files, and computes the same
            results, but more slowly.
            `quark.checkpoint.unpack_model` unpacks such a model.

    Returns:
        The model in evaluation mode. It has the same layers as after `ModelQuantizer.quantize_model`.

    Raises:
        CheckpointError: The export is incomplete or damaged, no installed layout reads it, or its tensors do
            not fit the model.
        ConfigError: (a ValueError) ``model`` is on the meta device, and has buffers that no checkpoint
            contains.
        AmbiguousNameError: Several installed layouts can read the export.
        MissingPluginError: An algorithm that runs as part of the model is not installed.
        UnknownNameError: A format, an observer or another record is not installed. The message names the
            distribution that provides it, if this is known.
        UnsupportedError: The export needs a feature that this package or the model does not support.
        PluginError: The code of a plugin failed.
    """
    refuse_unfit_environment()
    directory = Path(model_dir)
    float_model = empty_model(directory, attn_implementation, trust_remote_code=trust_remote_code) if model is None else model
    _refuse_lost_buffers(float_model)
    groups = aliases(as_model(float_model))
    content = _packed_content(float_model, directory)
    unpack_all(content.model, directory, keeps_codes=packed)
    tie_equal(content.model, groups)
    set_results(content)
    put_back(content.model, float_model)
    return float_model.eval().to(device if device != "cuda" or torch.cuda.is_available() else "cpu")


def _refuse_lost_buffers(model: nn.Module) -> None:
    """Raise ConfigError if the model has buffers on the meta device that no checkpoint contains."""
    stored = model.state_dict(keep_vars=True)
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in stored]:
        raise ConfigError(
            f"this {type(model).__name__} is on the meta device, but no checkpoint holds the values of its {folded(lost)}. Build it on "
            "the CPU, or give model=None, so that quark builds the model from the config.json of the export"
        )


@attributed("reading a checkpoint")
def packed_content(model_dir: str | Path, *, trust_remote_code: bool = False) -> CheckpointContent:
    """Read the export of a transformers model, and return its content with packed layers.

    The layers are `quark.models.layers.layers_from_codes.Packed`, so the model needs no more memory than its
    files. The function raises the same errors as `import_model_from_safetensors`.
    """
    return _packed_content(empty_model(Path(model_dir), None, trust_remote_code=trust_remote_code), Path(model_dir))


def _packed_content(float_model: nn.Module, directory: Path) -> CheckpointContent:
    """Load a checkpoint into ``float_model``, in place, and return the content. The layers stay packed.

    The function raises the same errors as `packed_content`.
    """
    opened = OpenedCheckpoint.of(directory, as_model(float_model))
    model = opened.model
    loaded = _load(opened)
    tie(model, loaded)
    loaded |= fill_zero_points(model, loaded)
    missing = list(without_source(model.state_dict(keep_vars=True), loaded))
    if missing:
        raise CheckpointError(f"the export '{directory}' lacks {len(missing)} tensor(s): {folded(missing)}. Make or fetch the export again")
    is_carried = left_out_by(model, opened.config.exclude)
    carried = [name for shard in opened.shards for name in shard.tensors if is_carried(name)]
    return CheckpointContent(model, opened.config, opened.plan.carrying(carried, model))


@attrs.frozen(eq=False)
class OpenedCheckpoint:
    """A quantized checkpoint whose tensors have not been read, and a model that is prepared for the tensors.

    Attributes:
        directory: The checkpoint.
        layout: Name of the layout of the checkpoint.
        reader: Reader of the layout.
        config: Configuration of the quantized model.
        shards: The safetensors files of the checkpoint. Empty if the layout stores tensors in other files.
        model: The model. It was changed so that the tensors fit.
        plan: Plan of the model.
    """

    directory: Path
    layout: str
    reader: LayoutReader
    config: QConfig
    shards: Sequence[Shard]
    model: nn.Module
    plan: QuantPlan

    @classmethod
    def of(cls, directory: Path, model: nn.Module) -> Self:
        """Open a checkpoint, and change the float model ``model`` in place so that the tensors fit.

        The function raises the same errors as `packed_content`.
        """
        block = quantization_block(directory)
        layout = layout_for(block, directory / "config.json")
        reader, whose = reader_of(layout), origin("exporters", layout)
        stored = read_configuration(reader, block, directory)
        _expect(stored, StoredConfig, "configuration", whose)
        shards = [] if isinstance(reader, ReadsOwnFiles) else check_shards(directory)
        return cls(directory, layout, reader, stored.config, shards, model, prepared(reader, model, stored, directory, whose))


def prepared(reader: LayoutReader, model: nn.Module, stored: StoredConfig, directory: Path, whose: Origin | None = None) -> QuantPlan:
    """Change a float model in place so that the tensors of a checkpoint fit, and return the model's plan.

    Error messages name the ``config.json`` of the checkpoint.
    """
    refuse_unreadable(stored.config, f"the checkpoint '{directory}'")
    with _naming(directory / "config.json"):
        plan = reader.prepare(model, stored)
    if whose is not None:
        _expect(plan, QuantPlan, "prepare", whose)
    return plan


def _expect(value: object, kind: type, method: str, whose: Origin) -> None:
    """Raise PluginError if ``value`` is not an instance of ``kind``.

    ``value`` is what the method ``method`` of a plugin has returned.
    """
    if not isinstance(value, kind):
        raise whose.error(f"returns {described(value)} from '{method}' instead of a {kind.__name__}")


def read_configuration(reader: LayoutReader, block: dict[str, object], directory: Path) -> StoredConfig:
    """Return the configuration that a reader parses from a ``quantization_config``.

    Error messages name the ``config.json`` of the checkpoint.
    """
    try:
        return reader.configuration(block, directory)
    except QuarkError as error:
        if isinstance(error, CheckpointError) and str(directory) in str(error):
            raise
        path = directory / "config.json"
        raise CheckpointError(f"the quantization_config in '{path}' cannot be used: {error}. Make or fetch the export again") from error


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the path ``file`` to the messages of errors that are raised in a ``with`` block."""
    try:
        yield
    except UnknownNameError as error:
        raise error.saying(f"{error} (needed by the quantization_config in '{file}')") from None
    except (AmbiguousNameError, UnsupportedError) as error:
        raise type(error)(f"{error} (needed by the quantization_config in '{file}')") from None
    except ConfigError as error:
        raise CheckpointError(f"the quantization_config in '{file}' does not fit the model: {error}") from error


def _load(opened: OpenedCheckpoint) -> set[str]:
    """Put all tensors of the checkpoint into the model, and return their paths in the model."""
    model, config = opened.model, opened.config
    place_of, missing = placed_by(opened.reader, model, config), missing_algorithms(config)
    is_left_out = left_out_by(model, config.exclude)
    loaded = set()
    for path, name, tensor in _tensors(opened.reader, opened.directory, opened.shards):
        if is_left_out(name):
            continue
        try:
            loaded.add(place(model, place_of(name, tensor), name, tensor, path))
        except CheckpointError as error:
            if not missing:
                raise
            hint = f"the tensor may belong to the algorithm {', '.join(missing)}, which is not installed"
            raise CheckpointError(f"{error}; {hint}") from None
    return loaded


def placed_by(reader: LayoutReader, model: nn.Module, config: QConfig) -> Callable[[str, Tensor], str]:
    """Return a function that returns the path of a stored tensor in the prepared model.

    The arguments of that function are the stored name and the tensor, which may be a meta tensor.
    """
    restorers = restorers_of(config)

    def place_of(name: str, tensor: Tensor) -> str:
        for restorer in restorers:
            name = restorer.place_of(name, tensor)
        return reader.place_of(model, name)

    return place_of


def _tensors(reader: LayoutReader, directory: Path, shards: Iterable[Shard]) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield the file, the name and the tensor for each tensor of a checkpoint.

    If the layout does not store tensors in safetensors files, yield the directory instead of the file.
    """
    if isinstance(reader, ReadsOwnFiles):
        for name, tensor in reader.tensors(directory):
            yield directory, name, tensor
    for shard in shards:
        with FileTensors([shard]).reading(torch.device("cpu")) as read:
            for name in shard.tensors:
                yield shard.path, name, read(name, torch.float32)


def place(model: nn.Module, target_path: str, name: str, tensor: Tensor, path: Path) -> str:
    """Put the tensor ``name`` of a checkpoint at ``target_path`` in the model, and return ``target_path``.

    Raises:
        CheckpointError: The model has no tensor at ``target_path``, or the shape or dtype does not fit.
    """
    owner, _, leaf = target_path.rpartition(".")
    try:
        target = module_at(model, owner)
        old = target._parameters.get(leaf) if leaf in target._parameters else target._buffers[leaf]
    except KeyError:
        raise CheckpointError(
            f"'{path}' holds '{name}', for which this model has no place. Another model was exported: give the model that was exported"
        ) from None
    if old is None:
        raise CheckpointError(f"'{path}' holds '{name}', but this model has no such part. Give the model that was exported")
    if error := misfit(tensor, old):
        raise CheckpointError(f"'{name}' in '{path}' {error}: the export is damaged, or it belongs to another model")
    tensor = tensor.reshape(old.shape)  # some tools store a single number with the shape [], others with [1]
    put_tensor([(target, leaf)], tensor.to(old.dtype) if leaf in target._parameters else tensor)
    return target_path


def fill_zero_points(model: nn.Module, loaded: set[str]) -> set[str]:
    """Set missing zero points of symmetric specs to 0. Return the paths of these zero points."""
    filled = set()
    for path, scales in ((path, m) for path, m in model.named_modules() if isinstance(m, PackedScales | PackedLayer)):
        for suffix in scales.zero_points_of_symmetric_specs():
            if (name := f"{path}.{suffix}") not in loaded:
                put_tensor([(scales, suffix)], torch.zeros_like(scales.get_buffer(suffix), device="cpu"))
                filled.add(name)
    return filled


def tie(model: nn.Module, loaded: set[str]) -> None:
    """Tie each tensor that the export lacks to a stored tensor, if the model ties these two tensors.

    Loaded tensors stay unchanged. So the export, and not the config of ``model``, decides which tensors are
    tied. This is necessary because quantization unties the output head from the embeddings, except if both
    have the same codes. If codes are tied, their scales are tied too.
    """
    before: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not hasattr(model, "tie_weights") or loaded.issuperset(before):
        return
    shared, stays = layers_to_tie(model, loaded), loaded | tied_codes(model)
    for name, source in _tied_names(model):
        if name in loaded and source not in stays:  # the head comes first in the model, so the tensor has the head's name
            put_tensor([(module_at(model, source.rpartition(".")[0]), source.rpartition(".")[2])], before[name])
    model.tie_weights()  # type: ignore[operator]
    after = model.state_dict(keep_vars=True)
    for path in stays:
        if after.get(path) is not (tensor := before.get(path)):
            owner, _, leaf = path.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters.pop(leaf, None)
            if isinstance(tensor, nn.Parameter):
                module._parameters[leaf] = tensor
            else:
                module._buffers[leaf] = tensor
    for layer, source_layer in shared.items():
        layer.share_codes(source_layer)


def layers_to_tie(model: nn.Module, loaded: Set[str]) -> dict[PackedLayer, PackedLayer]:
    """Return the layers that must share the codes and scales of other layers.

    The result is a dictionary from a layer without stored codes to the layer whose codes it must share. The
    model ties the weights of the two layers, and both layers have the same quantization.

    Args:
        model: The model, with packed layers.
        loaded: Paths of the tensors that the checkpoint contains.
    """
    pairs: dict[PackedLayer, PackedLayer] = {}
    for name, source in _tied_names(model):
        owner = name.rpartition(".")[0]
        layer, other = module_at(model, owner), module_at(model, source.rpartition(".")[0])
        is_stored_once = source in loaded and _holds_codes(model, name) and _holds_codes(model, source)
        if is_stored_once and isinstance(layer, PackedLayer) and isinstance(other, PackedLayer) and layer.can_share_codes(other):
            own = {f"{owner}.{tensor}" for tensor in layer.weight_tensors()}
            pairs |= {layer: other} if own.isdisjoint(loaded) else {}
    return pairs


def tied_codes(model: nn.Module) -> set[str]:
    """Return the names of both tensors of each tied pair in which at least one tensor is stored as codes.

    Such a pair must not be tied without a check, because the codes of one layer are not the values of the
    other layer.
    """
    return {path for names in _tied_names(model) if any(_holds_codes(model, name) for name in names) for path in names}


def _tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """Return a pair of names for each pair of tied tensors. Both names are in the state dict of the model."""
    state = model.state_dict(keep_vars=True)
    return [names for names in tied_on_loading(model).items() if state.keys() >= set(names)]


def _holds_codes(model: nn.Module, path: str) -> bool:
    """Return whether ``path`` is the path of a weight or bias that a packed layer stores quantized."""
    owner, _, leaf = path.rpartition(".")
    module = module_at(model, owner)
    return isinstance(module, PackedLayer) and leaf in PARAMETERS and getattr(module.layer_config, leaf) is not None
