"""QuantizerModule: one tensor's quantization inside a model, with its scales as buffers."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.layer import TensorSpec, levels
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError, UnsupportedError
from quark.numbers import QParams, TensorQuantizer, quantizer_for
from quark.numbers.on_grid import qparams_of_rows

_BUFFERS = ("scale", "zero_point", "outer_scale", "table", "codes")


class QuantizerModule(nn.Module):
    """Fake-quantizes a tensor.

    Static scales are stored, and dynamic scales are computed at each call.

    Args:
        spec: The tensor's quantization.
        activation: Whether the tensor is an activation, which decides the channel axis.
        quantizer: A quantizer of that spec for the layout of the layer type; None builds one from the spec
            alone.

    Attributes:
        quantizer: The `quark.numbers.TensorQuantizer` that does the arithmetic.
        scale, zero_point, outer_scale, table: Buffers; None before `set_qparams`, or if the format has none.
        codes: Buffer: codes of a weight that stays as stored in its checkpoint, or codes that its rounding
            has set, until the run has written them. None if codes are computed from the values.
        is_deferred: Whether the scales belong to a weight that is still float: its codes are its values
            rounded to nearest. No forward may run before the weight is rounded.
    """

    is_deferred: bool

    scale: Tensor | None
    zero_point: Tensor | None
    outer_scale: Tensor | None
    table: Tensor | None
    codes: Tensor | None

    def __init__(self, spec: TensorSpec, *, activation: bool, quantizer: TensorQuantizer | None = None) -> None:
        super().__init__()
        self.is_deferred = False
        self.quantizer = quantizer_for(spec, activation=activation) if quantizer is None else quantizer
        self._as_text = _as_text(self.quantizer, activation)
        for name in _BUFFERS:
            self.register_buffer(name, None)

    @property
    def is_static(self) -> bool:
        """Whether the quantizer needs scales that calibration has found."""
        return not (self.quantizer.is_dynamic or self.quantizer.is_float)

    @property
    def qparams(self) -> QParams | None:
        """The scales; None before `set_qparams`."""
        return None if self.scale is None else QParams(self.scale, self.zero_point, self.outer_scale, self.table)

    def set_qparams(self, qparams: QParams, *, is_deferred: bool = False, codes: Tensor | None = None) -> None:
        """Set the scales, which replace earlier ones, and the attributes ``is_deferred`` and ``codes``."""
        self.is_deferred = is_deferred
        for name in _BUFFERS:
            setattr(self, name, None)
        self.codes = codes
        for name, value in qparams.items():
            setattr(self, name, value.detach())

    def codes_of(self, weight: Tensor) -> Tensor:
        """Return the codes of a weight, rounded or (if ``is_deferred``) float. The scales must be set."""
        assert self.qparams is not None
        if self.codes is not None:
            return self.codes
        return (self.quantizer.quantize if self.is_deferred else self.quantizer.codes_of)(weight, self.qparams)

    def rows_of(self, weight: Tensor, rows: slice | None) -> Tensor:
        """Return rows of a weight, or all of it, rounded; if ``is_deferred``, they are rounded here.

        ``rows`` must hold all rows that share scales.
        """
        part = weight if rows is None else weight[rows]
        if not self.is_deferred or self.qparams is None:
            return part
        of_rows = partial(qparams_of_rows, self.quantizer.granularity, tuple(weight.shape), self.qparams)
        return self.quantizer.fake_quantize(part, self.qparams if rows is None else of_rows(rows))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` fake-quantized, in its dtype and shape.

        Raises CalibrationError if a static scale is not set. Gradients pass straight through: the gradient of
        ``x`` is the gradient of the result.
        """
        if self.is_static and self.scale is None:
            raise CalibrationError(
                f"a static {_formats(self.quantizer.spec)} quantizer has no scales yet: quantize the model with calibration data"
            )
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return self._as_operator(x)
        qparams = self.qparams if self.is_static else None
        with torch.no_grad():
            values = self.quantizer.fake_quantize(x, qparams)
        return _StraightThrough.apply(x, values) if x.requires_grad and torch.is_grad_enabled() else values

    def _as_operator(self, x: Tensor) -> Tensor:
        """Return ``x`` fake-quantized by the operator ``quark::fake_quantize``, which torch can trace.

        Raises:
            UnsupportedError: The spec alone does not determine the quantizer.
        """
        if self._as_text is None:
            raise UnsupportedError(
                f"torch.compile and torch.export do not support scales of {self.quantizer.granularity} in a view of the tensor: use one "
                "scale for each tensor"
            )
        scales = (self.scale, self.zero_point, self.outer_scale) if self.is_static else (None, None, None)
        return _operator(x, *scales, *self._as_text)

    def extra_repr(self) -> str:
        """Return format, static or dynamic, and granularity, for ``repr``."""
        return f"{_formats(self.quantizer.spec)}, {'dynamic' if self.quantizer.is_dynamic else 'static'}, {self.quantizer.granularity}"


class _StraightThrough(torch.autograd.Function):
    """Returns its second argument, with the gradient of its first: the straight-through estimator."""

    @staticmethod
    def forward(_: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class RoundedParameter(QuantizerModule):
    """The quantizer of a parameter whose values are already on its grid: calls do nothing.

    Graphs call it, so that exporters find the scales here.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


def _formats(spec: TensorSpec) -> str:
    return " → ".join(s.dtype.name for s in levels(spec))


# Graphs of ``torch.export`` and ``torch.compile`` call no Python code of a module, and torch cannot trace a
# quantizer. So a quantizer is one operator in them, with its spec as text. A saved program computes the same
# as the model, bit for bit, wherever ``quark.models.layers`` is imported.
def _fake_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, outer_scale: Tensor | None, spec: str, activation: bool
) -> Tensor:
    """Return ``x`` fake-quantized, in its dtype and shape."""
    qparams = None if scale is None else QParams(scale, zero_point, outer_scale)
    return _quantizer_of(spec, activation).fake_quantize(x, qparams)


# Written out, because torch cannot read it from annotations that are not evaluated.
_SCHEMA = "(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? outer_scale, str spec, bool activation) -> Tensor"
_operator = torch.library.custom_op("quark::fake_quantize", _fake_quantize, mutates_args=(), schema=_SCHEMA)


@_operator.register_fake
def _shape_only(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_operator.register_autograd(lambda _, gradient: (gradient, None, None, None, None, None))


@lru_cache(maxsize=1024)
def _quantizer_of(spec: str, activation: bool) -> TensorQuantizer:
    specs = [QTensorConfig.from_dict(level) for level in json.loads(spec)]
    return quantizer_for(specs[0] if len(specs) == 1 else specs, activation=activation)


def _as_text(quantizer: TensorQuantizer, activation: bool) -> tuple[str, bool] | None:
    """Return the last arguments of the operator, or None if they do not determine the quantizer."""
    text = _text(tuple(levels(quantizer.spec)))
    same = _quantizer_of(text, activation)
    return (text, activation) if same.granularity == quantizer.granularity and type(same) is type(quantizer) else None


@lru_cache(maxsize=1024)
def _text(spec: tuple[QTensorConfig, ...]) -> str:
    return json.dumps([level.to_dict() for level in spec])
