"""The specs of tensors that the kernels round: the specs of all registered schemes, and specs that no scheme has."""

from __future__ import annotations

from typing import Any

import quark
from quark.config.enums import Dtype, ScaleType, ZeroPointType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import quantizer_for
from quark_schemes.arithmetic.shared_exponent import MODES

__all__ = ["CASES", "integer", "small_float"]


def integer(**changes: Any) -> QTensorConfig:
    settings: dict[str, Any] = {"dtype": Dtype.uint4, "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": False}
    return QTensorConfig(**{**settings, "is_dynamic": False, "observer_cls": "MinMaxObserver", **changes})


def small_float(**changes: Any) -> QTensorConfig:
    return integer(**{"dtype": Dtype.fp8_e4m3, "symmetric": None, **changes})


def block_float(**changes: Any) -> QTensorConfig:
    return QTensorConfig(**{"dtype": Dtype.mx, "mx_element_dtype": Dtype.int8, "is_dynamic": False, **changes})


OWN: dict[str, TensorSpec] = {
    "real zero points": integer(zero_point_type=ZeroPointType.float32),
    "int8 with zero points": integer(dtype=Dtype.int8),
    "uint8 without zero points": integer(dtype=Dtype.uint8, symmetric=True),
    "int2": integer(dtype=Dtype.int2, symmetric=True),
    "int16": integer(dtype=Dtype.int16, symmetric=True),
    "scales in float16": integer(scale_type=ScaleType.float16),
    "scales in bfloat16": small_float(scale_type=ScaleType.bfloat16),
    "scales in E5M3": integer(scale_type=ScaleType.float8_e5m3, symmetric=True),
    "powers of two": integer(scale_format="e8m0", symmetric=True),
    "lower powers of two": integer(scale_format="e8m0", symmetric=True, scale_calculation_mode="floor"),
    "groups of 24": integer(group_size=128 // 4 * 3, symmetric=True),
    "per tensor": integer(qscheme="per_tensor", group_size=None, ch_axis=None),
    "of rows": small_float(qscheme="per_channel", group_size=None, ch_axis=0),
    "of columns": integer(qscheme="per_channel", group_size=None, ch_axis=1),
    "of blocks": small_float(qscheme="per_block", group_size=None, block_size=(3, 64)),
    "E5M2": small_float(dtype=Dtype.fp8_e5m2),
    **{f"MXFP8 {mode}": small_float(scale_format="e8m0", scale_calculation_mode=mode) for mode in MODES},
    **{f"MXINT8 {mode}": block_float(scale_calculation_mode=mode) for mode in MODES},
}


def of_schemes() -> dict[str, tuple[TensorSpec, bool]]:
    """Return the different specs of all schemes, each with whether it is for an activation."""
    found: dict[int, tuple[str, TensorSpec, bool]] = {}
    for name in quark.schemes().names():
        config = quark.schemes().load_config(name)()
        for slot, spec in (("weight", config.weight), ("input", config.input_tensors)):
            if spec is not None and not quantizer_for(spec, activation=slot == "input").is_float:
                found.setdefault(id(quantizer_for(spec, activation=slot == "input")), (f"{slot} of {name}", spec, slot == "input"))
    return {name: (spec, activation) for name, spec, activation in found.values()}


CASES = of_schemes() | {name: (spec, False) for name, spec in OWN.items()}
