"""Observe the activations of some layers and attention modules while forwards run through them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import CalibrationError, NonFiniteError
from quark.log import get_logger
from quark.model.attention import AttentionRow
from quark.model.plan import PlanRow, has_static_scale, static_activations
from quark.names import folded
from quark.nn.attention import KEY, PROBABILITIES
from quark.numerics import QParams, quantizer_for
from quark.numerics.observer import Observer
from quark.numerics.quantizer import TensorQuantizer
from quark.pipeline.lockstep import current_forward

_EXPERT = re.compile(r"(\bexperts\.)\d+(\.)")
"""The number of an expert in a layer's name."""

_NAMES = {"input_tensors": "input", "output_tensors": "output", "prob_output": "attention probabilities"}


@attrs.frozen(eq=False)
class Observation:
    """What is being collected of one activation.

    Attributes:
        layer: Full name of a layer, or of an attention module.
        slot: ``input_tensors`` or ``output_tensors`` of a layer, or ``prob_output`` of an attention module.
        quantizer: Makes scales of what was seen.
        observer: Sees.
        attention: The attention module whose keys are seen in place of the layer's output; None to see the output itself.
    """

    layer: str
    slot: str
    quantizer: TensorQuantizer
    observer: Observer
    attention: str | None = None

    @property
    def tensor(self) -> str:
        """What people call it."""
        if self.attention is not None:
            return f"keys of '{self.attention}' after the rotary embedding"
        return f"{_NAMES[self.slot]} of '{self.layer}'"

    @property
    def has_seen(self) -> bool:
        """Whether anything was seen."""
        try:
            self.observer.range()
        except CalibrationError:
            return False
        return True

    def qparams(self) -> QParams:
        """The scales of what was seen.

        Raises:
            NonFiniteError: NaN or Inf was seen.
            CalibrationError: Nothing was seen.
        """
        try:
            low, high = self.observer.range()
        except CalibrationError as error:
            cure = "Give data that use it" + (", or exclude it" if self.slot == "input_tensors" else "")
            raise CalibrationError(f"no calibration batch reached '{self.layer}': its static scale would be made up. {cure}") from error
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise NonFiniteError(
                f"the {self.tensor} holds NaN or Inf during calibration: the model overflows there (float16?), or weights or data are bad. "
                "Layers of earlier blocks are quantized already: load the model again before the next try",
                tensor=self.tensor,
            )
        return self.quantizer.qparams_from(self.observer)


def observations(rows: Iterable[PlanRow], attentions: Sequence[AttentionRow] = ()) -> list[Observation]:
    """A fresh observation for every activation of these layers and attention modules that has a static scale."""
    keys = {a.key_layer: a.name for a in attentions}
    found = []
    for row in rows:
        for slot in static_activations(row.config):
            quantizer = quantizer_for(getattr(row.config, slot), activation=True)
            attention = keys.get(row.name) if slot == "output_tensors" else None
            found.append(Observation(row.name, slot, quantizer, quantizer.observer(), attention))
    for module in attentions:
        if module.probabilities is not None and has_static_scale(module.probabilities):
            quantizer = quantizer_for(module.probabilities, activation=True)
            found.append(Observation(module.name, "prob_output", quantizer, quantizer.observer()))
    return found


def pooled(seen: Sequence[Observation], *, shared: bool) -> list[Observation]:
    """The same observations, but that experts which no token reached have the range of their siblings; a warning names them.

    Args:
        seen: Of one block.
        shared: Whether all experts are to have the range of all, for the input of each projection. Other than ranges over
            whole tensors are left alone.
    """
    groups: dict[tuple[str, str], list[Observation]] = {}
    for item in seen:
        if item.slot == "input_tensors" and item.quantizer.has_tensor_scale and _EXPERT.search(item.layer):
            groups.setdefault((_EXPERT.sub(r"\1*\2", item.layer), item.slot), []).append(item)
    replaced: dict[int, Observer] = {}
    idle: list[str] = []
    for members in groups.values():
        common = members[0].quantizer.observer()
        for item in members:
            common.merge(item.observer)
        unseen = [item for item in members if not item.has_seen]
        idle += [item.layer for item in unseen]
        replaced |= {id(item): common for item in (members if shared else unseen)}
    if idle:
        get_logger(__name__).warning(
            f"No calibration token reached {len(idle)} layer(s) of experts: {folded(idle)}. Their input ranges are those of "
            "their siblings. More, or more varied, calibration data reach more experts."
        )
    return [attrs.evolve(item, observer=replaced.get(id(item), item.observer)) for item in seen]


@contextmanager
def observing(model: nn.Module, wanted: Iterable[Observation]) -> Iterator[None]:
    """Let the observations see what their modules get and give while the body runs."""
    with ExitStack() as stack:
        for item in wanted:
            module = model.get_submodule(item.attention or item.layer)
            if item.attention is not None:
                stack.enter_context(_in_place_of_quantizer(module, KEY, item))
            elif item.slot == "prob_output":
                stack.enter_context(_in_place_of_quantizer(module, PROBABILITIES, item))
            elif item.slot == "input_tensors":
                stack.callback(module.register_forward_pre_hook(_see_input(item)).remove)
            else:
                stack.callback(module.register_forward_hook(_see_output(item)).remove)
        yield


@contextmanager
def _in_place_of_quantizer(attention: nn.Module, name: str, item: Observation) -> Iterator[None]:
    """What attention calls to quantize a tensor sees that tensor and returns it as it is."""

    def see(x: Tensor) -> Tensor:
        if not _in_float_forward():
            item.observer.observe(x.detach())
        return x

    setattr(attention, name, see)
    try:
        yield
    finally:
        delattr(attention, name)


def _see_input(item: Observation) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not _in_float_forward():
            item.observer.observe(args[0].detach())

    return hook


def _see_output(item: Observation) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not _in_float_forward():
            item.observer.observe(output.detach())

    return hook


def expert_layers_among(names: Iterable[str]) -> list[str]:
    """Those names that are of layers of experts."""
    return [name for name in names if _EXPERT.search(name)]


@contextmanager
def counting(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Count the tokens that reach each of these layers while the body runs."""
    tokens = dict.fromkeys(names, 0)

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not _in_float_forward():
                tokens[name] += args[0].numel() // args[0].shape[-1]

        return hook

    with ExitStack() as stack:
        for name in tokens:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(see(name)).remove)
        yield tokens


def _in_float_forward() -> bool:
    """Whether this is called for the sake of what the float model computes: what is observed is the quantized one."""
    forward = current_forward()
    return forward is not None and forward.is_float
