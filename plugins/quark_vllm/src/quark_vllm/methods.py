"""Quantization methods for vLLM that compute with quark's layers.

vLLM creates a layer, loads the tensors of the layer, and asks the method of the layer to process them. With
the methods of this module, the layers have empty parameters, which ignore the tensors that vLLM loads. The
methods get the weights from the `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from quark.errors import UnsupportedError
from quark.models.layers import have_same_weight, share_codes
from quark.models.layers.layers_from_codes import Packed
from quark.models.layers.packed_layers import PackedLayer
from quark_vllm.operator import Operation, announce, call
from quark_vllm.parts import cut_layer, reads_whole_input, rows_of_rank, shared_input
from quark_vllm.served_model import CachedStates, ServedModel

__all__ = ["ServedAttention", "ServedEmbedding", "ServedExperts", "ServedLinear"]

_STAND_INS = "quark_stand_ins"


def _stand_in(layer: nn.Module, stored: Mapping[str, torch.dtype]) -> None:
    """Give a layer empty parameters. They accept every tensor that vLLM loads, and ignore it.

    ``stored`` maps the name of a parameter to its dtype.
    """
    setattr(layer, _STAND_INS, tuple(stored))
    for name, dtype in stored.items():
        parameter = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        parameter.weight_loader = lambda *_, **__: True  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)


def _without_stand_ins(layer: nn.Module) -> torch.device:
    """Remove the empty parameters of a layer, and return the device of the layer."""
    device = torch.get_default_device()
    for name in getattr(layer, _STAND_INS):
        device = layer._parameters.pop(name).device  # type: ignore[union-attr]
    return device


class ServedLinear(LinearMethodBase):
    """Computes a linear layer of vLLM with one or several layers of the checkpoint.

    Args:
        served: The checkpoint.
        parts: The checkpoint's layers that form the linear layer, as a dictionary from name to layer.
    """

    def __init__(self, served: ServedModel, parts: Mapping[str, nn.Module]) -> None:
        self._served, self._parts = served, parts
        self._product: UnquantizedLinearMethod | None = None
        self._operation: Operation | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        self._columns, self._sizes, self._dtype = input_size_per_partition, output_partition_sizes, params_dtype
        _stand_in(layer, {k: dtype for part in self._parts for k, dtype in self._served.stored.get(part, {}).items() if k != "bias"})

    def process_weights_after_loading(self, layer: Any) -> None:
        device, parts = _without_stand_ins(layer), list(self._parts.values())
        is_row = isinstance(layer, RowParallelLinear)
        start = layer.tp_rank * self._columns if is_row else 0
        options: Any = {"keeps_codes": self._served.keeps_codes, "dtype": self._dtype, "device": device}
        layers: list[Any] = [
            cut_layer(part, rows, slice(start, start + self._columns), **options)
            for part, rows in zip(*_stacked(layer, parts, self._sizes), strict=True)
        ]
        if is_row and layer.tp_size > 1 and any(getattr(part, "output_quantizer", None) is not None for part in layers):
            name = layer.prefix
            raise UnsupportedError(
                f"the output of '{name}' is quantized, but no rank has the whole output. Serve the model without tensor parallelism"
            )
        if layer.bias is not None:
            layer.bias.data = torch.cat([part.bias for part in layers]).data
        reads_all, shared = any(map(reads_whole_input, layers)), shared_input(layers)
        self._gathers = is_row and layer.tp_size > 1 and reads_all
        self._parts = {}
        if not self._served.keeps_codes and shared is not None:
            layer.weight = nn.Parameter(torch.cat([part.weight for part in layers]), requires_grad=False)
            self._product = UnquantizedLinearMethod()
            self._product.process_weights_after_loading(layer)
            for part in layers:
                part._parameters.clear()  # ``layer`` has copies of these parameters
            if reads_all:
                self._announce(layer, Operation(shared, self._columns, self._dtype))
            return
        if layer.skip_bias_add or (is_row and layer.tp_rank > 0):
            for part in layers:
                part._parameters["bias"] = None
        layer.quark_parts = nn.ModuleList(layers)

        def product(x: Tensor) -> Tensor:
            outputs = [part(x) for part in layers]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

        self._announce(layer, Operation(product, sum(self._sizes), self._dtype))

    def _announce(self, layer: Any, operation: Operation) -> None:
        self._operation = operation
        announce(layer.prefix, operation)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output of the layer.

        If all parts rotate and quantize their input in the same way, vLLM multiplies the weight by the
        quantized input. Otherwise, the outputs of the parts are computed, and the parts add the bias
        themselves.
        """
        if self._gathers:
            x = tensor_model_parallel_all_gather(x)
        if self._operation is not None:
            x = call(layer.prefix, x)
        return x if self._product is None else self._product.apply(layer, x, bias)


def _stacked(layer: Any, parts: list[nn.Module], sizes: list[int]) -> tuple[list[nn.Module], list[slice]]:
    """Return two lists with one element for each part of a vLLM layer.

    The first list has the checkpoint's layers. The second list has the rows of each of them on this rank.
    """
    widths = [_everything(part)[0].stop for part in parts]
    if len(parts) == len(sizes):
        rows = [rows_of_rank([w], [s], layer.tp_rank, layer.tp_size)[0] for w, s in zip(widths, sizes, strict=True)]
        return parts, rows
    if len(parts) > 1:
        counts = f"{len(parts)} layers in the checkpoint and {len(sizes)} in vLLM"
        raise UnsupportedError(f"'{layer.prefix}' has {counts}, so its parts cannot be matched. Exclude this layer from quantization")
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        full = [layer.total_num_heads * layer.head_size, keys * layer.head_size, keys * layer.v_head_size]
    else:
        full = layer.output_sizes
    return parts * len(sizes), rows_of_rank(full, sizes, layer.tp_rank, layer.tp_size)


def _everything(layer: Any) -> tuple[slice, slice]:
    """Return a slice of all rows and a slice of all columns of a layer's weight. The layer may be
    `Packed`.
    """
    if isinstance(layer, PackedLayer):
        shape: Any = layer.weight_shape
    else:
        shape = (layer.unpack() if isinstance(layer, Packed) else layer).weight.shape
    rows, columns = shape
    return slice(0, rows), slice(0, columns)


class ServedEmbedding(QuantizeMethodBase):
    """Computes an embedding or an output head of vLLM with the checkpoint's layers.

    Args:
        served: The checkpoint.
        is_embedding: Whether the layer looks up tokens. If the embeddings are tied, vLLM asks the same layer
            for logits. The checkpoint's output head then computes the logits.
    """

    def __init__(self, served: ServedModel, *, is_embedding: bool) -> None:
        self._served, self._is_embedding = served, is_embedding
        self._name = served.name_of(served.embedding if is_embedding else served.head)

    def create_weights(self, layer: nn.Module, *_: Any, params_dtype: torch.dtype, **__: Any) -> None:
        self._dtype = params_dtype
        _stand_in(layer, {k: dtype for k, dtype in self._served.stored.get(self._name, {}).items() if k != "bias"})

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Return ``embed_tokens`` if the checkpoint ties the output head to the embedding. Otherwise, return
        ``layer``.
        """
        return embed_tokens if have_same_weight(self._served.head, self._served.embedding) else layer

    def process_weights_after_loading(self, layer: Any) -> None:
        device, shard, rows = _without_stand_ins(layer), layer.shard_indices, layer.num_embeddings_per_partition
        options: Any = {"keeps_codes": self._served.keeps_codes, "dtype": self._dtype, "device": device}
        own = slice(shard.org_vocab_start_index, shard.org_vocab_end_index), slice(0, layer.embedding_dim)
        if self._is_embedding:
            layer.quark_lookup = cut_layer(self._served.embedding, *own, **options)
            self._lookup = Operation(layer.quark_lookup, layer.embedding_dim, self._dtype, adds_axis=True)
            announce(f"{self._name} as embedding", self._lookup)
        layer.quark_head = cut_layer(self._served.head, *own, **options)
        if self._is_embedding and have_same_weight(self._served.head, self._served.embedding):
            share_codes(layer.quark_head, layer.quark_lookup)  # both use one weight in memory
        padding = rows - (own[0].stop - own[0].start)
        self._head = Operation(lambda x: functional.pad(layer.quark_head(x), (0, padding)), rows, self._dtype)
        announce(f"{self._name} as head", self._head)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids."""
        return call(f"{self._name} as embedding", ids)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states."""
        return call(f"{self._name} as head", x)


class ServedExperts(FusedMoEMethodBase):
    """Computes a mixture-of-experts layer of vLLM with the checkpoint's layers, expert by expert.

    Each rank has the same number of whole experts.

    Args:
        served: The checkpoint.
        mixture: The mixture-of-experts layer of the checkpoint.
        moe: vLLM's configuration of the mixture-of-experts layer.
    """

    def __init__(self, served: ServedModel, mixture: nn.Module, moe: Any) -> None:
        super().__init__(moe)
        self._served, self._mixture = served, mixture

    def create_weights(self, layer: Any, *_: Any, params_dtype: torch.dtype, **__: Any) -> None:
        self._dtype = params_dtype
        kinds = {layer.ckpt_gate_proj_name: "w13_", layer.ckpt_up_proj_name: "w13_", layer.ckpt_down_proj_name: "w2_"}
        stored: dict[str, torch.dtype] = {}
        for owner, leaves in self._served.stored.items():
            if owner.startswith(f"{layer.layer_name}."):
                kind = kinds.get(owner.rpartition(".")[2], "")
                stored |= {f"{kind}{leaf}": dtype for leaf, dtype in leaves.items()}
        _stand_in(layer, stored)

    def process_weights_after_loading(self, layer: Any) -> None:
        device, parallel = _without_stand_ins(layer), layer.moe_config.moe_parallel_config
        mixture: Any = self._mixture
        ranks, rank = (parallel.ep_size, parallel.ep_rank) if parallel.use_ep else (parallel.tp_size, parallel.tp_rank)
        local = layer.expert_map
        options: Any = {"keeps_codes": self._served.keeps_codes, "dtype": self._dtype, "device": device}
        for number, expert in list(mixture.named_children()):
            if (int(local[int(number)]) < 0) if local is not None else (int(number) % ranks != rank):
                delattr(mixture, number)
                continue
            for name, part in list(expert.named_children()):
                setattr(expert, name, cut_layer(part, *_everything(part), **options))
        layer.quark_mixture = mixture

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None, because no kernel of vLLM is called."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any, shared_experts_input: Tensor | None
    ) -> Tensor:
        """Return the sum of the outputs of this rank's experts."""
        return layer.quark_mixture(x, topk_ids, topk_weights)


class ServedAttention(BaseKVCacheMethod):
    """Rotates and quantizes keys and values before vLLM caches them, like quark's attention.

    If vLLM's cache is FP8, it gets the scales of the checkpoint. Any other quantized cache is simulated: keys
    and values are quantized and dequantized, and vLLM stores them in floating point.

    Args:
        config: vLLM's configuration of the quantization.
        states: The functions that quark's attention applies to queries, keys and values.
    """

    def __init__(self, config: Any, states: CachedStates) -> None:
        super().__init__(config)
        self._states = states

    def process_weights_after_loading(self, layer: Any) -> None:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        states = self._states.of_rank(rank, ranks)
        heads = {"query": layer.num_heads, "key": layer.num_kv_heads, "value": layer.num_kv_heads}
        in_cache = states.rounded_by(str(layer.kv_cache_dtype))
        for state, scale in (("key", layer.k_scale), ("value", layer.v_scale)):
            quantizer = getattr(states, state)
            if in_cache and quantizer is not None and quantizer.is_static:
                scale.data = quantizer.qparams.scale.reshape(()).to(scale.device, torch.float32)
        super().process_weights_after_loading(layer)
        kept = {"query": states.query, "key": None if in_cache else states.key, "value": None if in_cache else states.value}
        own = CachedStates(states.basis, **kept)
        changed = [s for s in heads if kept[s] is not None or (states.basis is not None and s != "value")]
        self._operations = {}
        for state in changed:
            name, count = f"{layer.layer_name} {state}", heads[state]
            width = count * (layer.head_size_v if state == "value" else layer.head_size)
            operation = Operation(partial(own.changed, heads=count, state=state), width, torch.get_default_dtype())
            self._operations[state] = operation
            announce(name, operation)

        def change(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            new = [call(f"{layer.layer_name} {s}", x.reshape(len(x), -1)) if s in changed else x for s, x in zip(heads, args, strict=False)]
            return (*new, *args[len(new) :])

        if changed:
            layer.register_forward_pre_hook(change)
