"""Conversion of calibration data to calls of the model. A call has positional and keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quark.calibration.held_out import held_out
from quark.calibration.padding import MASK, main_tensor, without_padding
from quark.errors import CalibrationError, UnsupportedError
from quark.models.hf.internals import input_embeddings

MOST_BATCHES = 16_384
"""The largest number of batches that is read from data without a length."""

_KINDS = "a tensor of token ids, a dict of tensors, a list or tuple of tensors (the positional arguments), or a list of dicts"
_IDS = "input_ids"
_PIXELS = "pixel_values"
_DECODER_IDS = "decoder_input_ids"
_OFFSET = 2  # additional rows of position tables beyond `max_position_embeddings`, as in OPT and BART
_DTYPES = (torch.int64, torch.int32)


@attrs.frozen(eq=False)
class Call:
    """The arguments of one forward pass.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        held_out: Mask of the held-out tokens, bool, ``[batch, tokens]`` or ``[batch, 1]`` (see
            `quark.calibration.held_out`); None if no token is held out.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    held_out: Tensor | None = None

    def run(self, model: nn.Module) -> Any:
        """Move the tensors of the arguments to the model's device, call the model, and return its result."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_moved(a, device) for a in self.args)
        return model(*args, **{k: _moved(v, device) for k, v in self.kwargs.items()})


def calls(data: Iterable[Any] | None, wanted_by: str = "activations with static scales", model: nn.Module | None = None) -> list[Call]:
    """Return the batches of ``data`` as calls.

    A batch usually gives one call. A batch that is a list of dicts gives one call per dict. A batch with
    padding gives one call per sequence; the padding is removed (`quark.calibration.padding`).

    Args:
        data: A DataLoader or any other iterable of batches, or a single tensor or dict. A batch is a tensor,
            a dict of tensors (such as a BatchEncoding), a list or tuple of tensors (the positional
            arguments), or a list of dicts. Batches may differ in length. Token ids have the shape
            ``[batch, tokens]`` or ``[tokens]``.
        wanted_by: What needs the data. The error for missing data names it.
        model: The model that will be called. Its tensors may be on the meta device. If it is None, the inputs
            are not checked.

    Returns:
        The calls, with some tokens marked as held out.

    Raises:
        CalibrationError: The data is missing, empty, endless or unreadable, or the model cannot be called
            with one of the batches.
    """
    if data is None:
        raise CalibrationError(
            f"calibration data is needed by {wanted_by}, but none was given. Pass a DataLoader or a list of token tensors, or use the "
            "option --calib on the command line. Without data, use dynamic or float activations, and no algorithm that needs layer inputs"
        )
    inputs = ModelInputs.of(model)
    parsed, number = list[Call](), -1
    for number, batch in enumerate(_read(data)):
        name = f"calibration batch {number}"
        for args, kwargs in tree_map_only(Tensor, _tracked, [*_arguments(batch, number)]):
            for part in without_padding(*inputs.checked(args, kwargs, name), name, has_decoder=inputs.has_decoder):
                parsed.append(Call(*inputs.with_decoder_ids(*part)))
                inputs.check_vocabulary(parsed[-1], name)
    if number < 0:
        raise CalibrationError("the calibration data is empty: no scale or statistic can be computed. Give at least one sequence")
    if not parsed:
        raise CalibrationError("the calibration data has only padding: every attention_mask is 0 everywhere. Give at least one token")
    return _with_held_out(parsed)


def _tracked(tensor: Tensor) -> Tensor:
    """Return a tensor that has a version counter, because statistics need one.

    A tensor that was created in inference mode has no version counter, so a copy is returned. Any other
    tensor is returned itself.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(mode=False):
        return tensor.clone()


def _read(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of ``data``, in order.

    Raises:
        CalibrationError: The data seems to be endless, or it cannot be read.
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
                    f"the calibration data has no length and more than {MOST_BATCHES} batches, so it may be endless. Limit the number of "
                    "batches, for example with itertools.islice(data, 128), or give a list"
                )
            yield batch
            number += 1
    except CalibrationError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"calibration batch {number} cannot be read: the data raised {type(error).__name__}: {error}. The model is unchanged"
        ) from error


def _has_length(data: Any) -> bool:
    try:
        return isinstance(data, Sized) and len(data) >= 0
    except TypeError:  # a DataLoader of data without a length
        return False


def _arguments(batch: Any, number: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of each call that a batch gives, as a pair of positional and keyword arguments."""
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
        raise CalibrationError(f"calibration batch {number} is a {type(batch).__name__}, but a batch must be {_KINDS}")


def ids_of(call: Call) -> Tensor | None:
    """Return the token ids ``[batch, tokens]`` of a call.

    The only other argument that the call may have is a mask with two axes. Return None for any other call.
    """
    tensors: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    mask, ids = tensors.pop(MASK, None), next(iter(tensors.values()), None)
    is_alone = len(tensors) == 1 and (bool(call.args) or _IDS in tensors)
    if not is_alone or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return None
    return ids if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2) else None


def _with_held_out(parsed: Sequence[Call]) -> list[Call]:
    """Choose the held-out tokens. Return the calls, each with a mask of its held-out tokens."""
    rows = {number: main for number, call in enumerate(parsed) if (main := main_tensor(call.args, call.kwargs)) is not None}
    masks = dict(zip(rows, held_out(list(rows.values())), strict=True))
    return [attrs.evolve(call, held_out=masks[n]) if n in masks and bool(masks[n].any()) else call for n, call in enumerate(parsed)]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def refuse_text(model: Any, instead: str) -> None:
    """Check that a model can run on text alone.

    Args:
        model: A transformers model, or its class.
        instead: What the user can do. The error message ends with it.

    Raises:
        UnsupportedError: The model needs images or sounds.
    """
    if (name := _other_input(model)) is not None:
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise UnsupportedError(f"a {kind} needs the input '{name}', so texts alone are not enough: {instead}")


def _other_input(model: Any) -> str | None:
    """Return the name of the input that a model needs in addition to token ids, or instead of them.

    Return None if token ids are enough. The argument ``model`` is a model of transformers, or the class of
    one.
    """
    main = getattr(model, "main_input_name", None)
    if main == _IDS:  # a model with two towers runs both
        return _PIXELS if hasattr(model, "get_text_features") and _PIXELS in _names_of(model) else None
    return main if isinstance(main, str) and hasattr(model, "config_class") else None


@attrs.frozen
class ModelInputs:
    """The known facts about a model's inputs.

    Attributes:
        vocabulary: The size of the vocabulary. None if it is unknown or if the model has no token ids as
            input.
        names: Names of the positional arguments, in order. Empty if the names are not known.
        has_decoder: Whether the model is an encoder-decoder model that creates the decoder's input from
            ``labels``.
        positions: The maximum sequence length of a model with a table of positions. None for any other model.
        takes: Name of the main input and name of the model class, if the model needs more than token ids.
            None for any other model.
        shifted: A function that creates the decoder's token ids from the encoder's token ids. None for a
            model without an encoder.
    """

    vocabulary: int | None = None
    names: tuple[str, ...] = ()
    has_decoder: bool = False
    positions: int | None = None
    takes: tuple[str, str] | None = None
    shifted: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module | None) -> ModelInputs:
        """Return the facts that ``model`` declares about its inputs. Models of transformers declare their
        main input.
        """
        if model is None:
            return cls()
        main, names, generates = _other_input(model), _names_of(model), getattr(model, "can_generate", None)
        has_decoder = generates is not None and bool(generates()) and bool(getattr(model.config, "is_encoder_decoder", False))
        if main is not None or getattr(model, "main_input_name", None) != _IDS:
            return cls(names=names, has_decoder=has_decoder, takes=None if main is None else (main, type(model).__name__))
        shifted: Any = getattr(model, "prepare_decoder_input_ids_from_labels", lambda ids: ids) if _DECODER_IDS in names else None
        return cls(_vocabulary_of(model), names, has_decoder, _positions_of(model), shifted=shifted)

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments of one call, and return them in a common form.

        In this form, token ids have a batch axis, and only the first argument is positional. If the names of
        the model's arguments are unknown, all positional arguments remain positional.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            batch: Name of the batch in error messages.

        Raises:
            CalibrationError: The model cannot be called with these arguments.
        """
        for name, value in (*enumerate(args), *kwargs.items()):
            _check_tensor(value, batch if len(args) == 1 and not kwargs else f"{name!r} of {batch}")
        if len(args) > 1 and self.names:
            if len(args) > len(self.names):
                raise CalibrationError(
                    f"{batch} has {len(args)} tensors, but the model has {len(self.names)} arguments. Give fewer tensors in a batch"
                )
            args, kwargs = args[:1], dict(zip(self.names[1:], args[1:], strict=False)) | dict(kwargs)
        ids = args[0] if args else kwargs.get(_IDS)
        if self.takes is not None and isinstance(ids, Tensor) and not ids.is_floating_point() and self.takes[0] not in kwargs:
            raise CalibrationError(
                f"{batch} has token ids, but a {self.takes[1]} needs the input '{self.takes[0]}'. Give batches of '{self.takes[0]}' to "
                "quark.runs.ModelQuantizer, or give rows with images or sounds to the option --calib"
            )
        if self.vocabulary is not None:
            self._check_ids(ids, kwargs, batch)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            return args, dict(kwargs)
        with_batch = {k: v[None] if k in (_IDS, MASK) and isinstance(v, Tensor) and v.ndim == 1 else v for k, v in kwargs.items()}
        first = tuple(a[None] if a is ids and ids.ndim == 1 else a for a in args)
        _check_mask(first[0] if first else with_batch[_IDS], with_batch.get(MASK), batch)
        return first, with_batch

    def with_decoder_ids(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call. If the call has no token ids for the model's decoder, add them.

        The added token ids are created from the token ids of the encoder. The call must not have padding.
        """
        ids = args[0] if args else kwargs.get(_IDS)
        has_own = any("decoder" in name or name in ("labels", "encoder_outputs") for name in kwargs)
        if self.shifted is None or has_own or not isinstance(ids, Tensor):
            return args, dict(kwargs)
        return args, {**kwargs, _DECODER_IDS: self.shifted(ids)}

    def _check_ids(self, ids: Any, kwargs: Mapping[str, Any], batch: str) -> None:
        if ids is None and "inputs_embeds" in kwargs:
            return
        if ids is None:
            raise CalibrationError(
                f"{batch} has no '{_IDS}'. Add it, because this model needs it; the batch has {', '.join(map(repr, kwargs)) or 'nothing'}"
            )
        if not isinstance(ids, Tensor):
            raise CalibrationError(
                f"'{_IDS}' of {batch} is a {type(ids).__name__}, not a tensor. Call the tokenizer with return_tensors='pt'"
            )
        if ids.dtype not in _DTYPES:
            raise CalibrationError(f"the token ids of {batch} have the dtype {ids.dtype}. Convert them to torch.int64 with .long()")
        if ids.ndim not in (1, 2):
            raise CalibrationError(f"the token ids of {batch} have the shape {list(ids.shape)}. Give them the shape [batch, tokens]")

    def check_vocabulary(self, call: Call, batch: str) -> None:
        """Check that each token id of a call is in the vocabulary, and that the model has enough positions.

        Args:
            call: The call, without padding.
            batch: Name of the batch in error messages.

        Raises:
            CalibrationError: A token id is not in the vocabulary, or a sequence has more tokens than the
                model has positions.
        """
        ids = call.args[0] if call.args else call.kwargs.get(_IDS)
        if self.vocabulary is None or ids is None:
            return
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocabulary:
            raise CalibrationError(
                f"{batch} has the token id {lowest if lowest < 0 else highest}, but the model's token ids are 0 to {self.vocabulary - 1}. "
                "Use the tokenizer of this model"
            )
        if self.positions is not None and ids.shape[-1] > self.positions:
            raise CalibrationError(
                f"{batch} has {ids.shape[-1]} tokens, but the model has only {self.positions} positions. Give at most {self.positions} "
                f"tokens (--seq-len {self.positions})"
            )


def _names_of(model: Any) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # for a compiled function
        return ()
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _vocabulary_of(model: Any) -> int | None:
    weight = getattr(input_embeddings(model), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _positions_of(model: Any) -> int | None:
    """Return the number of positions in the model's table of position embeddings (as in GPT-2).

    Return None for a model without such a table, for example with rotary embeddings.
    """
    config: Any = getattr(model, "config", None)
    most = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and most <= m.num_embeddings <= most + _OFFSET]
    # RoBERTa numbers positions from the number after the padding index.
    lengths = [m.num_embeddings - (0 if m.padding_idx is None else m.padding_idx + 1) for m in tables if m is not input_embeddings(model)]
    return min([most, *lengths]) if lengths else None


def _check_tensor(value: Any, what: str) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise CalibrationError(
            f"{what} is on the meta device, so it has no values. Give tensors that are on the CPU or on the model's device"
        )
    if isinstance(value, Tensor) and value.numel() == 0:
        raise CalibrationError(f"{what} is an empty tensor of shape {list(value.shape)}. Give at least one token")


def _check_mask(ids: Tensor, mask: Any, batch: str) -> None:
    """Check that a mask with one or two axes has the shape of the token ids.

    Masks with more axes are not checked here: the model checks them.
    """
    if isinstance(mask, Tensor) and mask.ndim <= 2 and mask.shape != ids.shape:
        raise CalibrationError(
            f"'{MASK}' of {batch} has the shape {list(mask.shape)}, but the token ids have the shape {list(ids.shape)}. Give the mask the "
            "shape of the token ids"
        )
