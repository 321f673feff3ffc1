"""Read an export back: the same quantized model, with the same logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quark.checkpoint.packed_model import map_to_quark
from quark.checkpoint.provenance import refuse_unreadable
from quark.checkpoint.restorers import missing_algorithms, restorers_of
from quark.checkpoint.tensor_names import attention_attribute, has_probabilities, packed_attribute
from quark.config.export import JsonExporterConfig
from quark.config.json_values import value_of
from quark.config.model import QConfig
from quark.environment import refuse_rival
from quark.errors import AmbiguousNameError, CheckpointError, ConfigError, QuarkError, UnknownNameError, UnsupportedError
from quark.hf.json_files import read_json
from quark.hf.loading import empty_model
from quark.hf.shards import check_shards
from quark.hf.unpacking import unpack_all
from quark.log import get_logger
from quark.modules.packed_layers import PackedLayer
from quark.names import folded
from quark.planning.attention import attention_rows
from quark.planning.family import architecture_of
from quark.planning.mixtures import separate_experts
from quark.planning.one_layer import as_model, put_back
from quark.planning.plan import QuantPlan, has_static_scale, plan_rows
from quark.plugins.attribution import attributed

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # numbers, whichever of them they are; all others are codes


@attributed("reading a checkpoint")
def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | Path,
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: str = "cuda",
    multi_gpu: bool = False,
) -> nn.Module:
    """Load an export of the Quark layout.

    Args:
        model: A float model of the same structure, changed in place; None builds it from the export's own ``config.json``, which only that
            of a transformers model tells.
        model_dir: Directory of the export.
        multi_device, multi_gpu: Documented; without effect.
        trust_remote_code: Documented; code from a checkpoint is never run.
        attn_implementation: Of the model that is built where ``model`` is None; None is transformers' choice.
        device: Where to load to; "cuda" means the CPU on a machine that has none.

    Returns:
        The model in evaluation mode, its layers as `ModelQuantizer.quantize_model` leaves them.

    Raises:
        CheckpointError: The export is incomplete or damaged, or its tensors do not fit the model.
        MissingPluginError: An algorithm that runs with the model is not installed.
        UnknownNameError: A format or an observer is not installed; says which distribution brought it. Or another thing is not.
        UnsupportedError: The export asks for what cannot be done here.
        PluginError: The code of a plugin failed.
    """
    refuse_rival()
    directory = Path(model_dir)
    config, order = read_quantization_config(directory)
    refuse_unreadable(config, f"the checkpoint '{directory}'")
    shards = check_shards(directory)
    if has_static_scale(config.softmax_quant_spec) and not any(has_probabilities(shard.tensors) for shard in shards):
        # Such exports are made where the scales cannot be found, and say so in no other way.
        get_logger(__name__).warning(f"'{directory}' holds no scales of attention probabilities: they stay float")
        config = attrs.evolve(config, softmax_quant_spec=None)
    wanted = empty_model(directory, attn_implementation) if model is None else model
    model = as_model(wanted)
    with _naming(directory / "config.json"):
        # The plan is made of the float structure: this is what was asked for when the export was made.
        separate_experts(model, config)
        rows, architecture = plan_rows(model, config), architecture_of(model)
        plan = QuantPlan(rows, config, architecture, attentions=attention_rows(model, rows, config, architecture))
        map_to_quark(model, config, order)
    loaded = _load(model, [shard.path for shard in shards], config)
    _tie(model, loaded)
    _refuse_missing(model, loaded, directory)
    unpack_all(model, directory)
    model.quant_config, model.quark_plan, model.quark_quantized = config, plan, True  # type: ignore[assignment]
    put_back(model, wanted)
    return wanted.eval().to(device if device != "cuda" or torch.cuda.is_available() else "cpu")


def read_quantization_config(directory: Path) -> tuple[QConfig, str]:
    """The configuration in an export's ``config.json``, and the order of its 4-bit codes.

    Raises:
        CheckpointError: There is none, or it was written by something else.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"'{directory}' is no export: it has no config.json")
    found = read_json(path).get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != "quark":
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise CheckpointError(
            f"'{path}' has no quantization_config of quant_method 'quark' (it has {method!r}): load it with transformers instead"
        )
    try:
        return QConfig.from_dict(found), JsonExporterConfig(**value_of(found, "export", Mapping, {})).pack_method
    except QuarkError as error:
        raise CheckpointError(f"the quantization_config in '{path}' cannot be used: {error}. Make or fetch the export again") from error


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file of a configuration that does not fit the model, or asks for what is not there."""
    try:
        yield
    except UnknownNameError as error:
        said = f"{error} (wanted by the quantization_config in '{file}')"
        raise UnknownNameError(said, kind=error.kind, name=error.name, known=error.known) from None
    except (AmbiguousNameError, UnsupportedError) as error:
        raise type(error)(f"{error} (wanted by the quantization_config in '{file}')") from None
    except ConfigError as error:
        raise CheckpointError(f"the quantization_config in '{file}' does not fit the model: {error}") from error


def _load(model: nn.Module, paths: Iterable[Path], config: QConfig) -> set[str]:
    """Put all tensors of the files into the model; the paths they went to."""
    restorers, missing = restorers_of(config), missing_algorithms(config)
    loaded = set()
    for path in paths:
        for name, tensor in _tensors(path):
            wanted = name
            for restorer in restorers:
                wanted = restorer.place_of(wanted, tensor)
            try:
                loaded.add(_place(model, wanted, tensor, path))
            except CheckpointError as error:
                if not missing:
                    raise
                who = f"it was made with {', '.join(missing)}, which no installed distribution brings, and the tensor may be of that"
                raise CheckpointError(f"{error}; {who}") from None
    return loaded


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"'{path}' is damaged ({error}): make or fetch the export again") from error


def _place(model: nn.Module, name: str, tensor: Tensor, path: Path) -> str:
    """Put a checkpoint tensor where it belongs; the path it went to."""
    owner, _, leaf = name.rpartition(".")
    try:
        layer = model.get_submodule(owner)
        attribute = packed_attribute(leaf) if isinstance(layer, PackedLayer) else attention_attribute(leaf)
        inner, _, last = attribute.rpartition(".")
        target = layer.get_submodule(inner)
        old = target._parameters.get(last) if last in target._parameters else target._buffers[last]
    except (AttributeError, KeyError):
        raise CheckpointError(f"'{path}' holds '{name}', for which the model has no place: the export is of another model") from None
    if old is None or old.shape != tensor.shape:
        wanted = "nothing" if old is None else list(old.shape)
        raise CheckpointError(
            f"'{name}' in '{path}' has the shape {list(tensor.shape)} where the model wants {wanted}: the export is damaged"
        )
    if tensor.dtype != old.dtype and not {tensor.dtype, old.dtype} <= _FLOATS:
        raise CheckpointError(
            f"'{name}' in '{path}' is of {tensor.dtype} where the model wants {old.dtype}: the export is damaged, or of something else"
        )
    if last in target._parameters:
        target._parameters[last] = nn.Parameter(tensor if old.dtype == tensor.dtype else tensor.to(old.dtype), requires_grad=False)
    else:
        target._buffers[last] = tensor
    return f"{owner}.{attribute}" if owner else attribute


def _tie(model: nn.Module, loaded: set[str]) -> None:
    """Give names that the export does not hold the tensor that they share with one that it holds; what it holds stays as it was read.

    The export decides and not the config of ``model``: quantizing gives a tied head a weight of its own.
    """
    if not hasattr(model, "tie_weights") or loaded.issuperset(model.state_dict()):
        return
    owners = {path: (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in loaded}
    tensors: dict[str, Tensor] = {path: getattr(module, leaf) for path, (module, leaf) in owners.items()}
    model.tie_weights()  # type: ignore[operator]
    for path, (module, leaf) in owners.items():
        own = tensors[path]
        if getattr(module, leaf) is not own:
            module._parameters.pop(leaf, None)
            if isinstance(own, nn.Parameter):
                module._parameters[leaf] = own
            else:
                module._buffers[leaf] = own


def _refuse_missing(model: nn.Module, loaded: Iterable[str], directory: Path) -> None:
    """Raise if a tensor of the model was not in the export; tied ones come from their partner."""
    have = set(loaded)
    state = model.state_dict(keep_vars=True)
    there = {id(state[name]) for name in have if name in state}
    missing = [name for name, tensor in state.items() if name not in have and id(tensor) not in there]
    if missing:
        raise CheckpointError(
            f"the export '{directory}' lacks {len(missing)} tensor(s): {folded(missing)}. It is incomplete, make it again"
        )
