"""Internals of transformers that have no public name.

`core/tests/models/hf/test_internals.py` has a test for each.

Two other modules use such names: `quark.models.hf.stored_tensors` those of stored tensors, and
`quark.models.hf.weight_converters` converters.
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
    """Return the model classes that an Auto class has for a config.

    Empty if it does not know the config.
    """
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return ()
    classes = mapping[type(config)]
    return tuple(classes) if isinstance(classes, list | tuple) else (classes,)


def input_embeddings(model: Any) -> Any:
    """Return the module of a model's token embeddings; None of a model that names none."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # models of audio raise the latter
        return None


def output_embeddings(model: Any) -> Any:
    """Return the head of a model that gives a number for each token of a vocabulary; None of another one."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def kept_in_float32(model: Any, dtype: torch.dtype) -> list[str]:
    """Return the full names of tensors that a model class keeps in float32 at that dtype."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(model._get_dtype_plan(dtype))
    expression = build_glob_alternation(patterns)[0] if patterns else None
    return [name for name, t in model.state_dict().items() if expression is not None and t.dtype == dtype and expression.search(name)]


def initialize_what_no_checkpoint_holds(model: Any) -> None:
    """Compute the buffers that are not persistent, such as rotary tables.

    Parameters and persistent buffers stay as they are.

    The random state stays as it is too.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # to be read: without this mark, transformers draws random numbers for meta tensors too
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def without_initialization() -> AbstractContextManager[None]:
    """Let the body build a model whose parameters are allocated, and no random numbers drawn for them."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


@contextmanager
def reading_files() -> Iterator[None]:
    """Let ``from_pretrained`` read the files of a checkpoint in the body, where it would map them.

    Whoever cuts a mapped file ends the process, and whoever writes to it changes a model that was loaded.
    Models that other threads load meanwhile are read too. Enter it inside `building`, which lets in one
    thread at a time: if two bodies overlapped, the later one would put back the function of the earlier one.
    """
    from transformers import modeling_utils

    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda file, **options: opened(file, **{**options, "backend": "pread"})
    try:
        yield
    finally:
        modeling_utils.safe_open = opened


def source_of(config: Any) -> str:
    """Return the argument of ``from_pretrained``: a directory, or the name of a model of a hub.

    Empty where the config was not loaded.
    """
    return str(getattr(config, "_name_or_path", "") or "")


def directory_of(config: Any) -> Path | None:
    """Return the directory of the checkpoint that a config was loaded from; None if there is none.

    For the name of a model of a hub it is that model in the cache of this machine, with what has been fetched
    of it; nothing is fetched here. Of several versions it is the newest if they have the same weights, and
    none of them otherwise: transformers no longer says which one was loaded.
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
    """Let `source_of` return ``source`` for a config and for its parts, such as that of the text model."""
    config.name_or_path = source
    for part in (getattr(config, name, None) for name in getattr(config, "sub_configs", ())):
        if hasattr(part, "name_or_path"):
            set_source(part, source)


def tied_on_loading(model: Any) -> dict[str, str]:
    """Return the full names of the tensors that the loader ties, each with that of the tensor it is tied to.

    Empty if transformers does not load the model.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def can_set_attention(model: Any) -> bool:
    """Return whether a transformers model uses the attention interface, and so can be switched."""
    return bool(type(model)._can_set_attn_implementation())


def apply_gate(experts: Any, outputs: Sequence[Tensor]) -> Tensor:
    """Return the input of the closing projection of fused experts, by the model's own code."""
    return experts._apply_gate(torch.cat(list(outputs), dim=-1))


def renamed_scales() -> frozenset[str]:
    """Return the stored names of scales that the loader of Quark checkpoints looks for in submodules.

    ``weight_scale`` becomes ``weight_quantizer.scale``, for instance; second levels are not among them.
    """
    from transformers.quantizers.quantizer_quark import CHECKPOINT_KEYS

    return frozenset(CHECKPOINT_KEYS)


def renamed_by_loader(model: Any) -> Callable[[str], bool]:
    """Return whether the loader takes a stored name for that of another tensor, in this class of models.

    Up to 5.20 it does so with the scale of an expert, ``experts.0.up_proj.weight_scale``: its name begins
    with that of a weight that belongs into fused experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    return lambda name: any(transform.rename_source_key(name)[0] != name for transform in transforms)


def on_missing(model: Any, act: Callable[[set[str], Callable[[], None]], None]) -> None:
    """Call ``act`` when the loader has filled a model, before it gives memory to tensors without values.

    Args:
        model: A transformers model that ``from_pretrained`` is about to load.
        act: Gets the full names of the tensors for which the loader has no values, without tied ones, and the
            function that gives them memory that nobody has written to.
    """
    name = "_move_missing_keys_from_meta_to_device"
    move = getattr(model, name)

    def moving(missing: Iterable[str], *args: Any, **kwargs: Any) -> None:
        del model.__dict__[name]
        act(set(missing) - tied_on_loading(model).keys(), partial(move, missing, *args, **kwargs))

    model.__dict__[name] = moving


def before_tying(model: Any, act: Callable[[], None]) -> None:
    """Call ``act`` when the loader has filled and initialized a model, before it compares and ties weights.

    Args:
        model: A transformers model that ``from_pretrained`` is about to load.
        act: Called once.
    """

    def tying(*args: Any, **kwargs: Any) -> None:
        del model.__dict__["tie_weights"]
        act()
        model.tie_weights(*args, **kwargs)  # looked up now: while the model is built, its class has one that does nothing

    model.__dict__["tie_weights"] = tying
