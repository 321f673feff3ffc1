"""ServedModel: the layers of a checkpoint. The layers of a runtime, such as vLLM, are made from them.

Quark reads the checkpoint, so all layouts that quark can read can be served. Weights stay packed until the
runtime needs a layer. This module does not import a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.checkpoint.reader import packed_content
from quark.errors import UnsupportedError
from quark.models.hf.shards import DTYPES, check_shards
from quark.models.layers import Branch
from quark.models.layers.attention import BASIS, KEY, QUERY, VALUE
from quark.models.layers.layers_from_codes import Packed
from quark.numbers import Granularity, PerTensor, PerToken, TensorQuantizer

__all__ = ["CachedStates", "ServedModel", "directory_of"]


def directory_of(model: str, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint.

    If ``model`` is not a directory, the model with this name is downloaded from the Hugging Face Hub.
    """
    if not Path(model).is_dir():
        from huggingface_hub import snapshot_download

        model = snapshot_download(model, revision=revision)
    return Path(model)


@attrs.define(eq=False)
class ServedModel:
    """The layers of a checkpoint. Its methods accept and return the names that the runtime gives to layers.

    Attributes:
        directory: Directory of the checkpoint.
        keeps_codes: Whether weights stay packed.
        renamed: A function that converts the name of a module in transformers to its name in the runtime.
        fused: A dictionary for fused layers. It maps the last part of a fused layer's name to the last parts
            of the names of the layers that were fused.
        trust_remote_code: Whether code that comes with the checkpoint may run.
    """

    directory: Path
    keeps_codes: bool
    renamed: Callable[[str], str] = str
    fused: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    trust_remote_code: bool = False

    @cached_property
    def model(self) -> Any:
        """The model of the checkpoint. Its quantized layers are `Packed`."""
        content = packed_content(self.directory, trust_remote_code=self.trust_remote_code)
        for hook in content.model._forward_pre_hooks.values():
            hook(content.model, ())  # the hooks of rotations read the loaded matrices
        if content.config.softmax_quant_spec is not None:
            raise UnsupportedError(
                f"'{self.directory}' quantizes attention probabilities, which fused kernels never store. Quantize the model without "
                f"attention_scheme"
            )
        return content.model

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return {self.renamed(name): module for name, module in self.model.named_modules() if name}

    @cached_property
    def stored(self) -> dict[str, dict[str, torch.dtype]]:
        """A dictionary from the name of a module to the dtypes of the module's stored tensors.

        The dtypes are a dictionary too. The key is the last part of the tensor's name.
        """
        owners: dict[str, dict[str, torch.dtype]] = {}
        for name, dtype in self._tensors.items():
            owner, _, leaf = name.rpartition(".")
            owners.setdefault(self.renamed(owner), {})[leaf] = dtype
        return owners

    @cached_property
    def _tensors(self) -> dict[str, torch.dtype]:
        """A dictionary from the name of a stored tensor in the checkpoint to the tensor's dtype."""
        return {name: DTYPES[dtype] for shard in check_shards(self.directory) for name, (dtype, _) in shard.tensors.items()}

    def parts(self, name: str) -> dict[str, nn.Module]:
        """Return the checkpoint's layers that form the runtime's layer ``name``.

        The result is a dictionary from name to layer, in the order in which the layers are stacked.

        The result is empty if all of these layers are float, or if the checkpoint has no such layer.
        """
        holder, dot, last = name.rpartition(".")
        names = [name] if name in self._modules else [f"{holder}{dot}{part}" for part in self.fused.get(last, ())]
        layers = {name: self._modules[name] for name in names if name in self._modules}
        changed = any(isinstance(layer, Packed) or layer._forward_pre_hooks for layer in layers.values())
        return layers if changed else {}

    def experts(self, name: str) -> nn.Module | None:
        """Return the mixture-of-experts layer ``name``, or None if all of its layers are float."""
        mixture = self._modules.get(name)
        return mixture if mixture is not None and any(isinstance(m, Packed) for m in mixture.modules()) else None

    @property
    def embedding(self) -> nn.Module:
        """The token embedding of the model."""
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        """The output head, which computes the logits."""
        return self.model.get_output_embeddings()

    def name_of(self, module: nn.Module) -> str:
        """Return the runtime's name of a module of the model."""
        return next(name for name, other in self._modules.items() if other is module)

    def unread(self) -> Iterator[str]:
        """Yield the names of stored tensors that a runtime does not load, such as rotation matrices."""
        modules, state = dict(self.model.named_modules()), self.model.state_dict(keep_vars=True)
        for name in self._tensors:
            owner = name.rpartition(".")[0]
            module = modules.get(owner)
            if isinstance(module, Branch) or (not isinstance(module, Packed) and (name not in state or not owner)):
                yield name

    def output_scales(self, layers: Container[str]) -> Iterator[str]:
        """Yield the names of the stored output scales of ``layers``.

        Both ``layers`` and the results are names in the checkpoint.
        """
        for name in self._tensors:
            layer, _, leaf = name.rpartition(".")
            if layer in layers and leaf.startswith("output_"):
                yield name

    def states(self, attention: str) -> CachedStates | None:
        """Return the functions that an attention layer applies to its queries, keys and values.

        Return None if the layer has no such functions.
        """
        module = self._modules.get(attention)
        if module is None:
            return None
        functions = [getattr(module, state, None) for state in (QUERY, KEY, VALUE)]
        query, key, value = (f.unpack() if isinstance(f, Packed) else f for f in functions)
        basis = getattr(module, BASIS, None)
        return None if query is key is value is basis is None else CachedStates(basis, query, key, value)


_ROUNDED = ("fp8", "int8", "int4", "nvfp4", "turboquant", "ultraquant")
"""Prefixes of the names of vLLM's quantized caches."""
_CACHES = {
    "int8_per_token_head": ("int8", PerToken()),
    "fp8_per_token_head": ("fp8_e4m3", PerToken()),
    "fp8": ("fp8_e4m3", PerTensor()),
}
"""Cache of vLLM that rounds like quark → format of the elements and granularity of their scales."""


def _kind(quantizer: TensorQuantizer) -> tuple[str, Granularity] | None:
    if len(quantizer.levels) > 1:
        return None
    level = quantizer.stored_level
    return (level.format.name, level.granularity) if quantizer.is_dynamic == isinstance(level.granularity, PerToken) else None


def _of_rank(quantizer: Any, rank: int, ranks: int) -> Any:
    scale = None if quantizer is None else quantizer.scale
    if scale is None or scale.ndim == 0 or ranks == 1:
        return quantizer
    count = max(len(scale) // ranks, 1)
    start = rank * len(scale) // ranks if len(scale) < ranks else rank * count
    own = deepcopy(quantizer)
    own.set_qparams(attrs.evolve(quantizer.qparams, scale=scale[start : start + count]))
    return own


@attrs.frozen(eq=False)
class CachedStates:
    """The functions that attention applies to queries, keys and values. A function may be None.

    Attributes:
        basis: Rotates the queries and keys of each head.
        query, key, value: Quantize the queries, keys and values. These have the shape ``[1, heads, tokens,
            d]``.
    """

    basis: Callable[[Tensor], Tensor] | None
    query: Any
    key: Any
    value: Any

    def of_rank(self, rank: int, ranks: int) -> CachedStates:
        """Return the functions for the heads that one of several ranks has.

        Ranks divide the heads of keys and values. If there are fewer heads than ranks, several ranks have the
        same head.
        """
        return attrs.evolve(self, key=_of_rank(self.key, rank, ranks), value=_of_rank(self.value, rank, ranks))

    def rounded_by(self, dtype: str) -> bool:
        """Return whether vLLM's cache rounds keys and values in the same way as these functions.

        Args:
            dtype: vLLM's ``--kv-cache-dtype``.

        Raises:
            UnsupportedError: The cache rounds keys and values in another way, so they would be rounded twice.
        """
        quantizers = [function.quantizer for function in (self.key, self.value) if function is not None]
        if not quantizers or not dtype.startswith(_ROUNDED):
            return dtype.startswith("fp8")
        wanted = next((kind for name, kind in _CACHES.items() if dtype.startswith(name)), None)
        if wanted is None or any(_kind(quantizer) != wanted for quantizer in quantizers):
            raise UnsupportedError(
                f"the checkpoint's KV cache ({quantizers[0].stored_level.format.name}) has other scales than vLLM uses for "
                f"--kv-cache-dtype {dtype}, so vLLM would round the cache a second time. Start vLLM without --kv-cache-dtype; quark-vllm "
                "then simulates the checkpoint's cache"
            )
        return True

    def changed(self, x: Tensor, heads: int, state: str) -> Tensor:
        """Apply the functions to the queries, keys or values ``x``, and return the result in the same shape.

        The shape is ``[tokens, heads · d]`` or ``[tokens, heads, d]``. ``state`` is "query", "key" or
        "value".
        """
        by_head = x.reshape(len(x), heads, -1).transpose(0, 1)[None]
        basis = self.basis if state != "value" else None
        for function in (basis, getattr(self, state)):
            by_head = by_head if function is None else function(by_head)
        return by_head[0].transpose(0, 1).reshape(x.shape)
