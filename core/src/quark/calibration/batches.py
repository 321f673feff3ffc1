"""Calibration data in any documented form, as calls of the model: ``model(*args, **kwargs)``, one per batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.calibration.held_out import Sequences, held_out
from quark.calibration.model_inputs import ModelInputs
from quark.errors import CalibrationError

__all__ = ["MOST_BATCHES", "Call", "calls"]

MOST_BATCHES = 16_384
"""How many batches are read of data that do not say how many they have."""

_KINDS = "a tensor of token ids, a dict of tensors, a list or tuple of tensors (the positional arguments), or one of dicts"


@attrs.frozen(eq=False)
class Call:
    """The arguments of one forward. Nothing is shared between calls.

    Attributes:
        args: Positional ones.
        kwargs: Those with names.
        held_out: Which of its tokens are, bool, ``[batch, tokens]`` or ``[batch, 1]`` (see `quark.calibration.held_out`); None for none.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    held_out: Tensor | None = None

    def run(self, model: nn.Module) -> Any:
        """Call the model, its tensors moved to the model's device."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_moved(a, device) for a in self.args)
        return model(*args, **{k: _moved(v, device) for k, v in self.kwargs.items()})


def calls(data: Iterable[Any] | None, wanted_by: str = "activations with static scales", model: nn.Module | None = None) -> list[Call]:
    """Every batch of ``data`` as a call; a batch that is a list of dicts is one call for each.

    Args:
        data: A DataLoader or any iterable of tensors, dicts (BatchEncoding too), lists or tuples of tensors (positional arguments), or
            lists of dicts; or one tensor or dict. Batches may differ in length; token ids are ``[batch, tokens]`` or ``[tokens]``.
        wanted_by: What needs the data, for the message.
        model: What is going to be called; meta tensors will do. Without it, nothing is known of its inputs, and they are not checked.

    Returns:
        The calls, of whose tokens some are held out.

    Raises:
        CalibrationError: There is no data, it is empty or without end, it cannot be read, or a batch is none that the model can take.
    """
    if data is None:
        raise CalibrationError(
            f"calibration data are needed by {wanted_by}, and none were given: pass a DataLoader, a list of token tensors, or "
            "--calib on the command line; or use a scheme whose activations are dynamic or float, and no algorithm that looks at them"
        )
    inputs = ModelInputs.of(model)
    found = []
    for number, batch in enumerate(_read(data)):
        for args, kwargs in _arguments(batch, number):
            found.append(Call(*inputs.checked(args, kwargs, f"calibration batch {number}")))
    if not found:
        raise CalibrationError("the calibration data are empty: what is found from them would be made up. Give at least one sequence")
    return _divided(found)


def _read(data: Iterable[Any]) -> Iterator[Any]:
    """Batch after batch.

    Raises:
        CalibrationError: As `calls`.
    """
    if isinstance(data, Tensor | Mapping):
        yield data
        return
    number, end = 0, object()
    try:
        batches = iter(data)
        while (batch := next(batches, end)) is not end:
            if number == MOST_BATCHES and not _has_length(data):
                raise CalibrationError(
                    f"{MOST_BATCHES} calibration batches have been read, and there are more: data without an end cannot be used. Take as "
                    "many as you want, as with itertools.islice(data, 128), or give a list"
                )
            yield batch
            number += 1
    except CalibrationError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"calibration batch {number} cannot be read: the data raised {type(error).__name__}: {error}. Nothing has been changed"
        ) from error


def _has_length(data: Any) -> bool:
    try:
        return isinstance(data, Sized) and len(data) >= 0
    except TypeError:  # a DataLoader of data without a length
        return False


def _arguments(batch: Any, number: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Positional and named arguments of each call that a batch makes."""
    if isinstance(batch, Tensor):
        yield (batch,), {}
    elif isinstance(batch, Mapping):
        yield (), dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and batch and all(isinstance(b, Mapping) for b in batch):
        for item in batch:
            yield (), dict(item)
    elif isinstance(batch, Sequence) and batch and all(isinstance(b, Tensor) for b in batch):
        yield tuple(batch), {}
    else:
        raise CalibrationError(f"calibration batch {number} is a {type(batch).__name__}: a batch is {_KINDS}")


def _sequences(call: Call) -> Sequences | None:
    """What a call is about: its token ids, or the first tensor that it has."""
    named = [call.kwargs[name] for name in ("input_ids", "inputs_embeds") if name in call.kwargs]
    rows = next((v for v in (*call.args, *named, *call.kwargs.values()) if isinstance(v, Tensor) and v.ndim > 0), None)
    mask = call.kwargs.get("attention_mask")
    return None if rows is None else Sequences(rows, mask if isinstance(mask, Tensor) else None)


def _divided(found: Sequence[Call]) -> list[Call]:
    """The same calls, with the tokens that are held out."""
    sequences = [_sequences(call) for call in found]
    given = [s for s in sequences if s is not None]
    if given and not any(bool(s.tokens.any()) for s in given):
        raise CalibrationError("the calibration data are padding alone: every attention_mask is 0 everywhere. Give at least one token")
    masks = iter(held_out(given))
    held = [None if s is None else next(masks) for s in sequences]
    return [call if mask is None or not mask.any() else attrs.evolve(call, held_out=mask) for call, mask in zip(found, held, strict=True)]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
