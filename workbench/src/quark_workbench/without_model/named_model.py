"""NamedModel, a model on the meta device that is made from the names and shapes of a checkpoint's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import silenced
from quark.base.names import folded
from quark.base.torch_state import building
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.dequantizer import DequantizedTensors
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.internals import without_initialization
from quark.models.hf.loading import torch_dtype
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import check_shards
from quark.models.plan.family import StatedFamily
from quark_workbench.without_model.layer_kinds import LayerKinds
from quark_workbench.without_model.named_family import family_of, input_table, output_head
from quark_workbench.without_model.stacked_experts import StackedExperts, is_stack
from quark_workbench.without_model.stored_config import StoredConfig

__all__ = ["NamedModel", "named_model"]

_DEEPEST = 32
"""Largest number of parts of a name. It is limited because modules are walked by recursion. No model has half
as many."""
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_HEAD = "lm_head"


class NamedModel(nn.Module):
    """A model that stands in for a model of an unknown class. It has all tensors of a checkpoint.

    The model cannot run.

    Attributes:
        config: The values of the checkpoint's config.json.
        stated_family: Facts about the model family, and notes on what was inferred from names.
        all_tied_weights_keys: Dictionary from the name of a tied tensor to the name of the tensor to which it
            is tied, as in models of transformers.
        base_model_prefix: An attribute that models of transformers have. Here, no name begins with this
            prefix.
    """

    config: Any
    stated_family: StatedFamily
    base_model_prefix = "(none)"

    def __init__(self) -> None:
        super().__init__()
        self.all_tied_weights_keys: dict[str, str] = {}

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the token embeddings, or None if the model has no embedding."""
        return input_table(self)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output head, or None if the model has no head."""
        return output_head(self)

    def named_non_persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing, because every tensor of the model is stored in the checkpoint."""
        return iter(())

    def tie_weights(self) -> None:
        """Tie the head to the embeddings again, if `all_tied_weights_keys` names them."""
        for name, source in self.all_tied_weights_keys.items():
            head, embeddings = (self.get_submodule(one.rpartition(".")[0]) for one in (name, source))
            head._parameters["weight"] = embeddings._parameters["weight"]

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Raise UnsupportedError, because only the model's own code can run it."""
        raise UnsupportedError("this model cannot run, because it was made from the names of its tensors: leave out --without-model")


def named_model(path: Path, dtype: str = "auto", device: torch.device | None = None, *, trust_remote_code: bool = False) -> nn.Module:
    """Return a `NamedModel` of a checkpoint, made from the headers of the files. No code of the model runs.

    A module whose ``weight`` is a matrix becomes a linear layer, unless its name says that it is an embedding
    or a norm. The length of a bias may show that the matrix is transposed. Stacked experts become a
    `StackedExperts`. All other tensors stay float. Tensors in the most frequent dtype of the checkpoint get
    ``dtype``, or the dtype that config.json names. Other tensors keep their dtype.

    The arguments are as in `quark.models.hf.skeleton.skeleton`.

    Args:
        path: Directory of the checkpoint.
        dtype: One of float32, bfloat16 and float16, or ``auto`` for the dtype of the checkpoint.
        device: Has no effect, because nothing is computed.
        trust_remote_code: Has no effect, because no code is run.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no config.json.
        ConfigError: The checkpoint is quantized, and no installed layout dequantizes it.
    """
    chosen, config = torch_dtype(dtype), StoredConfig.read(path)
    config = config if chosen is None else config.in_dtype(chosen)
    tensors = _in_dtype(_stored(path), chosen or config.dtype)
    if not tensors:
        raise CheckpointError(f"'{path}' has no tensors. Fetch it again")
    root = _Node.of(tensors, path)
    hidden = config.number("hidden_size", "d_model", "n_embd", "dim", "model_dim") or _width(tensors)
    builder = _Builder(LayerKinds.of(node.tensors for _, node in root.walk("")), hidden)
    # The class has the name that config.json gives, for messages.
    named = next((name for name in config.values.get("architectures") or () if name.isidentifier()), NamedModel.__name__)
    kind = type(named, (NamedModel,), {})
    with building(), torch.device("meta"), without_initialization():
        model: NamedModel = kind()
        model.config = config
        builder.fill(model, root, "")
        _tie(model)
    model.stated_family = family_of(model, builder.floats)
    return model.eval()


def _stored(path: Path) -> dict[str, Tensor]:
    """Return a dictionary from name to tensor for a checkpoint, on the meta device.

    Float tensors take the place of quantized codes.
    """
    shards = check_shards(path)
    with silenced():  # the run's own source logs that it dequantizes
        made = float_tensors_of(path, shards)
    files = FileTensors(shards)
    return files.meta if made is None else DequantizedTensors(files, made, path).meta


def _in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors, of which those in the most frequent floating-point dtype are cast to ``dtype``."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    main = max(sizes, key=lambda one: sizes[one], default=None)
    return {name: tensor.to(dtype) if dtype is not None and tensor.dtype == main else tensor for name, tensor in tensors.items()}


def _width(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the width of the embeddings, which is the number of columns of the matrix with the most rows.

    Return None if there is no matrix.
    """
    tables = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    return max(tables, key=lambda table: table.shape[0]).shape[1] if tables else None


@attrs.define(eq=False)
class _Node:
    """A module that is still to be made, as two dictionaries: from name to tensor and from name to child."""

    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    children: dict[str, _Node] = attrs.field(factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], path: Path) -> _Node:
        """Return the root of a tree of nodes for tensors with these names.

        Children are in the order of the numbers in their names.
        """
        from transformers.core_model_loading import dot_natural_key

        root, wrong = cls(), []
        for name in sorted(tensors, key=dot_natural_key):
            *owners, leaf = name.split(".")
            node = root
            for part in owners[:_DEEPEST]:
                node = node.children.setdefault(part, cls())
            node.tensors[leaf] = tensors[name]
            if len(owners) > _DEEPEST or not all((*owners, leaf)):
                wrong.append(name)
        wrong += [f"{name}.{leaf}" for name, node in root.walk("") for leaf in node.tensors.keys() & node.children.keys()]
        empty = NamedModel()
        wrong += [name for name in (*root.children, *root.tensors) if hasattr(empty, name) or name in NamedModel.__annotations__]
        if wrong:
            raise CheckpointError(f"'{path}' has tensors with invalid names, {folded(wrong)}. Fetch the checkpoint again")
        return root

    def walk(self, name: str) -> Iterator[tuple[str, _Node]]:
        """Yield this node and all nodes below it, with their full names."""
        yield name, self
        for own, child in self.children.items():
            yield from child.walk(f"{name}.{own}" if name else own)

    def below(self) -> dict[str, Tensor]:
        """Return a dictionary from name to tensor, for the tensors of the module and of its children.

        The names are relative to the module.
        """
        inner = {f"{name}.{leaf}": t for name, child in self.children.items() for leaf, t in child.tensors.items()}
        return self.tensors | inner


class _Part(nn.Module):
    """A module of an unknown kind, which has only tensors and children."""


@attrs.define(eq=False)
class _Builder:
    """Makes a module from each node.

    Attributes:
        kinds: An object that infers the kind of a module.
        hidden: The width of the hidden states; None if it is not known.
        floats: Dictionary from a reason to names of tensors with two or more axes. For this reason, the
            tensors stay float.
    """

    kinds: LayerKinds
    hidden: int | None
    floats: dict[str, list[str]] = attrs.field(factory=dict)

    def fill(self, module: nn.Module, node: _Node, name: str) -> nn.Module:
        """Add the tensors and the children of a node to a module, and return the module."""
        for leaf, tensor in node.tensors.items():
            if tensor.is_floating_point():
                module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[leaf] = tensor
        for own, child in node.children.items():
            module._modules[own] = self.module(child, f"{name}.{own}" if name else own)
        return module

    def module(self, node: _Node, name: str) -> nn.Module:
        """Return the module for a node, with all modules inside."""
        if not node.children and "weight" in node.tensors and node.tensors["weight"].ndim == 2:
            kind = self.kinds.kind(name, node.tensors)
            if kind in _LAYERS:
                return self.fill(_LAYERS[kind](node.tensors["weight"], "bias" in node.tensors), node, name)
            self._stays(kind, name, node.tensors)
        elif is_stack(name, node.below(), self.hidden) and not any(child.children for child in node.children.values()):
            return StackedExperts(node.below(), self.hidden)
        else:
            self._stays("no matrix called weight", name, node.tensors)
        is_list = bool(node.children) and not node.tensors and [*node.children] == [str(i) for i in range(len(node.children))]
        return self.fill(nn.ModuleList() if is_list else _Part(), node, name)

    def _stays(self, why: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        names = [f"{name}.{leaf}" for leaf, tensor in tensors.items() if tensor.ndim >= 2 and tensor.is_floating_point()]
        if names:
            self.floats.setdefault(why, []).extend(names)


def _linear(weight: Tensor, bias: bool) -> nn.Module:
    return nn.Linear(weight.shape[1], weight.shape[0], bias=bias)


def _transposed(weight: Tensor, _: bool) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(weight.shape[1], weight.shape[0])


def _embedding(weight: Tensor, _: bool) -> nn.Module:
    return nn.Embedding(*weight.shape)


_LAYERS = {"linear": _linear, "transposed": _transposed, "embedding": _embedding}


def _tie(model: NamedModel) -> None:
    """Tie the head to the embeddings if config.json says so, or if no head is stored.

    If a stored head has other values than the embeddings, it is untied when the checkpoint is read.
    """
    config: StoredConfig = model.config
    embeddings, head, says = input_table(model), output_head(model), config.ties_head()
    generates = any(name.endswith(_GENERATES) for name in config.values.get("architectures") or ())
    if embeddings is None or says is False or (says is None and (head is not None or not generates)):
        return
    if head is None and generates and _HEAD not in model._modules:
        head = model._modules[_HEAD] = _linear(embeddings.weight, bias=False)
    if head is not None and head.weight.shape == embeddings.weight.shape:
        head._parameters["weight"] = embeddings._parameters["weight"]
        names = {module: name for name, module in model.named_modules()}
        model.all_tied_weights_keys = {f"{names[head]}.weight": f"{names[embeddings]}.weight"}
        config.tie_word_embeddings = True
