"""Facts about a model of an unknown family that its module tree shows: decoder blocks, what feeds the cache, what to leave alone.

Less than a template knows, which is verified and names norms and experts; enough to work block by block and to leave out the output head.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from quark.config.architecture import Architecture
from quark.names import folded

_CACHE = (("*k_proj", "*v_proj"), ("*key_proj", "*value_proj"), ("*.key", "*.value"), ("*qkv_proj",), ("*query_key_value",), ("*Wqkv",))
_QUERIES = ("*q_proj", "*query_proj", "*.query", "*qkv_proj", "*query_key_value", "*Wqkv")
_GATES = ("*router*", "*.gate")
"""Patterns by which projections are commonly named; the first that match all of a kind are taken."""


def infer_architecture(model: nn.Module, model_type: str) -> Architecture | None:
    """What the module tree of a language model shows, or None where it is not plain.

    The decoder blocks are the one list of modules of one class that holds linear layers. A model with two such lists (an encoder and a
    decoder, a vision tower) is not plain, nor is one that passes a block several times. Linear layers outside the blocks, and routers, are
    left in float.

    Args:
        model: A transformers model, on any device; meta tensors will do.
        model_type: Its ``config.model_type``.
    """
    lists = list(_block_lists(model))
    if len(lists) != 1 or not hasattr(model, "get_output_embeddings"):
        return None
    blocks = lists[0]
    if len(list(model.get_submodule(blocks).children())) != getattr(getattr(model, "config", None), "num_hidden_layers", None):
        return None  # a block that is passed several times, say: its first pass is not the last
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    inside = [name for name in linear if name.startswith(f"{blocks}.")]
    outside = [name for name in linear if name not in set(inside)]
    cache = next((group for group in _CACHE if all(_some(inside, p) for p in group)), None)
    return Architecture(
        model_type=model_type,
        decoder_blocks=blocks,
        embeddings=_name_of(model, model.get_input_embeddings()),  # type: ignore[operator]
        head=_name_of(model, model.get_output_embeddings()) or None,  # type: ignore[operator]
        kv_layers_name=cache,
        q_layer_name=next((p for p in _QUERIES if _some(inside, p)), None),
        exclude_layers_name=(*outside, *(p for p in _GATES if _some(inside, p))),
    )


def inferred_lines(found: Architecture) -> Iterator[str]:
    """What was inferred, for people."""
    yield f"There is no template for the model type '{found.model_type}'; this was inferred from its modules:"
    yield f"  decoder blocks   {found.decoder_blocks}"
    yield f"  feed the cache   {', '.join(found.kv_layers_name or ()) or 'unknown: the cache cannot be quantized'}"
    yield f"  left in float    {folded(found.exclude_layers_name, most=16) or 'nothing'}"


def _block_lists(model: nn.Module) -> Iterator[str]:
    """Full names of the outermost lists of modules of one class, each with linear layers."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found) or not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if len({type(block) for block in module}) == 1 and any(isinstance(m, nn.Linear) for m in module[0].modules()):
            found.append(name)
            yield name


def _some(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _name_of(model: nn.Module, module: object) -> str:
    return next((name for name, m in model.named_modules() if m is module and module is not None), "")
