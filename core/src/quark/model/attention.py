"""Which modules of a model are attention, and what of them is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import attrs
from torch import nn

from quark.model.resolve import first_match
from quark.specs.architecture import Architecture
from quark.specs.enums import QSchemeType
from quark.specs.layer import TensorSpec, stages
from quark.specs.model import QConfig
from quark.specs.tensor import QTensorConfig

if TYPE_CHECKING:
    from quark.model.plan import PlanRow

_WITHOUT_ARCHITECTURE = ("*attn", "*attention")
_KEY_WORDS = {"k", "key"}


@attrs.frozen
class AttentionRow:
    """One attention module of which something is quantized.

    Attributes:
        name: Full module name.
        probabilities: Of the softmax; None where they stay float.
        key: Of the keys after the rotary embedding; None where they stay as they are.
        key_layer: Full name of the projection whose output quantization ``key`` takes the place of; None where ``key`` is None.
    """

    name: str
    probabilities: QTensorConfig | None = None
    key: TensorSpec | None = None
    key_layer: str | None = None


def attention_rows(
    model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> tuple[AttentionRow, ...]:
    """The attention modules of ``model`` of which ``config`` quantizes something, in the model's order. Nothing is checked.

    They are the parents of the query, key and value projections that the architecture names; without such names, modules that are called
    ``…attn`` or ``…attention``. An exclusion is about layers, and does not reach them.
    """
    post_rope = config.kv_cache_post_rope and config.kv_cache_quant_config
    if config.softmax_quant_spec is None and not post_rope:
        return ()
    found = []
    for name in _attentions(model, rows, architecture):
        key = _key_projection(name, rows, config) if post_rope else None
        spec = None if key is None or key.config is None else key.config.output_tensors
        if config.softmax_quant_spec is not None or spec is not None:
            found.append(AttentionRow(name, config.softmax_quant_spec, spec, key.name if key is not None and spec is not None else None))
    return tuple(found)


def attention_problems(
    attentions: Sequence[AttentionRow], rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> Iterator[str]:
    """What of the configuration cannot be done to the attention modules of this model, with the cure."""
    if config.softmax_quant_spec is not None:
        if not attentions:
            yield (
                "attention probabilities are to be quantized (softmax_quant_spec), but no attention module was found in this model: "
                "leave attention_scheme out, or register a template that names the model's q_layer_name and kv_layers_name"
            )
        yield from _not_per_tensor("softmax_quant_spec", config.softmax_quant_spec)
    if config.kv_cache_post_rope:
        yield from _key_problems(attentions, rows, config, _blocks(architecture))


def _key_problems(attentions: Sequence[AttentionRow], rows: Sequence[PlanRow], config: QConfig, inside: str) -> Iterator[str]:
    if not config.kv_cache_quant_config:
        yield "kv_cache_post_rope says where keys of a quantized cache are rounded, but no cache is to be quantized: add kv_cache_scheme"
        return
    served = {row.name for row in attentions if row.key is not None}
    # Only decoder blocks have a cache: what a pattern hits elsewhere is not quantized for it.
    fed = [r.name for r in rows if r.name.startswith(inside) and first_match(r.name, config.kv_cache_quant_config) is not None]
    without = [name for name in fed if name.rpartition(".")[0] not in served]
    if without:
        yield (
            f"keys cannot be quantized after the rotary embedding (kv_cache_post_rope): '{without[0]}' feeds the cache, and beside it "
            "there is no key projection of its own in an attention module. Leave kv_cache_post_rope out"
        )
    for row in attentions[:1]:
        if row.key is not None:
            yield from _not_per_tensor("the key's output_tensors with kv_cache_post_rope", row.key)


def _not_per_tensor(what: str, spec: TensorSpec) -> Iterator[str]:
    if any(s.qscheme is not QSchemeType.per_tensor for s in stages(spec)):
        yield (
            f"{what} wants one scale per tensor (qscheme per_tensor): inside attention, axes are not those of a layer's output. "
            "Take a scheme such as fp8"
        )


def _attentions(model: nn.Module, rows: Iterable[PlanRow], architecture: Architecture | None) -> list[str]:
    inside, patterns = _blocks(architecture), _projections(architecture)
    if not patterns:
        return [n for n, _ in model.named_modules() if n.startswith(inside) and any(fnmatchcase(n, p) for p in _WITHOUT_ARCHITECTURE)]
    parents = (r.name.rpartition(".")[0] for r in rows if r.name.startswith(inside) and first_match(r.name, patterns) is not None)
    return list(dict.fromkeys(p for p in parents if p))


def _blocks(architecture: Architecture | None) -> str:
    """What the full names of everything in decoder blocks begin with."""
    return "" if architecture is None or architecture.decoder_blocks is None else architecture.decoder_blocks + "."


def _projections(architecture: Architecture | None) -> list[str]:
    if architecture is None:
        return []
    queries = architecture.q_layer_name or ()
    named = [*((queries,) if isinstance(queries, str) else queries), *(architecture.kv_layers_name or ())]
    return architecture.with_modules(named)


def _key_projection(attention: str, rows: Iterable[PlanRow], config: QConfig) -> PlanRow | None:
    """The layer of an attention module that makes its keys, and nothing but keys: ``k_proj`` does, ``qkv_proj`` does not."""
    for row in rows:
        parent, _, last = row.name.rpartition(".")
        if parent == attention and _KEY_WORDS & set(last.split("_")) and first_match(row.name, config.kv_cache_quant_config) is not None:
            return row
    return None


def attention_facts(attentions: Iterable[AttentionRow]) -> list[Mapping[str, object]]:
    """JSON form of the rows."""
    return [{"name": r.name, "probabilities": r.probabilities is not None, "keys_after_rotary_embedding": r.key_layer} for r in attentions]
