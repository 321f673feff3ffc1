"""Checks of a model's arguments before any forward; errors name the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import CalibrationError

__all__ = ["ModelInputs"]

_IDS = "input_ids"
_MASK = "attention_mask"
_DTYPES = (torch.int64, torch.int32)


@attrs.frozen
class ModelInputs:
    """The known facts about a model's inputs.

    Attributes:
        vocabulary: The number of token ids; None where the model takes no token ids or the number is not
            known.
        names: Names of the positional arguments, in order; empty where they are not known.
    """

    vocabulary: int | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module | None) -> ModelInputs:
        """Return the inputs that a model declares; transformers models declare their main input."""
        if model is None or getattr(model, "main_input_name", None) != _IDS:
            return cls()
        parameters = inspect.signature(model.forward).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        return cls(_vocabulary_of(model), names if names[:1] == (_IDS,) else ())

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one call: token ids with a batch axis first, the others by name.

        Where names are not known, all go by position.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            batch: Name of the batch in error messages.

        Raises:
            CalibrationError: The model cannot be called with them.
        """
        for name, value in (*enumerate(args), *kwargs.items()):
            _check_tensor(value, batch if len(args) == 1 and not kwargs else f"{name!r} of {batch}")
        if len(args) > 1 and self.names:
            if len(args) > len(self.names):
                raise CalibrationError(f"{batch} has {len(args)} tensors, and the model takes {len(self.names)} positional arguments")
            args, kwargs = args[:1], dict(zip(self.names[1:], args[1:], strict=False)) | dict(kwargs)
        ids = args[0] if args else kwargs.get(_IDS)
        if self.vocabulary is not None:
            self._check_ids(ids, kwargs, batch)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            return args, dict(kwargs)
        with_batch = {k: v[None] if k in (_IDS, _MASK) and isinstance(v, Tensor) and v.ndim == 1 else v for k, v in kwargs.items()}
        first = tuple(a[None] if a is ids and ids.ndim == 1 else a for a in args)
        _check_mask(first[0] if first else with_batch[_IDS], with_batch.get(_MASK), batch)
        return first, with_batch

    def _check_ids(self, ids: Any, kwargs: Mapping[str, Any], batch: str) -> None:
        if ids is None and "inputs_embeds" in kwargs:
            return
        if ids is None:
            raise CalibrationError(f"{batch} has no '{_IDS}', which this model needs; it has {', '.join(map(repr, kwargs))}")
        if not isinstance(ids, Tensor):
            raise CalibrationError(f"'{_IDS}' of {batch} is a {type(ids).__name__}: give a tensor (a tokenizer's return_tensors='pt')")
        if ids.dtype not in _DTYPES:
            raise CalibrationError(f"the token ids of {batch} have the dtype {ids.dtype}: give torch.int64, as with .long()")
        if ids.ndim not in (1, 2):
            raise CalibrationError(f"the token ids of {batch} have the shape {list(ids.shape)}: give [batch, tokens]")
        assert self.vocabulary is not None
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocabulary:
            raise CalibrationError(
                f"{batch} has the token id {lowest if lowest < 0 else highest}, and the model's vocabulary is 0 to {self.vocabulary - 1}: "
                "use the tokenizer of this model"
            )


def _vocabulary_of(model: Any) -> int | None:
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(embedding, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _check_tensor(value: Any, what: str) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise CalibrationError(f"{what} is on the meta device, where tensors have no values: give data on the CPU or the model's device")
    if isinstance(value, Tensor) and value.numel() == 0:
        raise CalibrationError(f"{what} is an empty tensor of shape {list(value.shape)}: give at least one token")


def _check_mask(ids: Tensor, mask: Any, batch: str) -> None:
    """Check that a mask of up to two axes has the shape of the token ids.

    Masks of more axes are left to the model.
    """
    if isinstance(mask, Tensor) and mask.ndim <= 2 and mask.shape != ids.shape:
        raise CalibrationError(
            f"'{_MASK}' of {batch} has the shape {list(mask.shape)}, and the token ids have {list(ids.shape)}: give one of their shape"
        )
