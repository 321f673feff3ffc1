"""Calibration data in any documented form, as calls of the model: ``model(*args, **kwargs)``, one per batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import CalibrationError

_KINDS = "a tensor of token ids, a dict of tensors, or a list or tuple of dicts"


@attrs.frozen(eq=False)
class Call:
    """The arguments of one forward. Nothing is shared between calls."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def run(self, model: nn.Module) -> Any:
        """Call the model, its tensors moved to the model's device."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_moved(a, device) for a in self.args)
        return model(*args, **{k: _moved(v, device) for k, v in self.kwargs.items()})


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def calls(data: Iterable[Any] | None, wanted_by: str = "activations with static scales") -> list[Call]:
    """Every batch of ``data`` as a call; a batch that is a list of dicts is one call for each.

    Args:
        data: A DataLoader or any iterable of tensors, dicts (BatchEncoding too), lists of dicts; or one tensor or dict. Batches may differ
            in length; token ids are ``[batch, tokens]`` or ``[tokens]``.
        wanted_by: What needs the data, for the message.

    Raises:
        CalibrationError: There is no data, it is empty, or a batch is of another kind.
    """
    if data is None:
        raise CalibrationError(
            f"calibration data are needed by {wanted_by}, and none were given: pass a DataLoader, a list of token tensors, or "
            "--calib on the command line; or use a scheme whose activations are dynamic or float, and no algorithm that looks at them"
        )
    batches: Iterable[Any] = [data] if isinstance(data, Tensor | Mapping) else data
    found = [call for number, batch in enumerate(batches) for call in _calls_of(batch, number)]
    if not found:
        raise CalibrationError("the calibration data are empty: what is found from them would be made up. Give at least one sequence")
    return found


def _calls_of(batch: Any, number: int) -> Iterator[Call]:
    if isinstance(batch, Tensor):
        if batch.numel() == 0:
            raise CalibrationError(f"calibration batch {number} is an empty tensor of shape {list(batch.shape)}: give at least one token")
        # Token ids without a batch axis get one; anything of floats (images) is passed as it is.
        yield Call((batch[None] if batch.ndim == 1 and not batch.is_floating_point() else batch,))
    elif isinstance(batch, Mapping):
        yield Call(kwargs=dict(batch))
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and batch and all(isinstance(b, Mapping) for b in batch):
        for item in batch:
            yield Call(kwargs=dict(item))
    elif isinstance(batch, Sequence) and len(batch) == 1 and isinstance(batch[0], Tensor):
        yield Call((batch[0],))  # a TensorDataset's batch
    else:
        raise CalibrationError(f"calibration batch {number} is a {type(batch).__name__}: a batch is {_KINDS}")
