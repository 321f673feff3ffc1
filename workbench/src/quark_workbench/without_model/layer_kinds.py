"""Functions that infer the kind of a layer from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs
from torch import Tensor

__all__ = ["LayerKinds", "is_of_a_tower", "predicts_ahead"]

_WORD = re.compile(r"[^a-zA-Z0-9]+|(?<=[a-z])(?=[A-Z])")
_LOOKUPS = frozenset({"embed", "embeds", "emb", "embedding", "embeddings", "wte", "wpe", "codebook", "codebooks"})
"""Words in the last part of the name of an embedding, such as ``embed_tokens``."""
_TABLES = frozenset({"shared", "relative_attention_bias"})
"""Last parts of the names of further embeddings, in T5."""
_PRODUCTS = frozenset({"proj", "projs", "projection", "projector", "out", "dense", "linear", "fc", "mlp", "fc1", "fc2"})
"""Words in the name of a linear layer, even if it has a word of an embedding, such as ``embed_out``."""
_NORMS = re.compile(r"norm(?!al)|^ln_?\w?$", re.IGNORECASE)
_TOWERS = re.compile(r"vision|visual|vit$|^vit|image|audio|speech|sound|video|acoustic|pixel", re.IGNORECASE)
_AHEAD = re.compile(r"^(mtp|nextn|eagle|medusa|draft)(_|$)|_mtp$|(^|_)nextn(_|$)|multi_token", re.IGNORECASE)


def is_of_a_tower(name: str) -> bool:
    """Return whether a module's full name shows that it belongs to an encoder of images, video or sound.

    >>> is_of_a_tower("model.visual.blocks"), is_of_a_tower("model.layers")
    (True, False)
    """
    return any(_TOWERS.search(part) for part in name.split("."))


def predicts_ahead(name: str) -> bool:
    """Return whether a module's full name shows that it predicts more tokens than the next one.

    >>> predicts_ahead("mtp.layers.0.mlp.up_proj"), predicts_ahead("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return any(_AHEAD.search(part) for part in name.split("."))


@attrs.frozen
class LayerKinds:
    """Infers the kinds of a checkpoint's modules from their tensors ``weight`` and ``bias``.

    Attributes:
        transposed: Whether weights of layers with a bias are stored as ``[in, out]``, as in GPT-2. This is
            inferred if the length of some biases fits only this order, and no bias fits only the usual order
            ``[out, in]``.
        is_mixed: Whether some biases fit only the usual order, and some fit only the other order.
    """

    transposed: bool = False
    is_mixed: bool = False

    @classmethod
    def of(cls, layers: Iterable[Mapping[str, Tensor]]) -> LayerKinds:
        """Return an object for a checkpoint.

        ``layers`` has a dictionary for each module, from the last part of a tensor's name to the tensor.
        """
        ways = set()
        for tensors in layers:
            weight, bias = tensors.get("weight"), tensors.get("bias")
            if weight is not None and bias is not None and weight.ndim == 2 and bias.ndim == 1 and weight.shape[0] != weight.shape[1]:
                ways.add(tuple(size == bias.shape[0] for size in weight.shape))
        is_usual, is_transposed = (True, False) in ways, (False, True) in ways
        return cls(transposed=is_transposed and not is_usual, is_mixed=is_transposed and is_usual)

    def kind(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Return ``linear``, ``transposed`` or ``embedding``, or the reason why a module is none of these.

        Args:
            name: Full name of the module.
            tensors: Dictionary from the last part of a tensor's name to the tensor of the module.
        """
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            return "no matrix called weight"
        last = name.rpartition(".")[2]
        words = {word.lower() for word in _WORD.split(last)}
        if _NORMS.search(last):
            return "called a norm"
        if extra := tensors.keys() - {"weight", "bias"}:
            return f"beside {', '.join(sorted(extra))}"
        if bias is None and (last in _TABLES or (not words & _PRODUCTS and (words & _LOOKUPS or "embed" in last.lower()))):
            return "embedding"
        if bias is None:
            return "linear"
        fits = tuple(bias.ndim == 1 and size == bias.shape[0] for size in weight.shape)
        if fits == (True, True) and self.is_mixed:
            return "square, in a checkpoint with weights of both orders"
        if fits[1] and (self.transposed or not fits[0]):
            return "transposed"
        return "linear" if fits[0] else "with a bias of another length"
