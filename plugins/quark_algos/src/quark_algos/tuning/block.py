"""TuneBlock: gradient descent on the codes, scales, norms and biases of a rounded block, by the error of the block's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import Metrics, RoundedBlock, Sample
from quark_algos.tuning.adam import Adam
from quark_algos.tuning.config import TuningConfig
from quark_algos.tuning.layer import TunedLayer

__all__ = ["TuneBlock"]


class TuneBlock:
    """The algorithm ``tuning``.

    Metrics of a block: ``epochs``, ``first_loss`` and ``last_loss`` (mean relative squared error of the output over the first and the last
    epoch), ``codes`` (share of codes that differ from those of the rounding).

    Args:
        settings: A `TuningConfig`.
    """

    def __init__(self, settings: TuningConfig) -> None:
        self._settings = settings
        self.wants_float = settings.target == "model"

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """As `quark.algorithms.Tuning.tune`."""
        samples = [_Weighted.of(sample) for sample in block.samples if bool((~sample.is_held_out).any())]
        if not samples:
            return {}
        state = _BlockState.of(block, self._settings)
        errors: list[tuple[float, float]] = []
        schedule = _schedule(len(samples), self._settings)
        for number, steps in enumerate(schedule):
            losses, held_out = [], []
            for step, batch in enumerate(steps):
                progress = (number + step / len(steps)) / len(schedule)
                for sample in batch:
                    loss, error = state.backward(block, samples[sample], len(batch))
                    losses.append(loss)
                    held_out.append(error)
                state.step(1 - progress)
            errors.append((_mean(losses), _mean(held_out)))
            if _does_harm([error for _, error in errors], self._settings.patience):
                break
        codes = state.write(block, state.current())
        return {"": {"epochs": len(errors), "first_loss": errors[0][0], "last_loss": errors[-1][0], "codes": codes}}


@attrs.frozen(eq=False)
class _Weighted:
    """A sample with the weight of each token: the inverse of its squared norm.

    The norm before the next block divides each token by its own size; without weights, the few tokens with massive activations would
    outweigh all others.
    """

    sample: Sample
    weight: Tensor

    @classmethod
    def of(cls, sample: Sample) -> _Weighted:
        size = sample.target.float().square().sum(-1)
        return cls(sample, 1 / size.clamp(min=torch.finfo(torch.float32).tiny))


class _BlockState:
    """What is tuned of a block: its layers, and vectors such as norm weights."""

    def __init__(self, layers: Mapping[str, TunedLayer], vectors: Mapping[str, _Vector], settings: TuningConfig) -> None:
        self._layers = layers
        self._vectors = vectors
        self._settings = settings
        self._tensors: dict[str, Tensor] = {}
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        self._dtype = None if dtype is torch.float32 else dtype

    @classmethod
    def of(cls, block: RoundedBlock, settings: TuningConfig) -> _BlockState:
        has_weights = settings.rounding or settings.scales
        names = block.layers if has_weights else ()
        layers = {name: TunedLayer(block.weights(name), block.float_weights[name], settings) for name in names}
        return cls(layers, {n: _Vector(p) for n, p in block.parameters.items() if settings.norms}, settings)

    def backward(self, block: RoundedBlock, weighted: _Weighted, share: int) -> tuple[float, float]:
        """Add the gradient of a sample's loss ÷ ``share``; returns the loss, and the error of held-out tokens."""
        if not self._tensors:
            self._tensors = {f"{name}.weight": layer.weight() for name, layer in self._layers.items()}
            self._tensors |= {name: vector.leaf() for name, vector in self._vectors.items()}
        sample = weighted.sample
        with torch.enable_grad(), block.substituted(self._tensors):
            output = block.output(sample, self._dtype)
            errors = (output.float() - sample.target.float()).square().sum(-1) * weighted.weight
            loss = errors[~sample.is_held_out].mean()
            (loss / share).backward()
        held_out = errors.detach()[sample.is_held_out]
        return float(loss.detach()), float(held_out.mean()) if len(held_out) else float(loss.detach())

    def step(self, decay: float) -> None:
        """Make one step against the gradients."""
        settings = self._settings
        for layer in self._layers.values():
            layer.update(settings.lr * decay, settings.scale_lr * decay)
        for vector in self._vectors.values():
            vector.update(settings.norm_lr * decay)
        self._tensors = {}

    def current(self) -> tuple[list[Any], list[Tensor]]:
        """Return what `write` needs to go back to the block of now."""
        return [layer.state() for layer in self._layers.values()], [vector.value() for vector in self._vectors.values()]

    def write(self, block: RoundedBlock, state: tuple[Sequence[Any], Sequence[Tensor]]) -> float:
        """Give the block the codes, scales and vectors of a state; returns the share of codes that are not those of the rounding."""
        layers, vectors = state
        changed = sum(layer.write(own) for layer, own in zip(self._layers.values(), layers, strict=True))
        for name, values in zip(self._vectors, vectors, strict=True):
            block.parameters[name].copy_(values)
        return changed / max(1, sum(layer.leaf.numel() for layer in self._layers.values()))


class _Vector:
    """A norm weight or a bias while it is tuned, in units of its mean magnitude."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._first = parameter.detach().clone()
        self._unit = self._first.float().abs().mean()
        self._moved = Adam(torch.zeros_like(self._first, dtype=torch.float32))
        self._leaf = self._first

    def value(self) -> Tensor:
        return (self._first + self._unit * self._moved.value).to(self._first.dtype)

    def leaf(self) -> Tensor:
        self._leaf = self.value().requires_grad_()
        return self._leaf

    def update(self, lr: float) -> None:
        if self._leaf.grad is not None:
            self._moved.step(self._unit * self._leaf.grad.float(), lr)


def _schedule(samples: int, settings: TuningConfig) -> list[list[list[int]]]:
    """Return the samples of each step of each epoch, in an order that is drawn anew for each epoch."""
    generator = torch.Generator().manual_seed(0)
    orders = (torch.randperm(samples, generator=generator).tolist() for _ in range(settings.epochs))
    return [list(_batches(order, settings.batch_size)) for order in orders]


def _batches(order: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), size):
        yield list(order[start : start + size])


def _does_harm(errors: Sequence[float], patience: int) -> bool:
    """Return whether the last epochs, so many of them, had larger errors than the first one."""
    return len(errors) > patience and min(errors[-patience:]) > errors[0]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
