"""Calibration data in any documented form, as calls of the model: ``model(*args, **kwargs)``, one per batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import CalibrationError
from quark.pipeline.held_out import Sequences, held_out

_KINDS = "a tensor of token ids, a dict of tensors, or a list or tuple of dicts"


@attrs.frozen(eq=False)
class Call:
    """The arguments of one forward. Nothing is shared between calls.

    Attributes:
        args: Positional ones.
        kwargs: Those with names.
        held_out: Which of its tokens are, bool, ``[batch, tokens]`` or ``[batch, 1]`` (see `quark.pipeline.held_out`); None for none.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    held_out: Tensor | None = None

    def run(self, model: nn.Module) -> Any:
        """Call the model, its tensors moved to the model's device."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_moved(a, device) for a in self.args)
        return model(*args, **{k: _moved(v, device) for k, v in self.kwargs.items()})


def _sequences(call: Call) -> Sequences | None:
    """What a call is about: its token ids, or the first tensor that it has."""
    named = [call.kwargs[name] for name in ("input_ids", "inputs_embeds") if name in call.kwargs]
    rows = next((v for v in (*call.args, *named, *call.kwargs.values()) if isinstance(v, Tensor) and v.ndim > 0), None)
    mask = call.kwargs.get("attention_mask")
    return None if rows is None else Sequences(rows, mask if isinstance(mask, Tensor) else None)


def _divided(found: Sequence[Call]) -> list[Call]:
    """The same calls, with the tokens that are held out."""
    sequences = [_sequences(call) for call in found]
    masks = iter(held_out([s for s in sequences if s is not None]))
    held = [None if s is None else next(masks) for s in sequences]
    return [call if mask is None or not mask.any() else attrs.evolve(call, held_out=mask) for call, mask in zip(found, held, strict=True)]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def calls(data: Iterable[Any] | None, wanted_by: str = "activations with static scales") -> list[Call]:
    """Every batch of ``data`` as a call; a batch that is a list of dicts is one call for each.

    Args:
        data: A DataLoader or any iterable of tensors, dicts (BatchEncoding too), lists of dicts; or one tensor or dict. Batches may differ
            in length; token ids are ``[batch, tokens]`` or ``[tokens]``.
        wanted_by: What needs the data, for the message.

    Returns:
        The calls, of whose tokens some are held out.

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
    return _divided(found)


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
