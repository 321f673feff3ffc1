"""Functions for quantizers inside attention modules.

The functions create the quantizers, observe the tensors of the attention modules, and install the quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy

from torch import Tensor, nn

from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.layers.attention import CALIBRATION, PROBABILITIES, STATES
from quark.models.plan.attention import AttentionRow

Inside = Mapping[str, Mapping[str, QuantizerModule]]
"""A mapping from the full name of an attention module to its quantizers. The quantizers are a mapping, too:
its keys are the attributes in `quark.models.layers.attention`.
"""

Arrived = Callable[[str, Mapping[str, Tensor]], bool]
"""A callback with two arguments: the name of an attention module, and a mapping from attribute to tensor. It
returns whether these tensors shall be quantized.
"""


def attention_quantizers(layers: Mapping[str, QuantizedLayer], attentions: Iterable[AttentionRow]) -> dict[str, dict[str, QuantizerModule]]:
    """Create the quantizers of attention modules.

    Return a dictionary from module name to another dictionary, which maps each attribute to its quantizer.

    The quantizers are not installed in the modules yet.

    Args:
        layers: The quantized layers of the block by full name. If the output of a projection is quantized
            inside attention, the projection's output quantizer is moved to the attention module.
        attentions: The plan rows of the attention modules.
    """
    quantizers_of: dict[str, dict[str, QuantizerModule]] = {}
    for row in attentions:
        quantizers = quantizers_of.setdefault(row.name, {})
        outputs = {layer: layers[layer].output_quantizer for layer, _ in row.states.values()}
        for state, (layer, _) in row.states.items():
            # Queries, keys and values of a fused projection each get a copy.
            quantizer = deepcopy(outputs[layer])
            assert quantizer is not None
            quantizers[state], layers[layer].output_quantizer = quantizer, None
        if row.probabilities is not None:
            quantizers[PROBABILITIES] = QuantizerModule(row.probabilities, activation=True)
    return quantizers_of


def inside_block(inside: Inside, prefix: str) -> dict[str, Mapping[str, QuantizerModule]]:
    """Return the quantizers of a block's attention modules, with ``prefix`` removed from each full name."""
    return {name.removeprefix(prefix): quantizers for name, quantizers in inside.items()}


def install(model: nn.Module, inside: Inside) -> None:
    """Set quantizers as attributes of their attention modules."""
    for name, quantizers in inside.items():
        for attribute, quantizer in quantizers.items():
            setattr(model.get_submodule(name), attribute, quantizer)


@contextmanager
def calibrating(model: nn.Module, inside: Inside, arrived: Arrived) -> Iterator[None]:
    """Call ``arrived`` with the tensors of each attention module while the body of the ``with`` statement
    runs.

    The tensors are quantized if ``arrived`` returns True.
    """
    with ExitStack() as stack:
        for name, quantizers in inside.items():
            module = model.get_submodule(name)
            if any(state in quantizers for state in STATES):
                stack.enter_context(_attribute(module, CALIBRATION, _states(name, quantizers, arrived)))
            if PROBABILITIES in quantizers:
                stack.enter_context(_attribute(module, PROBABILITIES, _probabilities(name, quantizers[PROBABILITIES], arrived)))
        yield


def _states(name: str, quantizers: Mapping[str, QuantizerModule], arrived: Arrived) -> Callable[..., tuple[Tensor, ...]]:
    def states(*tensors: Tensor) -> tuple[Tensor, ...]:
        by_name = dict(zip(STATES, tensors, strict=True))
        if not arrived(name, {state: x for state, x in by_name.items() if state in quantizers}):
            return tensors
        return tuple(quantizers[state](x) if state in quantizers else x for state, x in by_name.items())

    return states


def _probabilities(name: str, quantizer: QuantizerModule, arrived: Arrived) -> Callable[[Tensor], Tensor]:
    def probabilities(x: Tensor) -> Tensor:
        return quantizer(x) if arrived(name, {PROBABILITIES: x}) else x

    return probabilities


@contextmanager
def _attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)
