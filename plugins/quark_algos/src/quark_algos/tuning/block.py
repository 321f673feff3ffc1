"""TuneBlock: gradient descent on a rounded block, by the error of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import Metrics, OutputError, RoundedBlock, Sample, Tuning
from quark.base.log import get_logger
from quark_algos.tuning.config import MOST_STEPS, TuningConfig
from quark_algos.tuning.layer import Adam, TunedLayer

if TYPE_CHECKING:
    from quark_algos.tuning.autoround import OffsetLayer

__all__ = ["BlockState", "Fitted", "TuneBlock", "dtype_of_products", "fitted", "means"]

_OF_BFLOAT16 = ("AVX512", "SVE")
"""Vector instructions of CPUs that multiply bfloat16."""


class TuneBlock(Tuning):
    """The algorithm ``tuning``.

    Metrics of a block: ``epochs``, ``first_loss`` and ``last_loss`` (mean relative squared error of the
    output, by the factors of `RoundedBlock.channels`, over the first and the last epoch), ``codes`` (share of
    codes that differ from the rounding's).

    Args:
        settings: A `TuningConfig`.
    """

    def __init__(self, settings: TuningConfig) -> None:
        self._settings = settings
        self.wants_float = settings.target == "model"

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """As `quark.algorithms.Tuning.tune`."""
        settings = self._settings
        samples = fitted(block)
        if not samples:
            return {}
        dtype = dtype_of_products(settings.compute_dtype, samples)
        names = block.layers if settings.rounding or settings.scales else ()
        layers = {name: TunedLayer(block.weights(name), block.float_weights[name], settings, dtype) for name in names}
        vectors = {name: _Vector(parameter) for name, parameter in block.parameters.items() if settings.norms}
        state = BlockState(layers, vectors, dtype, block.channels)
        errors: list[tuple[float, float]] = []
        size = settings.batch_size or -(-len(samples) // MOST_STEPS)
        generator = torch.Generator().manual_seed(settings.seed)
        for epoch in range(settings.epochs):
            steps = torch.randperm(len(samples), generator=generator).split(size)
            losses = []
            for number, batch in enumerate(steps):
                losses += [state.backward(block, samples[i], len(batch)) for i in batch.tolist()]
                decay = 1 - (epoch + number / len(steps)) / settings.epochs
                state.step(settings.lr * decay, settings.scale_lr * decay, settings.norm_lr * decay)
            errors.append(means(losses))
            if _does_harm([held_out for _, held_out in errors], settings.patience):
                break
        codes = state.write(block, state.current())
        return {"": {"epochs": len(errors), "first_loss": errors[0][0], "last_loss": errors[-1][0], "codes": codes}}


@attrs.frozen(eq=False)
class Fitted:
    """A sample with the positions of fitted and held-out tokens."""

    sample: Sample
    own: Tensor
    held_out: Tensor


def fitted(block: RoundedBlock) -> list[Fitted]:
    """Return the samples of a block with tokens to fit."""
    found = []
    for sample in block.samples:
        own, held_out = (mask.nonzero().squeeze(1) for mask in (~sample.is_held_out, sample.is_held_out))
        if len(own):
            found.append(Fitted(sample, own, held_out))
    return found


def dtype_of_products(name: str, samples: Sequence[Fitted]) -> torch.dtype:
    """Return the dtype that the setting ``compute_dtype`` names, on the device of the samples.

    torch multiplies bfloat16 with AVX-512 and SVE; with only AVX2 it takes several times as long as float32.
    """
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    is_slow = samples[0].sample.target.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith(_OF_BFLOAT16)
    return torch.float32 if is_slow else torch.bfloat16


class BlockState:
    """The tuned parameters of a block: its layers, and vectors such as norm weights.

    With factors of ``channels`` the loss is the relative error of each token, else the mean square.
    """

    def __init__(
        self, layers: Mapping[str, TunedLayer | OffsetLayer], vectors: Mapping[str, _Vector], dtype: torch.dtype, channels: Tensor | None
    ) -> None:
        self._layers = layers
        self._vectors = vectors
        self._channels = channels
        self._tensors: dict[str, Tensor] = {}
        self._dtype = None if dtype is torch.float32 else dtype

    def backward(self, block: RoundedBlock, fitted: Fitted, share: int) -> Tensor:
        """Add the gradient of a sample's loss ÷ ``share``.

        Returns the loss, and the error of held-out tokens, ``[2]``.
        """
        if not self._tensors:
            self._tensors = {f"{name}.weight": layer.weight() for name, layer in self._layers.items()}
            self._tensors |= {name: vector.leaf() for name, vector in self._vectors.items()}
        sample = fitted.sample
        with torch.enable_grad():
            output = self._output(block, sample)
            error = OutputError.of(output, sample.target, channels=self._channels)
            errors = error.squares / (sample.target.shape[-1] if self._channels is None else error.sizes)
            loss = errors.index_select(0, fitted.own).mean()
            (loss / share).backward()
        held_out = errors.detach().index_select(0, fitted.held_out)
        return torch.stack([loss.detach(), held_out.mean() if len(held_out) else loss.detach()])

    def _output(self, block: RoundedBlock, sample: Sample) -> Tensor:
        """Return a block's output.

        If its code does not run in the dtype of the settings, use the model's dtype from then on.
        """
        if self._dtype is not None:
            try:
                with block.substituted(self._tensors):
                    return block.output(sample, self._dtype)
            except torch.OutOfMemoryError:  # a RuntimeError too; the model's dtype would need more memory
                raise
            except RuntimeError as error:  # such as writing bfloat16 products into a float32 buffer, which autocast does not cast
                get_logger(__name__).info(f"A block does not run in {self._dtype}, so it is tuned in the model's dtype: {error}")
                self._dtype = None
        with block.substituted({name: tensor.to(sample.target.dtype) for name, tensor in self._tensors.items()}):
            return block.output(sample, None)

    def step(self, lr: float, scale_lr: float, vector_lr: float) -> None:
        """Make one step against the gradients."""
        for layer in self._layers.values():
            layer.update(lr, scale_lr)
        for vector in self._vectors.values():
            vector.update(vector_lr)
        self._tensors = {}

    def current(self) -> tuple[list[Any], list[Tensor]]:
        """Return the current state, from which `write` restores the block."""
        return [layer.state() for layer in self._layers.values()], [vector.value() for vector in self._vectors.values()]

    def write(self, block: RoundedBlock, state: tuple[Sequence[Any], Sequence[Tensor]]) -> float:
        """Give the block the codes, scales and vectors of a state.

        Returns the share of codes that differ from the rounding's.
        """
        layers, vectors = state
        changed = sum(layer.write(own) for layer, own in zip(self._layers.values(), layers, strict=True))
        for name, values in zip(self._vectors, vectors, strict=True):
            block.parameters[name].copy_(values)
        return changed / max(1, sum(layer.leaf.numel() for layer in self._layers.values()))


class _Vector:
    """A tuned norm weight or bias, in units of its mean magnitude."""

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


def _does_harm(errors: Sequence[float], patience: int) -> bool:
    """Return whether the last ``patience`` epochs had larger errors than the first one."""
    return len(errors) > patience and min(errors[-patience:]) > errors[0]


def means(losses: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean of each column of vectors ``[2]``; the host waits for the device once."""
    first, second = zip(*torch.stack(list(losses)).tolist(), strict=True)
    return sum(first) / len(first), sum(second) / len(second)
