"""`QuantizerModule` fake-quantizes one tensor of a model. The scales are its buffers."""

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
    """A module that fake-quantizes a tensor.

    The module stores static scales in buffers. It computes dynamic scales each time it is called.

    Args:
        spec: The quantization of the tensor.
        activation: Whether the tensor is an activation. This decides which axis of the tensor is the
            channels.
        quantizer: A quantizer for ``spec`` that fits the layout of the layer type. If it is None, the module
            creates a quantizer from ``spec`` and ``activation``.

    Attributes:
        quantizer: The `quark.numbers.TensorQuantizer` that does the arithmetic.
        scale, zero_point, outer_scale, table: Buffers. All of them are None before `set_qparams` is called. A
            buffer that the number format does not use stays None.
        codes: A buffer with the codes of a weight, or None if codes are computed from the weight's values.
            The buffer is set if the weight keeps the codes of its checkpoint, or if a rounding algorithm has
            set codes that the run has not written yet.
        is_deferred: Whether the scales belong to a weight that is still float. The codes of such a weight are
            its values rounded to nearest. The layer must not run before the weight is rounded.
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
        """Whether the quantizer has static scales, which calibration must compute."""
        return not (self.quantizer.is_dynamic or self.quantizer.is_float)

    @property
    def qparams(self) -> QParams | None:
        """The scales, or None before `set_qparams` is called."""
        return None if self.scale is None else QParams(self.scale, self.zero_point, self.outer_scale, self.table)

    def set_qparams(self, qparams: QParams, *, is_deferred: bool = False, codes: Tensor | None = None) -> None:
        """Replace the scales by ``qparams``, and set the attributes ``is_deferred`` and ``codes``."""
        self.is_deferred = is_deferred
        for name in _BUFFERS:
            setattr(self, name, None)
        self.codes = codes
        for name, value in qparams.items():
            setattr(self, name, value.detach())

    def codes_of(self, weight: Tensor) -> Tensor:
        """Return the codes of a weight. The scales must be set.

        The values of ``weight`` must be rounded, except if ``is_deferred`` is true. Then they are float.
        """
        assert self.qparams is not None
        if self.codes is not None:
            return self.codes
        return (self.quantizer.quantize if self.is_deferred else self.quantizer.codes_of)(weight, self.qparams)

    def rows_of(self, weight: Tensor, rows: slice | None) -> Tensor:
        """Return the rounded values of some rows of a weight. If ``rows`` is None, return all rows.

        If ``is_deferred`` is true, the values of ``weight`` are float, and this method rounds them. ``rows``
        must not separate rows that share a scale.
        """
        part = weight if rows is None else weight[rows]
        if not self.is_deferred or self.qparams is None:
            return part
        of_rows = partial(qparams_of_rows, self.quantizer.granularity, tuple(weight.shape), self.qparams)
        return self.quantizer.fake_quantize(part, self.qparams if rows is None else of_rows(rows))

    def forward(self, x: Tensor) -> Tensor:
        """Return the fake-quantized values of ``x``, in the dtype and the shape of ``x``.

        The gradient with respect to ``x`` equals the gradient with respect to the result (straight-through
        estimator).

        Raises:
            CalibrationError: The quantizer needs static scales, but they are not set.
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
        """Return ``x``, fake-quantized with the operator ``quark::fake_quantize``. torch can trace it.

        Raises:
            UnsupportedError: The spec alone does not determine the quantizer.
        """
        if self._as_text is None:
            raise UnsupportedError(
                f"torch.compile and torch.export do not support the granularity {self.quantizer.granularity} in a rearranged view of the "
                "tensor. Use one scale per tensor (qscheme per_tensor) for this activation"
            )
        scales = (self.scale, self.zero_point, self.outer_scale) if self.is_static else (None, None, None)
        return _operator(x, *scales, *self._as_text)

    def extra_repr(self) -> str:
        """Return a text for ``repr`` with the format, ``static`` or ``dynamic``, and the granularity."""
        return f"{_formats(self.quantizer.spec)}, {'dynamic' if self.quantizer.is_dynamic else 'static'}, {self.quantizer.granularity}"


class _StraightThrough(torch.autograd.Function):
    """An autograd function for a straight-through estimator.

    The result is ``values``, and the gradient with respect to ``x`` is the gradient with respect to the
    result.
    """

    @staticmethod
    def forward(_: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class RoundedParameter(QuantizerModule):
    """A quantizer of a parameter that is already rounded. A call returns its argument unchanged.

    The graph of a traced model contains this call. Exporters use it to find the scales of the parameter.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` unchanged."""
        return x


def _formats(spec: TensorSpec) -> str:
    """Return the names of the number formats of the levels of a spec, with arrows between them."""
    return " → ".join(s.dtype.name for s in levels(spec))


# Graphs of ``torch.export`` and ``torch.compile`` call no Python code of modules, and torch cannot trace a
# quantizer. So each quantizer is one operator in the graph, with the spec as a text argument. If
# ``quark.models.layers`` is imported, a saved program computes the same as the model, bit for bit.
def _fake_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, outer_scale: Tensor | None, spec: str, activation: bool
) -> Tensor:
    """Return the fake-quantized values of ``x``, in the dtype and the shape of ``x``. ``spec`` is a JSON
    text."""
    qparams = None if scale is None else QParams(scale, zero_point, outer_scale)
    return _quantizer_of(spec, activation).fake_quantize(x, qparams)


# The schema is written out because torch cannot infer it: annotations in this module are not evaluated.
_SCHEMA = "(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? outer_scale, str spec, bool activation) -> Tensor"
_operator = torch.library.custom_op("quark::fake_quantize", _fake_quantize, mutates_args=(), schema=_SCHEMA)


@_operator.register_fake
def _shape_only(x: Tensor, *_: object) -> Tensor:
    """Return an empty tensor with the shape and dtype of the operator's result."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_operator.register_autograd(lambda _, gradient: (gradient, None, None, None, None, None))


@lru_cache(maxsize=1024)
def _quantizer_of(spec: str, activation: bool) -> TensorQuantizer:
    """Return the quantizer of a spec that is given as JSON."""
    specs = [QTensorConfig.from_dict(level) for level in json.loads(spec)]
    return quantizer_for(specs[0] if len(specs) == 1 else specs, activation=activation)


def _as_text(quantizer: TensorQuantizer, activation: bool) -> tuple[str, bool] | None:
    """Return the last two arguments of the operator ``quark::fake_quantize`` for ``quantizer``.

    The first of them is the spec as JSON, and the second is whether the tensor is an activation. The result
    is None if these arguments do not determine the quantizer.
    """
    text = _text(tuple(levels(quantizer.spec)))
    for is_activation in dict.fromkeys((activation, False)):
        same = _quantizer_of(text, is_activation)
        if same.granularity == quantizer.granularity and type(same) is type(quantizer):
            return text, is_activation
    return None


@lru_cache(maxsize=1024)
def _text(spec: tuple[QTensorConfig, ...]) -> str:
    """Return a spec as JSON."""
    return json.dumps([level.to_dict() for level in spec])
