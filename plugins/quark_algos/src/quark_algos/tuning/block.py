"""`TuneBlock`: reduces the output error of a rounded block by gradient descent."""

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
"""Names of the CPU vector instructions that can multiply bfloat16."""


class TuneBlock(Tuning):
    """The algorithm ``tuning``.

    It reports four metrics for a block. ``epochs`` is the number of epochs. ``first_loss`` and ``last_loss``
    are the mean relative squared errors of the output in the first and in the last epoch, weighted with the
    factors of `RoundedBlock.channels`. ``codes`` is the share of codes that differ from the codes that the
    rounding algorithm chose.

    Args:
        settings: A `TuningConfig`.
    """

    def __init__(self, settings: TuningConfig) -> None:
        self._settings = settings
        self.wants_float = settings.target == "model"

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Tune a block. See `quark.algorithms.Tuning.tune`."""
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
    """A sample, the positions of its fitted tokens (``own``), and the positions of its held-out tokens."""

    sample: Sample
    own: Tensor
    held_out: Tensor


def fitted(block: RoundedBlock) -> list[Fitted]:
    """Return those samples of a block that have tokens to fit, and the positions of these tokens."""
    found = []
    for sample in block.samples:
        own, held_out = (mask.nonzero().squeeze(1) for mask in (~sample.is_held_out, sample.is_held_out))
        if len(own):
            found.append(Fitted(sample, own, held_out))
    return found


def dtype_of_products(name: str, samples: Sequence[Fitted]) -> torch.dtype:
    """Return the dtype for ``name``, a value of the setting ``compute_dtype``.

    The dtype for ``"auto"`` depends on the device of the samples.

    On a CPU with AVX-512 or SVE, torch computes products in bfloat16 efficiently. On a CPU with only AVX2,
    they take several times as long as in float32.
    """
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    is_slow = samples[0].sample.target.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith(_OF_BFLOAT16)
    return torch.float32 if is_slow else torch.bfloat16


class BlockState:
    """The parameters of a block during tuning: weights of layers, and vectors such as norm weights.

    If the block has factors for ``channels``, the loss is the mean relative error of the tokens. Otherwise it
    is the mean squared error.
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
        """Compute the gradient of a sample's loss, divide it by ``share``, and add it to the stored
        gradients.

        Return a tensor ``[2]`` with the loss and the error of the held-out tokens.
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
        """Return the output of a block for a sample.

        If the code of the block fails in the dtype of the settings, this call and all later calls use the
        model's dtype.
        """
        if self._dtype is not None:
            try:
                with block.substituted(self._tensors):
                    return block.output(sample, self._dtype)
            except torch.OutOfMemoryError:  # a subclass of RuntimeError; the model's dtype would need even more memory
                raise
            except RuntimeError as error:  # for example, bfloat16 products are written into a float32 buffer
                get_logger(__name__).info(f"A block does not run in {self._dtype}, so it is tuned in the model's dtype: {error}")
                self._dtype = None
        with block.substituted({name: tensor.to(sample.target.dtype) for name, tensor in self._tensors.items()}):
            return block.output(sample, None)

    def step(self, lr: float, scale_lr: float, vector_lr: float) -> None:
        """Change all parameters by one step against their gradients."""
        for layer in self._layers.values():
            layer.update(lr, scale_lr)
        for vector in self._vectors.values():
            vector.update(vector_lr)
        self._tensors = {}

    def current(self) -> tuple[list[Any], list[Tensor]]:
        """Return the current state. `write` can restore this state."""
        return [layer.state() for layer in self._layers.values()], [vector.value() for vector in self._vectors.values()]

    def write(self, block: RoundedBlock, state: tuple[Sequence[Any], Sequence[Tensor]]) -> float:
        """Store the codes, scales and vectors of a state in the block.

        Return the share of codes that differ from the codes that the rounding algorithm chose.
        """
        layers, vectors = state
        changed = sum(layer.write(own) for layer, own in zip(self._layers.values(), layers, strict=True))
        for name, values in zip(self._vectors, vectors, strict=True):
            block.parameters[name].copy_(values)
        return changed / max(1, sum(layer.leaf.numel() for layer in self._layers.values()))


class _Vector:
    """A norm weight or bias that is tuned. The step size is relative to the mean magnitude of the vector."""

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
    """Return whether each of the last ``patience`` epochs had a larger error than the first epoch."""
    return len(errors) > patience and min(errors[-patience:]) > errors[0]


def means(losses: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean of the first elements and the mean of the second elements of vectors ``[2]``.

    The values are copied from the device to the host all at once.
    """
    first, second = zip(*torch.stack(list(losses)).tolist(), strict=True)
    return sum(first) / len(first), sum(second) / len(second)
