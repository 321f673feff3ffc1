"""The scheme classes of AMD Quark's public API: schemes as objects with a ``config``. No torch here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from quark.config.layer import QLayerConfig
from quark.config.templates import QuantizationScheme
from quark_schemes.schemes import block_float, float8, integer, microscaling, two_level

CONFIGURATIONS: Mapping[str, Callable[..., QLayerConfig]] = MappingProxyType(
    {
        "AmdFP4GlobalScaleScheme": two_level.amdfp4_with_global_scale,
        "AmdFP4Scheme": two_level.amdfp4_in_groups,
        "BFP16Scheme": block_float.bfp16,
        "FP4Block16ScaleE4M3Scheme": two_level.nvfp4,
        "FP8Scheme": float8.fp8,
        "INT4_FP8Scheme": two_level.int4_fp8,
        "Int4WeightAndActivationScheme": integer.int4_weight_and_activation,
        "Int4WeightOnlyPerChannelScheme": integer.int4_wo_per_channel,
        "Int4WeightOnlyScheme": integer.int4_weight_only,
        "Int8Scheme": integer.int8,
        "MX6Scheme": block_float.mx6,
        "MX9Scheme": block_float.mx9,
        "MXFP4Scheme": microscaling.mxfp4,
        "MXFP4WeightOnlyScheme": microscaling.mxfp4_weight_only,
        "MXFP4_FP8Scheme": microscaling.mxfp4_fp8,
        "MXFP4_MXFP6E2M3Scheme": microscaling.mxfp4_mxfp6_e2m3,
        "MXFP6E2M3Scheme": microscaling.mxfp6_e2m3,
        "MXFP6E3M2Scheme": microscaling.mxfp6_e3m2,
        "PTPCFP8Scheme": float8.ptpc_fp8,
        "Uint4WeightOnlyPerChannelScheme": integer.uint4_wo_per_channel,
        "Uint4WeightOnlyScheme": integer.uint4_weight_only,
    }
)
"""The function that makes the configuration of each class; its arguments are those of the class."""

__all__ = ["CONFIGURATIONS"]
__all__ += list(CONFIGURATIONS)


class _Scheme(QuantizationScheme):
    """Base of the schemes; ``config`` builds a new configuration at each access. Arguments are attributes."""

    _build: ClassVar[Callable[..., QLayerConfig]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(self._build).bind(*args, **kwargs)
        arguments.apply_defaults()
        vars(self).update(arguments.arguments)

    @property
    def config(self) -> QLayerConfig:
        return self._build(**vars(self)).copied()


def _scheme(name: str, build: Callable[..., QLayerConfig]) -> type[_Scheme]:
    """Return the class of that name, with the summary and the arguments of the function that makes its configuration."""
    members = {"_build": staticmethod(build), "__signature__": inspect.signature(build)}
    return type(name, (_Scheme,), {**members, "__doc__": build.__doc__, "__module__": __name__})


globals().update({name: _scheme(name, build) for name, build in CONFIGURATIONS.items()})
