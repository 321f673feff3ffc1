"""Functions that use parts of transformers that are not public.

`core/tests/models/hf/test_internals.py` tests each of these functions. Two other modules use parts that are
not public: `quark.models.hf.stored_tensors` and `quark.models.hf.weight_converters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def model_classes(auto: Any, config: Any) -> tuple[type[nn.Module], ...]:
    """Return the model classes that the Auto class ``auto`` has for a config. The result may be empty."""
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return ()
    classes = mapping[type(config)]
    return tuple(classes) if isinstance(classes, list | tuple) else (classes,)


def input_embeddings(model: Any) -> Any:
    """Return the module with the token embeddings of a model, or None if the model has no such module."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # audio models raise NotImplementedError
        return None


def language_model(model: Any) -> Any:
    """Return the language model inside ``model``, for instance inside a vision-language model, or None."""
    try:
        return model.get_decoder()
    except (AttributeError, NotImplementedError):
        return None


def output_embeddings(model: Any) -> Any:
    """Return the output head of a model, or None if the model has no such head.

    The output head has one output for each token of the vocabulary.
    """
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[str]:
    """Return the full names of the tensors that stay in float32 if the model is loaded in ``dtype``."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(model._get_dtype_plan(dtype))
    expression = build_glob_alternation(patterns)[0] if patterns else None
    return [name for name, t in model.state_dict().items() if expression is not None and t.dtype == dtype and expression.search(name)]


def initialize_what_no_checkpoint_holds(model: Any) -> None:
    """Compute the buffers of ``model`` that are not persistent, such as rotary tables.

    Parameters, persistent buffers and the state of the random number generator do not change.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # without this mark, transformers draws random numbers for meta tensors too
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def keep_from_initializing(model: nn.Module, children: Iterable[str]) -> None:
    """Prevent transformers from initializing the parent modules of ``children``.

    This is necessary because the code that initializes a parent may access tensors that were removed from a
    child, such as fused experts. A parent that has tensors itself is initialized nevertheless.

    Args:
        model: A transformers model.
        children: Full names of modules. Their parent modules are not initialized.
    """
    for name in children:
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        if not parent._parameters and not parent._buffers:
            parent._is_hf_initialized = True


@torch.no_grad()
def compute_absent(model: Any, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Compute tensors that a checkpoint lacks, and put them into the model. The code of the model class
    computes the tensors.

    Other parameters and persistent buffers do not change. The state of the random number generator does not
    change either.

    Args:
        model: A transformers model. Its other tensors may be on the meta device.
        names: Full names of the tensors to compute.
        device: The device to compute on.

    Returns:
        A dictionary from full name to computed tensor. Tensors that the model class does not initialize, or
        initializes with random numbers, are not in the dictionary.
    """
    if not names:
        return {}
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    first, second = (_initialized(model, names, device, seed) for seed in range(2))
    return {name: tensor for name, tensor in second.items() if torch.equal(tensor, first[name])}


def _initialized(model: Any, names: Sequence[str], device: torch.device, seed: int) -> dict[str, Tensor]:
    """Replace the tensors ``names`` by new tensors, let the model class initialize them, and return them.

    All elements of the new tensors have the value ``seed`` before the model class initializes them. ``seed``
    is also the seed of the random number generator.
    """
    tensors: dict[str, Tensor] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        tensors[name] = torch.full_like(getattr(module, leaf), seed, device=device, requires_grad=False)
        if leaf in module._parameters:
            tensors[name] = module._parameters[leaf] = nn.Parameter(tensors[name], requires_grad=False)
        else:
            module._buffers[leaf] = tensors[name]
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)  # the mark of a module that transformers has initialized before
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.initialize_weights()
    return tensors


def without_initialization() -> AbstractContextManager[None]:
    """Return a context manager inside which a model can be built without drawing random parameters."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


@contextmanager
def reading_files() -> Iterator[None]:
    """Inside the ``with`` block, let ``from_pretrained`` read the files of a checkpoint instead of mapping
    them into memory.

    A mapped file has two dangers. If it is truncated, the system kills the process, and if it is written to,
    the loaded model changes.

    Use this context only inside `building`, which lets one thread at a time run. This context replaces a
    function of transformers for all threads. If two ``with`` blocks overlapped, the block that ends last
    would restore the wrong function.
    """
    from transformers import modeling_utils

    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda file, **options: opened(file, **{**options, "backend": "pread"})
    try:
        yield
    finally:
        modeling_utils.safe_open = opened


def source_of(config: Any) -> str:
    """Return the directory, or the name of a model on a hub, from which a config was loaded.

    The result is the argument of the call of ``from_pretrained``, or ``""`` if the config was not loaded.
    """
    return str(getattr(config, "_name_or_path", "") or "")


def directory_of(config: Any) -> Path | None:
    """Return the directory of the checkpoint that a config was loaded from, or None if it is unknown.

    If the config comes from a model on a hub, this function looks for the model in the hub cache of this
    machine. It fetches nothing. If the cache has several versions of the model with the same weights, the
    function returns the newest version. If the versions have different weights, the result is None, because
    it is unknown which version was loaded.
    """
    source = source_of(config)
    if not source or Path(source).is_dir():
        return Path(source) if source else None
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE, f"models--{source.replace('/', '--')}", "snapshots")
    known = getattr(config, "_commit_hash", None)
    versions = [path for path in snapshots.glob("*") if (path / "config.json").is_file() and known in (None, path.name)]
    weights = {frozenset(file.resolve() for file in path.glob("*.safetensors")) for path in versions}
    return max(versions, key=lambda path: path.stat().st_mtime) if len(weights) == 1 else None


def set_source(config: Any, source: str) -> None:
    """Make `source_of` return ``source`` for a config and for its parts, such as the text config."""
    config.name_or_path = source
    for part in (getattr(config, name, None) for name in getattr(config, "sub_configs", ())):
        if hasattr(part, "name_or_path"):
            set_source(part, source)


def tied_on_loading(model: Any) -> dict[str, str]:
    """Return a dictionary with all tensors that transformers ties to another tensor when it loads the model.

    It maps the full name of each such tensor to the full name of the tensor that it is tied to. The
    dictionary is empty if ``model`` is not a transformers model.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def can_set_attention(model: Any) -> bool:
    """Return whether a transformers model uses the attention interface, so that quark can replace
    attention."""
    return bool(type(model)._can_set_attn_implementation())


def key_value_heads(attention: Any, width: int | None) -> tuple[int, int] | None:
    """Return the number of key heads, which is also the number of value heads, and the number of elements of
    one head.

    Return None if these numbers cannot be found in the attributes of the attention module.

    Args:
        attention: The attention module.
        width: Number of outputs of the key projection. Pass None if the projection computes other tensors
            too.
    """
    size = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    config = getattr(attention, "config", None)
    if not isinstance(size, int):
        return None
    if width is not None:
        return (width // size, size) if width % size == 0 else None
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return (heads, size) if isinstance(heads, int) else None


def apply_gate(experts: Any, outputs: Sequence[Tensor]) -> Tensor:
    """Compute the input of an expert's output projection with the code of the model, and return this input.

    ``outputs`` are the outputs of the gate projection and of the up projection.
    """
    return experts._apply_gate(torch.cat(list(outputs), dim=-1))


def renamed_scales() -> frozenset[str]:
    """Return the names of stored scales that transformers renames when it loads a checkpoint of Quark.

    For instance, ``weight_scale`` becomes ``weight_quantizer.scale``. The second level of two-level scales is
    not in the result.
    """
    from transformers.quantizers.quantizer_quark import CHECKPOINT_KEYS

    return frozenset(CHECKPOINT_KEYS)


def renamed_by_loader(model: Any) -> Callable[[str], bool]:
    """Return a function from the name of a stored tensor to whether transformers renames the tensor when it
    loads ``model``.

    Up to release 5.20, transformers renames the scale of an expert by mistake, for instance
    ``experts.0.up_proj.weight_scale``. The reason is that the name of the scale begins with the name of a
    weight, and transformers renames this weight to fuse the experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    return lambda name: any(transform.rename_source_key(name)[0] != name for transform in transforms)


def on_missing(model: Any, act: Callable[[set[str], Callable[[], None]], None]) -> None:
    """Arrange that ``act`` is called while ``from_pretrained`` loads a model.

    The call happens after transformers has set the tensors of the model from the checkpoint. It happens
    before transformers allocates the tensors that the checkpoint lacks.

    Args:
        model: A transformers model that ``from_pretrained`` is about to load.
        act: A function with two arguments: the full names of the tensors for which the checkpoint has no
            values, and a function that allocates these tensors, except tied ones.
    """
    name = "_move_missing_keys_from_meta_to_device"
    move = getattr(model, name)

    def moving(missing: Iterable[str], *args: Any, **kwargs: Any) -> None:
        del model.__dict__[name]
        act(set(missing), partial(move, missing, *args, **kwargs))

    model.__dict__[name] = moving


def initialize(model: Any, module: nn.Module) -> None:
    """Initialize ``module`` with the code of the class of ``model``. This includes non-persistent buffers."""
    model._init_weights(module)


def before_tying(model: Any, act: Callable[[set[str]], None]) -> None:
    """Arrange that ``act`` is called while ``from_pretrained`` loads a model.

    The call happens after transformers has set or initialized all tensors of the model. It happens before
    transformers ties weights.

    Args:
        model: A transformers model that ``from_pretrained`` is about to load.
        act: A function that is called once, with the set of names that transformers will report as missing.
            It may remove names from the set.
    """

    def tying(*args: Any, missing_keys: set[str] | None = None, **kwargs: Any) -> None:
        del model.__dict__["tie_weights"]
        act(set() if missing_keys is None else missing_keys)
        # The method is looked up only now, because while the model is built, its class has a method that does
        # nothing.
        model.tie_weights(*args, missing_keys=missing_keys, **kwargs)

    model.__dict__["tie_weights"] = tying
