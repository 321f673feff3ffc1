"""Checks of tensors that a scheme quantizes: weights and activations, in any format and with any levels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig, levels
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantizerModule
from quark.numbers import TensorQuantizer, quantizer_for
from quark.runs import ModelQuantizer
from quark_devkit.check import NotApplicableError, assume, check, require
from quark_devkit.subject import Subject

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH = 4096
_LEAST_ERROR = 0.07
_ERROR_OF_ONE_BIT = 4.5
_MOST_ERROR = 0.9


def config_of(subject: Subject) -> QLayerConfig:
    """Return the scheme's configuration of a layer."""
    layer: QLayerConfig = subject.load("config")()
    return layer


def _data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _weight_quantizer(subject: Subject) -> TensorQuantizer:
    weight = config_of(subject).weight
    if weight is None:
        raise NotApplicableError("it leaves weights float")
    return quantizer_for(weight, activation=False)


def _fitting(quantizer: TensorQuantizer, rows: int) -> tuple[int, int]:
    """Return the smallest power-of-two shape with at least 256 columns that the weight's spec accepts."""
    columns = 256
    while quantizer.shape_error((rows, columns)) is not None and columns < _WIDTH:
        rows, columns = max(rows, min(columns, 256)), 2 * columns
    if (error := quantizer.shape_error((rows, columns))) is not None:
        require(False, f"accepts no weight of up to [{rows}, {columns}]: {error}")
    return rows, columns


def _most_error(quantizer: TensorQuantizer) -> float:
    """Return the largest allowed relative error of normally distributed values, for the bits of the stored
    format."""
    return min(_MOST_ERROR, max(_LEAST_ERROR, _ERROR_OF_ONE_BIT * 2.0 ** -float(quantizer.stored_level.format.bits)))


@check("scheme")
def says_the_same_in_values_codes_and_bytes(subject: Subject) -> None:
    """Rounded weights equal the dequantized codes, before and after packing in either order, to the bit."""
    quantizer = _weight_quantizer(subject)
    shape = _fitting(quantizer, 16)
    for dtype in _DTYPES:
        values, qparams = quantizer.round_to_nearest(_data(*shape).to(dtype))
        codes = quantizer.codes_of(values, qparams)
        same = torch.equal(quantizer.dequantize(codes, qparams).to(dtype), values)
        require(same, f"has values in {dtype} that differ from decode(codes)")
        for order in ("order", "reorder"):
            read, scales = quantizer.unpack(quantizer.pack(codes, qparams, order=order), shape, order=order)
            same = torch.equal(quantizer.dequantize(read, scales).to(dtype), values)
            require(same, f"reads back different values than it wrote, in the order '{order}'")


@check("scheme")
def serves_hard_weights(subject: Subject) -> None:
    """Zeros stay zero, empty weights stay empty, tiny and one-sided values give finite values of similar
    size, and NaN and infinity stay visible.
    """
    quantizer = _weight_quantizer(subject)
    shape = _fitting(quantizer, 16)
    require(not bool(quantizer.fake_quantize(torch.zeros(shape)).any()), "rounds a weight of zeros to something else")
    require(tuple(quantizer.fake_quantize(torch.zeros(0, shape[1])).shape) == (0, shape[1]), "does not keep the shape of an empty weight")
    normal = _data(*shape)
    hard = {"tiny values": normal * 1e-30, "positive values": normal.abs(), "a constant": torch.full(shape, -0.3)}
    for name, x in hard.items():
        values = quantizer.fake_quantize(x)
        require(bool(values.isfinite().all()), f"rounds {name} to NaN or infinity")
        largest = float(values.abs().max())
        allowed = 3 * float(x.abs().max()) + 1e-6  # the smallest scale may enlarge tiny values a little
        require(largest <= allowed, f"rounds {name} to values up to {largest:.3g}")
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = _data(*shape)
        x[3, 7] = bad
        require(not bool(quantizer.fake_quantize(x).isfinite().all()), f"rounds a weight with {bad} to finite values")


@check("scheme")
def rounds_weights(subject: Subject) -> None:
    """Rounding changes a normally distributed weight. The relative error is above 0 and below 1."""
    error = _error_of_weights(_weight_quantizer(subject))
    require(error > 1e-6, "does not round at all")  # rounding error of a division and a product in float32
    require(error < 1, f"rounds a normal weight with a relative error of {error:.3g}: zeros would be no worse")


@check("scheme", level="advisory")
def errs_as_its_bits_allow(subject: Subject) -> None:
    """The relative error of a normally distributed weight is at most the error of a uniform grid with the
    same number of bits.
    """
    quantizer = _weight_quantizer(subject)
    error, most = _error_of_weights(quantizer), _most_error(quantizer)
    require(error <= most, f"rounds a normal weight with a relative error of {error:.3g}, but its bits allow at most {most:.3g} of error")


def _error_of_weights(quantizer: TensorQuantizer) -> float:
    x = _data(*_fitting(quantizer, 64))
    return float((quantizer.fake_quantize(x) - x).norm() / x.norm())


@check("scheme")
def serves_activations(subject: Subject) -> None:
    """Inputs of any rank, dtype and memory layout, also empty inputs, are quantized to close values with the
    same shape and dtype.
    """
    spec = config_of(subject).input_tensors
    assume(spec is not None, "it leaves activations float")
    width = max(256, *(level.group_size or 0 for level in levels(spec)))
    for dtype in _DTYPES:
        x = _data(2, 3, 4, width).to(dtype)
        module = _input_module(spec, x)
        whole = module(x)
        require(
            whole.shape == x.shape and whole.dtype is dtype, f"returns {whole.dtype} of shape {list(whole.shape)} for an input in {dtype}"
        )
        require(bool(whole.isfinite().all()), f"turns an input in {dtype} into NaN or infinity")
        error = float((whole - x).float().norm() / x.float().norm())
        most = _most_error(module.quantizer)
        require(error <= most, f"changes a normal input by {error:.3g}, but its bits allow at most {most:.3g} of error")
        for part in (x[0], x[0, 0], x[:, :, 0], x[:0]):
            require(module(part).shape == part.shape, f"does not keep the shape {list(part.shape)} of an input")
        same = torch.equal(module(x.transpose(0, 1)), whole.transpose(0, 1))
        require(same, "quantizes a transposed input differently from the input")


def _input_module(spec: object, x: Tensor) -> QuantizerModule:
    """Return an input quantizer. A static quantizer is calibrated on ``x``."""
    module = QuantizerModule(spec, activation=True)  # type: ignore[arg-type]
    if not module.quantizer.is_dynamic and not module.quantizer.is_float:
        observer = module.quantizer.observer()
        observer.observe(x)
        module.set_qparams(module.quantizer.qparams_from(observer))
    return module


@check("scheme")
def refuses_or_serves_ragged_groups(subject: Subject) -> None:
    """If the group size does not divide the width of a layer, the layer is rounded, or the plan refuses the
    layer. The error then states the layer's name, the width and the group size.

    If the layer is rounded, no column has a larger error than the format's bits allow, and the codes and the
    packed bytes decode to the rounded values.
    """
    layer = config_of(subject)
    sizes = [size for level in levels(layer.weight) for size in (level.group_size, *(level.block_size or ())) if size and size > 1]
    assume(sizes, "it has no groups")
    width = 250 if all(250 % size for size in sizes) else 251
    model = nn.ModuleDict({"fits_badly": nn.Linear(width, width, bias=False)})
    try:
        ModelQuantizer(QConfig(global_quant_config=layer)).plan(model)
    except ConfigError as error:
        for words in ("fits_badly", str(width), str(sizes[0])):
            require(words in str(error), f"is refused for a layer of {width} inputs without naming {words}: {error}")
        return
    planned = f"is planned for a layer of {width} inputs, which groups of {sizes[0]} do not divide"
    quantizer, x = _weight_quantizer(subject), _data(width, width)
    values, qparams = quantizer.round_to_nearest(x)
    codes = quantizer.codes_of(values, qparams)
    read, scales = quantizer.unpack(quantizer.pack(codes, qparams, order="order"), (width, width), order="order")
    same = torch.equal(quantizer.dequantize(codes, qparams), values) and torch.equal(quantizer.dequantize(read, scales), values)
    require(same, f"{planned}, but its codes or bytes decode to different values")
    worst, most = float(((values - x).norm(dim=0) / x.norm(dim=0)).max()), _most_error(quantizer)
    require(worst <= most, f"{planned}, but changes a column by {worst:.3g}, and its bits allow at most {most:.3g} of error")


@check("scheme")
def shares_global_scales_that_are_there(subject: Subject) -> None:
    """If a record sets ``shares_global_scale``, the scheme's weights have one scale over the whole tensor."""
    assume(subject.record.shares_global_scale, "its record does not set shares_global_scale")
    require(_weight_quantizer(subject).has_tensor_scale, "sets shares_global_scale, but its weights have no scale over the whole tensor")
