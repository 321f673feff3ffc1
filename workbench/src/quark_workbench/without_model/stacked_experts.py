"""Stacked experts: one tensor has the matrices of all experts. Its name and shape tell what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from quark.errors import UnsupportedError
from quark.models.layers.experts import ExpertParts

__all__ = ["StackedExperts", "is_stack", "parts_of_stack"]

_OUTPUTS = ("down_proj", "w2", "wo", "output_linear", "linear_2", "fc2")
"""Names of the closing projection of an expert."""
_GATE_UP, _HALVES = "gate_up_proj", ("gate_proj", "up_proj")


class StackedExperts(nn.Module):
    """The stacked tensors of the experts of a mixture-of-experts layer.

    Args:
        tensors: Dictionary from name to tensor. A name is relative to the module, such as ``gate_up_proj`` or
            ``gate_up_proj.weight``.
        hidden: The width of the hidden states; None if it is not known.
    """

    def __init__(self, tensors: Mapping[str, Tensor], hidden: int | None) -> None:
        super().__init__()
        self.hidden = hidden
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            if owner and owner not in self._modules:
                self._modules[owner] = nn.Module()
            place = self if not owner else self._modules[owner]
            assert place is not None
            place._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)

    def forward(self, *_: object) -> Tensor:
        """Raise UnsupportedError, because the computation between the matrices is unknown."""
        raise UnsupportedError(
            "the experts cannot run, because the checkpoint is quantized without its model class. Leave out --without-model"
        )


def is_stack(name: str, tensors: Mapping[str, Tensor], hidden: int | None) -> bool:
    """Return whether a module has stacked experts, and their names and shapes show which matrix is which.

    Args:
        name: Full name of the module.
        tensors: Dictionary from name to tensor, for the module and its children. A name is relative to the
            module.
        hidden: The width of the hidden states; None if it is not known.
    """
    return "expert" in name.rpartition(".")[2].lower() and _taken_apart(tensors, hidden) is not None


def parts_of_stack(module: nn.Module, names: Sequence[str]) -> ExpertParts | None:
    """Return the matrices of the experts in a `StackedExperts`, or None for any other module.

    `quark.config.architecture.Architecture.expert_parts` is set to this function.
    """
    if not isinstance(module, StackedExperts):
        return None
    return _taken_apart({name: tensor.detach() for name, tensor in module.named_parameters()}, module.hidden)


def _taken_apart(tensors: Mapping[str, Tensor], hidden: int | None) -> ExpertParts | None:
    """Return the matrices of all experts, each kind as a tensor ``[experts, out, in]``.

    Shapes tell whether a tensor is stored as ``[experts, out, in]`` or ``[experts, in, out]``. If one tensor
    has both the gate and the up projection, it has twice as many outputs as the down projection has inputs.
    Otherwise the width of the hidden states decides. If the order stays unknown, return None.

    If ``gate_up_proj`` has no bias, its first half is the gate. With a bias, it is not divided, because
    gpt-oss interleaves the rows of both projections.
    """
    own = {name.removesuffix(".weight").removesuffix("_weight"): tensor for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in own.items() if tensor.ndim == 3 and tensor.is_floating_point()}
    biases = {name.removesuffix("_bias").removesuffix(".bias"): tensor for name, tensor in own.items() if name not in weights}
    output = next((name for name in _OUTPUTS if name in weights), None)
    if output is None or len(weights) < 2 or not biases.keys() <= weights.keys() or len({t.shape[0] for t in weights.values()}) > 1:
        return None
    inputs = [name for name in weights if name != output]
    is_transposed = _is_transposed([weights[name] for name in inputs], weights[output], hidden)
    if is_transposed is None:
        return None
    matrices = {name: tensor.transpose(1, 2) if is_transposed else tensor for name, tensor in weights.items()}
    if any(bias.shape != matrices[name].shape[:2] for name, bias in biases.items()):
        return None
    ordered = {name: matrices[name] for name in (*inputs, output)}
    if inputs == [_GATE_UP] and not biases:
        ordered = dict(zip((*_HALVES, output), (*matrices[_GATE_UP].chunk(2, dim=1), matrices[output]), strict=True))
    return ExpertParts(ordered, biases, _unknown_gate)


def _is_transposed(inputs: Sequence[Tensor], output: Tensor, hidden: int | None) -> bool | None:
    """Return whether matrices are stored as ``[in, out]``, or None if the shapes do not tell."""
    ways = []
    for is_transposed in (False, True):
        (back, out), *shapes = (tuple(t.shape[:0:-1] if is_transposed else t.shape[1:]) for t in (output, *inputs))
        is_single, is_double = all(shape == (out, back) for shape in shapes), shapes == [(2 * out, back)]
        if is_double or (is_single and hidden == back):
            ways.append(is_transposed)
    return ways[0] if len(ways) == 1 else None


def _unknown_gate(_: Sequence[Tensor]) -> Tensor:
    raise UnsupportedError(
        "the activation of the experts is unknown, because the checkpoint is quantized without its model class. Leave out --without-model"
    )
