"""Functions that infer an `Architecture`, or fields that a template leaves open, from the names of modules.

All other modules of the core use an `Architecture`, and do not interpret names of layers. An inferred
architecture contains fewer facts than a template, and nobody has verified it. It is enough to quantize block
by block, to leave the output head in float, and to find keys, values and experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from quark.base.log import get_logger
from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.models.hf.internals import input_embeddings, language_model, output_embeddings

_FUSED = ("*qkv_proj", "*query_key_value", "*Wqkv")
_CACHE = (("*k_proj", "*v_proj"), ("*key_proj", "*value_proj"), ("*.key", "*.value"), *((pattern,) for pattern in _FUSED))
_QUERIES = ("*q_proj", "*query_proj", "*.query", *_FUSED)
_GATES = ("*router*", "*.gate")
"""Common name patterns of projections and routers. The first pattern or group that matches is used."""
_ATTENTION_MODULES = ("*attn", "*attention")
_QUERY_WORDS, _KEY_WORDS, _VALUE_WORDS = frozenset({"q", "query"}), frozenset({"k", "key"}), frozenset({"v", "value"})
_NORMED_WORDS = frozenset({"k", "key", "qk"})
EXPERTS = "experts"
"""The last part of the full name of a module that contains experts."""


def infer_architecture(model: nn.Module, model_type: str) -> Architecture | None:
    """Infer the architecture of a transformers model from its modules. Return None if no blocks are found.

    The blocks are the module list whose items have the same class and contain linear layers. If a model has
    several such lists, the list in the language model is used. An encoder-decoder model must have two. If the
    config has another number of blocks, the result is None, because some may run several times.

    Routers, and linear layers outside the blocks, stay float. A layer is a router if it has a router's name,
    if a module beside it has one expert for each output, or if a top-k operation chooses from its outputs.

    Args:
        model: A transformers model, on any device, including the meta device.
        model_type: The ``config.model_type`` of the model.
    """
    streams = _streams(model)
    if not streams or not hasattr(model, "get_output_embeddings"):
        return None
    *encoders, blocks = streams
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    modules = [name for name, _ in model.named_modules() if name.startswith(f"{blocks}.")]
    inside = [name for name in linear if name.startswith(f"{blocks}.")]
    others = [_beside(blocks, name) for name in _block_lists(model) if name not in streams]
    outside = [name for name in linear if not name.startswith(tuple(f"{part}." for part in (*streams, *others)))]
    routers = (p for stream in streams for p in _router_patterns(model, [n for n in linear if n.startswith(f"{stream}.")], stream))
    cache = next((group for group in _CACHE if all(_some(inside, p) for p in group)), None)
    return Architecture(
        model_type=model_type,
        decoder_blocks=blocks,
        encoder_blocks=encoders,
        embeddings=_name_of(model, input_embeddings(model)),
        head=_name_of(model, output_embeddings(model)) or None,
        kv_layers_name=cache,
        q_layer_name=next((p for p in _QUERIES if _some(inside, p)), None),
        **_attention_roles(_in_block(name, blocks) for name in inside),
        key_norms=_key_norms(_in_block(name, blocks) for name in modules),
        experts=next((_in_block(name, blocks) for name in modules if name.rpartition(".")[2] == EXPERTS), None),
        expert_value=None,  # names do not show that a projection's output is only multiplied
        exclude_layers_name=tuple(dict.fromkeys((*(f"{name}.*" for name in others), *outside, *routers))),
    )


def one_block(model: nn.Module, model_type: str) -> Architecture:
    """Return an architecture for a model whose blocks are unknown. The whole model is its only block.

    Routers stay float. Linear layers outside all lists of modules, such as heads, stay float too.
    """
    inside = tuple(f"{blocks}." for blocks in _block_lists(model))
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    outside = [name for name in linear if not name.startswith(inside)] if inside else []
    return Architecture(model_type=model_type, exclude_layers_name=(*outside, *_router_patterns(model, linear, None)))


def fitted(architecture: Architecture, model: nn.Module) -> Architecture | None:
    """Return ``architecture`` with the full names that ``model`` uses, or None if the model lacks the blocks.

    An architecture has the names that modules have in the language model of the family, such as
    ``model.layers``. In other models of the family, the same module has another name, such as ``layers``. If
    ``model`` lacks a module, its name is None in the result, for example ``decoder_blocks`` in an encoder
    without a decoder.
    """
    modules = [name for name, _ in model.named_modules()]
    if not architecture.block_lists or set(modules).issuperset(architecture.block_lists):
        return architecture
    stems = [stems for name in architecture.block_lists if (stems := _stems(name, modules)) is not None]
    if not stems:
        return None
    old, new = min(stems, key=lambda pair: pair[0].count("."))  # the encoder and the decoder may have lists of the same name

    def place(name: str | None) -> str | None:
        moved = new + name.removeprefix(old) if name is not None and name.startswith(old) else name
        return moved if moved in modules else None

    return attrs.evolve(
        architecture,
        decoder_blocks=place(architecture.decoder_blocks),
        encoder_blocks=[name for name in map(place, architecture.encoder_blocks) if name],
        embeddings=[name for name in map(place, architecture.embeddings) if name],
        final_norm=place(architecture.final_norm),
        head=place(architecture.head),
        embedding_norm=place(architecture.embedding_norm),
        position_embeddings=place(architecture.position_embeddings),
    )


def _stems(name: str, modules: Sequence[str]) -> tuple[str, str] | None:
    """Return a prefix of ``name``, and the prefix that must replace it to get one of ``modules``.

    Return None if there are no such prefixes.
    """
    parts = name.split(".")
    for i in range(len(parts)):
        tail = ".".join(parts[i:])
        found = next((module for module in modules if f".{module}".endswith(f".{tail}")), None)
        if found is not None:
            return name.removesuffix(tail), found.removesuffix(tail)
    return None


def _router_patterns(model: nn.Module, layers: list[str], blocks: str | None) -> Iterator[str]:
    """Yield patterns for the routers among ``layers``. ``blocks`` is the full name of the list of blocks."""
    named = [pattern for pattern in _GATES if _some(layers, pattern)]
    yield from named
    modules = dict(model.named_modules())
    counts = {name: count for name, module in modules.items() if (count := _number_of_experts(module)) > 1}
    others = [name for name in layers if not any(fnmatchcase(name, pattern) for pattern in named)]
    chosen_from = layers_chosen_from(modules, others, blocks)
    routers = (n for n in others if n in chosen_from or _is_beside(n, {h for h, c in counts.items() if c == modules[n].out_features}))
    yield from dict.fromkeys(name if blocks is None else f"*.{_in_block(name, blocks)}" for name in routers)


def _number_of_experts(module: nn.Module) -> int:
    """Return the number of experts that ``module`` contains, or 0 if it does not contain experts.

    Experts are children with numbers as names, or stacked matrices.
    """
    children = dict(module.named_children())
    if children and all(name.isdecimal() for name in children):
        alike = len({type(child) for child in children.values()}) == 1
        return len(children) if alike and any(isinstance(m, nn.Linear) for m in module.modules()) else 0
    stacked = [p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3]
    return stacked[0] if stacked and "expert" in type(module).__name__.lower() else 0


def _is_beside(layer: str, holders: set[str]) -> bool:
    """Return whether ``layer`` is in the parent module of one of ``holders``, but outside this holder."""
    return any(layer.startswith(f"{holder.rpartition('.')[0]}.") and not layer.startswith(f"{holder}.") for holder in holders)


def with_inferred_attention(architecture: Architecture | None, model: nn.Module, layers: Iterable[str]) -> Architecture:
    """Return a copy of ``architecture`` in which missing fields about attention are inferred from names.

    The fields are the projections of queries, keys and values, and the norms of keys.

    Args:
        architecture: Facts about the family of ``model``. None means that the family is unknown.
        model: The model. Norms of keys are found by the names of its modules.
        layers: Full names of the layers of ``model`` that may be projections.
    """
    facts = architecture or Architecture(model_type="")
    roles = {"query_projections", "key_projections", "value_projections"}
    if unstated := {name for name in roles if getattr(facts, name) is None}:
        inferred = _attention_roles(_in_block(name, facts.decoder_blocks) for name in layers)
        facts = attrs.evolve(facts, **{name: inferred[name] for name in unstated})
    if facts.key_norms is None:
        facts = attrs.evolve(facts, key_norms=_key_norms(_in_block(name, facts.decoder_blocks) for name, _ in model.named_modules()))
    return facts


def gives_queries_keys_and_values(layer: str, architecture: Architecture) -> bool:
    """Return whether a layer computes the queries, keys and values of attention together, like ``qkv_proj``.

    The layer must match both ``kv_layers_name`` and ``q_layer_name`` of the architecture, and must not be one
    of the layers in ``mixer``. If the architecture lacks one of these patterns, the function compares the
    name of the layer with common names.
    """
    cache, queries = architecture.kv_layers_name, architecture.q_layer_name
    if cache is None or queries is None:
        return any(fnmatchcase(layer, pattern) for pattern in _FUSED)
    queries = (queries,) if isinstance(queries, str) else queries
    named = all(any(fnmatchcase(layer, p) for p in architecture.with_modules(patterns)) for patterns in (cache, queries))
    return named and _in_block(layer, architecture.decoder_blocks) not in architecture.mixer


def attention_modules(names: Iterable[str]) -> list[str]:
    """Return the names in ``names`` that end in ``attn`` or ``attention``."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in _ATTENTION_MODULES)]


def inferred_lines(found: Architecture) -> Iterator[str]:
    """Yield log lines that describe an inferred architecture."""
    yield f"There is no template for the model type '{found.model_type}'; this was inferred from its modules:"
    yield f"  blocks           {', '.join(found.block_lists) or 'unknown: the whole model is one block'}"
    yield f"  feed the cache   {', '.join(found.kv_layers_name or ()) or 'unknown: the cache cannot be quantized'}"
    yield f"  left in float    {folded(found.exclude_layers_name, most=16) or 'nothing'}"


def _attention_roles(names: Iterable[str]) -> dict[str, Any]:
    """Return the names of the layers that compute only queries, only keys or only values.

    The result is a dictionary from a field of `Architecture`, such as ``"key_projections"``, to names of
    layers. ``k_proj`` computes only keys, but ``query_key_value`` does not.
    """
    roles: dict[str, dict[str, None]] = {"query_projections": {}, "key_projections": {}, "value_projections": {}}
    words_of = dict(zip(roles, (_QUERY_WORDS, _KEY_WORDS, _VALUE_WORDS), strict=True))
    for name in names:
        words = (_QUERY_WORDS | _KEY_WORDS | _VALUE_WORDS) & set(name.rpartition(".")[2].split("_"))
        for role, own in words_of.items():
            if words and words <= own:
                roles[role][name] = None
    return {role: tuple(layers) for role, layers in roles.items()}


def _key_norms(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``names`` that are names of norms of keys, such as ``self_attn.k_norm``."""
    words_of = {name: name.rpartition(".")[2].lower().split("_") for name in names}
    return tuple(dict.fromkeys(name for name, words in words_of.items() if _NORMED_WORDS & set(words) and "norm" in words[-1]))


def _in_block(name: str, blocks: str | None) -> str:
    """Return ``name`` relative to its block, or unchanged if it is not in the list ``blocks``."""
    return name.removeprefix(f"{blocks}.").partition(".")[2] if blocks is not None and name.startswith(f"{blocks}.") else name


def _beside(blocks: str, name: str) -> str:
    """Return the largest module that contains the module ``name``, but not the list ``blocks``."""
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return next((prefix for prefix in prefixes if not f"{blocks}.".startswith(f"{prefix}.")), name)


def _block_lists(model: nn.Module) -> Iterator[str]:
    """Yield the full names of module lists that may be the blocks of the model.

    The items of such a list have the same class and contain linear layers. A list that is inside another such
    list is left out.
    """
    lists: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in lists) or not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        inside = list(module[0].modules())[1:]  # a list of linear layers is not a list of blocks; Gemma 3n has such lists beside its blocks
        if len({type(block) for block in module}) == 1 and any(isinstance(m, nn.Linear) for m in inside):
            lists.append(name)
            yield name


def _streams(model: nn.Module) -> list[str]:
    """Return a list with the full name of the module list that has the blocks.

    For an encoder-decoder model, return the full names of both module lists. Return an empty list if the
    blocks are not found, or if their number differs from the number in the config.
    """
    lists, config = list(_block_lists(model)), getattr(model, "config", None)
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    lengths: tuple[tuple[str, ...], ...]
    if has_encoder and len(lists) == 2:
        lists.sort(key=lambda name: "decoder" in name.split("."))
        lengths = (("encoder_layers", "num_layers", "num_hidden_layers"), ("decoder_layers", "num_decoder_layers"))
        if not all(end in name.split(".") for end, name in zip(("encoder", "decoder"), lists, strict=True)):
            return []
    else:
        if len(lists) > 1 and not has_encoder:
            language = language_model(model)
            inside, config = _name_of(model, language), getattr(language, "config", None)
            lists = [name for name in lists if inside and name.startswith(f"{inside}.")]
        lengths = (("num_hidden_layers",),) if len(lists) == 1 else ()
    sizes = [next((n for name in names if isinstance(n := getattr(config, name, None), int)), None) for names in lengths]
    counts = [len(list(model.get_submodule(name).children())) for name in lists]
    return lists if counts == sizes else []  # if the numbers differ, blocks may run several times


def _some(names: list[str], pattern: str) -> bool:
    """Return whether ``pattern`` matches at least one of ``names``."""
    return any(fnmatchcase(name, pattern) for name in names)


def _name_of(model: nn.Module, module: object) -> str:
    """Return the full name of ``module`` in ``model``, or ``""`` if ``model`` does not contain ``module``."""
    return next((name for name, m in model.named_modules() if m is module and module is not None), "")


_CHOICES = frozenset({"topk", "argmax"})


_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"})


_MOST_MODULES = 2000  # modules with more submodules are not run; no mixture-of-experts module has so many


def layers_chosen_from(modules: Mapping[str, nn.Module], layers: Sequence[str], blocks: str | None = None) -> set[str]:
    """Return the routers among ``layers``. These are layers whose outputs enter an operation such as top-k.

    The function calls a copy of each module that contains some of ``layers``. The copy is on the meta device,
    so the result is the same for a model in memory and on disk. The only argument of the call is hidden
    states. If the call fails, because meta tensors have no values, only the operations before the error
    count. Of modules with the same class and the same layers, only one is called.

    Args:
        modules: A dictionary from full name to module, with all modules of a model, on any device.
        layers: Full names of linear layers.
        blocks: Full name of the list of blocks that contains all ``layers``. Only modules inside this list
            are called. With None, there is no such limit.
    """
    start = 0 if blocks is None else len(blocks) + 1
    inside: dict[str, dict[str, str]] = {}
    for layer in layers:
        for end in (i for i, character in enumerate(layer) if character == "." and i > start):
            inside.setdefault(layer[:end], {})[layer[end + 1 :]] = layer
    found: dict[Any, set[str]] = {}
    chosen: set[str] = set()
    for name, own in inside.items():
        kind = type(modules[name]), *((short, modules[layer].weight.shape) for short, layer in own.items())
        if kind not in found:
            found[kind] = _chosen_from(modules[name], own)
        chosen |= {own[short] for short in found[kind]}
    return chosen


def _chosen_from(module: nn.Module, layers: Mapping[str, str]) -> set[str]:
    """Return the routers in ``module``. The keys of ``layers`` are names of layers relative to ``module``."""
    if len(list(module.modules())) > _MOST_MODULES:
        return set()
    chosen: set[str] = set()
    with _tried(module), torch.device("meta"), torch.no_grad():
        tensors = (*module.parameters(), *module.buffers())
        twin = copy.deepcopy(module, {id(t): nn.Parameter(t.to("meta"), requires_grad=False) for t in tensors}).eval()
        for part in twin.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        weights: dict[Tensor, str] = {twin.get_parameter(f"{short}.weight"): short for short in layers}
        for width, dtype in dict.fromkeys((weight.shape[1], weight.dtype) for weight in weights):
            with _tried(module), _Flow(weights, chosen):
                twin(torch.empty(1, 4, width, dtype=dtype))
    return chosen


@contextmanager
def _tried(module: nn.Module) -> Iterator[None]:
    """Run the ``with`` block. If it raises an error, log the error and continue after the block.

    The code of a model may fail on the meta device, because tensors have no values there.
    """
    try:
        yield
    except Exception as error:
        get_logger(__name__).debug(
            f"a {type(module).__name__} cannot run separately on the meta device ({type(error).__name__}: {error}). Its routers are "
            "inferred from names, widths and the operations before the error"
        )


class _Flow(TorchFunctionMode):
    """A mode that finds the weights whose outputs are the input of a choice, such as top-k.

    It records which tensors are computed from the output of which weight.

    Args:
        weights: A dictionary from weight to name.
        chosen: A set. The mode adds the names of the weights that it finds to this set.
    """

    def __init__(self, weights: Mapping[Tensor, str], chosen: set[str]) -> None:
        super().__init__()
        self.chosen = chosen
        self._weights = {id(weight): {name} for weight, name in weights.items()}
        self._products: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # references to the tensors, so that their ids stay valid

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        inputs, name = tree_leaves((args, kwargs)), getattr(function, "__name__", "")
        weights, products = (set().union(*(of.get(id(one), ()) for one in inputs)) for of in (self._weights, self._products))
        if name in _CHOICES:
            self.chosen |= products
        elif weights or products:
            for tensor in (one for one in tree_leaves(output) if isinstance(one, Tensor)):
                self._alive.append(tensor)
                self._products[id(tensor)] = weights if name in _PRODUCTS else products
                self._weights[id(tensor)] = set() if name in _PRODUCTS else weights
        return output
