"""Trials: what a block would compute if its layers were rounded to nearest, and how far that is from what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import RoundToNearest
from quark.model.plan import PlanRow
from quark.nn import QuantizedLayer, quantized_class
from quark.pipeline.activation_scales import static_input
from quark.pipeline.batches import Call
from quark.pipeline.lockstep import replaced_forward
from quark.pipeline.problems import problems
from quark.pipeline.stations import tokens_of
from quark.specs.layer import QLayerConfig

_TINY = torch.finfo(torch.float32).tiny


def configs_of(block: str, rows: Sequence[PlanRow]) -> dict[str, QLayerConfig]:
    """What each linear layer of a block, named relative to it, is going to be quantized to; layers of other kinds are left out."""
    prefix = f"{block}." if block else ""
    return {
        r.name.removeprefix(prefix): r.config
        for r in rows
        if r.config is not None and r.config.weight is not None and r.module_type == nn.Linear.__name__
    }


@contextmanager
def as_rounded(block: nn.Module, configs: Mapping[str, QLayerConfig]) -> Iterator[None]:
    """While the body runs, layers of a block compute what copies of them would that are rounded to nearest."""
    copies = _rounded(block, configs)
    with ExitStack() as stack:
        for name, made in copies.items():
            stack.enter_context(replaced_forward(block.get_submodule(name), _trying(made)))
        yield


def relative_error(found: Tensor, reference: Tensor, call: Call) -> float:
    """The squared error of all tokens ÷ the squares of what they should be; those that a mask leaves out do not count.

    Args:
        found: Of a block, ``[batch, tokens, channels]``.
        reference: What it should be, likewise.
        call: That the tokens are of.
    """
    error, size = _squares(found, reference, call)
    return float(error.sum() / size.sum().clamp(min=_TINY))


def error_by_token(found: Tensor, reference: Tensor, call: Call) -> float:
    """The same ratio of each token, and the mean over tokens. Arguments as `relative_error`.

    The norm in front of the next block divides each token by its own size, so each counts alike here. In `relative_error` a few tokens of
    enormous activations count for nearly all, which many models have, and to which all others attend.
    """
    error, size = _squares(found, reference, call)
    return float((error / size.clamp(min=_TINY)).mean())


def tensor_of(output: Any) -> Tensor:
    """What a block adds to the residual stream: its output, or the first of several."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _squares(found: Tensor, reference: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Of each token's error, and of what it should be."""
    wanted = tokens_of(reference, call).float()
    return (tokens_of(found, call).float() - wanted).square().sum(-1), wanted.square().sum(-1)


def _rounded(block: nn.Module, configs: Mapping[str, QLayerConfig]) -> dict[str, QuantizedLayer]:
    """Copies of all layers, rounded."""
    nearest = RoundToNearest()
    layers = {name: block.get_submodule(name) for name in configs}
    made = {name: quantized_class(layer).from_float(layer, configs[name]) for name, layer in layers.items()}
    for problem in problems(made, ()):
        nearest.round(problem)
    return made


def _trying(made: QuantizedLayer) -> Callable[..., Any]:
    """A layer's forward through its rounded copy; a static input scale is that of the first input."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = static_input(made)
        if module is not None and module.qparams is None:
            observer = module.quantizer.observer()
            observer.observe(x)
            module.set_qparams(module.quantizer.qparams_from(observer))
        return made.product(x, *args, **kwargs)

    return forward
