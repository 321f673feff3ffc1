"""The enumerations of AMD Quark's public API. This module imports no torch.

`Dtype`, `QSchemeType` and `QuantizationMode` are open enumerations. AMD Quark's names are members, and names
from plugins are accepted too. A number format or a quantization mode of a plugin has a registered name, such
as ``Dtype("acme_nf3")``. Granularities are not registered. A number format can define a granularity, whose
name begins with the name of the vendor, such as ``QSchemeType("acme.diagonal")``. A configuration with such
names can be read even if the plugin is not installed. When a run is planned, quark checks whether the format
is installed and defines the granularity.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Self

from quark.base.lazy import LazyRef
from quark.base.names import NAME_RULE, closest, is_valid_name, is_vendor_name
from quark.errors import ConfigError

__all__ = ["DeviceType", "Dtype", "QSchemeType", "QuantFlow", "QuantizationMode", "RoundType", "ScaleType", "ZeroPointType"]

_FORMATS = LazyRef("quark.plugins:formats")
_PACKED_DTYPE = LazyRef("quark.numbers:packed_dtype")


class _Vocabulary(Enum):
    """An enum whose members are written to JSON as names. A name is read in upper or lower case."""

    @classmethod
    def from_str(cls, text: str) -> Any:
        """Return the member whose name is ``text``, in upper or lower case.

        Raises:
            ConfigError: (a ValueError) There is no such member.
        """
        for name, member in cls.__members__.items():
            if name.lower() == text.lower():
                return member
        raise ConfigError(f"{cls.__name__} has no member {text!r}; it has {', '.join(cls.__members__)}")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Serialize a value as a pair of its class and its text.

        Python up to 3.11.3 would look up the value among the members, but names of plugins are not members.
        """
        return type(self), (self.value,)


class _OpenVocabulary(_Vocabulary):
    """An enum that also accepts names that are not members.

    For such a name, the class creates a value. Two of these values are equal if their names are equal. The
    class does not store them, so a misspelt name does not become a member.
    """

    @classmethod
    def _beside_members(cls, name: str) -> Any:
        value = object.__new__(cls)
        value._name_ = value._value_ = name
        return value

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Return the member whose name is ``text``. If there is none, return a value for a plugin's name.

        ``text`` may be in upper or lower case.

        Raises:
            ConfigError: (a ValueError) ``text`` is not a valid name.
        """
        return cls(text.lower())

    def __eq__(self, other: object) -> bool:
        return self._name_ == other._name_ if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._name_)


class Dtype(_OpenVocabulary):
    """The number format of a tensor's elements."""

    int8 = "int8"
    uint8 = "uint8"
    uint16 = "uint16"
    int16 = "int16"
    int32 = "int32"
    int4 = "int4"
    uint4 = "uint4"
    int3 = "int3"
    int2 = "int2"
    uint2 = "uint2"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp8_e5m2 = "fp8_e5m2"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m3 = "fp8_e5m3"
    fp6_e3m2 = "fp6_e3m2"
    fp6_e2m3 = "fp6_e2m3"
    fp4 = "fp4"
    mx = "mx"
    mx6 = "mx6"
    mx9 = "mx9"
    bfp16 = "bfp16"

    @classmethod
    def _missing_(cls, value: object) -> Dtype:
        """Return the enum value for ``value``, which is the name of a plugin's number format."""
        if not is_valid_name(value):
            raise ConfigError(f"{value!r} is not the name of a number format: a name is {NAME_RULE}")
        return cls._beside_members(str(value))

    @classmethod
    def from_torch_dtype(cls, torch_dtype: Any) -> Dtype:
        """Return the member for a torch dtype, such as ``torch.float8_e4m3fn``.

        Raises:
            ValueError: There is no such member.
        """
        name = str(torch_dtype).removeprefix("torch.").replace("float8_", "fp8_").removesuffix("fn")
        if name not in cls.__members__:
            raise ValueError(f"{torch_dtype} is not a number format of Dtype, which has {', '.join(cls.__members__)}")
        return cls[name]

    def to_bitwidth(self) -> int:
        """Return the number of bits of one element, rounded up.

        In mx6 and mx9, the elements of a block share some bits. The result includes an equal part of these
        bits for each element.

        Raises:
            UnknownNameError: (a ValueError) No installed plugin provides the format.
        """
        # This method looks up the registry only when it is called, because plugins are loaded on first use.
        return math.ceil(_FORMATS.load()().get(self.name).bits)

    def to_torch_packed_dtype(self) -> Any:
        """Return the torch dtype in which a checkpoint stores the codes of this format.

        Raises:
            UnknownNameError: (a ValueError) No installed plugin provides the format.
        """
        return _PACKED_DTYPE.load()(self)


class QSchemeType(_OpenVocabulary):
    """The granularity of quantization, which determines the elements that share one scale.

    A number format may define further granularities in its method `quark.numbers.NumberFormat.granularity`.
    Their names have the form ``"vendor.name"``.
    """

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"

    @classmethod
    def _missing_(cls, value: object) -> QSchemeType:
        """Return the enum value for ``value``, the name of a granularity that a number format defines."""
        if not is_vendor_name(value):
            near = closest(str(value), cls.__members__)
            suggestion = f"; did you mean {near!r}?" if near else "."
            known = ", ".join(cls.__members__)
            raise ConfigError(
                f"{cls.__name__} has no member {value!r}{suggestion} It has {known}; a number format's granularity is named 'vendor.name'"
            )
        return cls._beside_members(str(value))


class ScaleType(_Vocabulary):
    """The dtype of stored scales. ``float`` means float32."""

    float = "float"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    pof2 = "pof2"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"

    def to_torch_dtype(self) -> Any:
        """Return the torch dtype in which such scales are stored. The method imports torch.

        Raises:
            ConfigError: (a ValueError) The member is ``float`` or ``pof2``, which do not name a dtype.
        """
        if self.value in ("float", "pof2"):
            raise ConfigError(f"ScaleType.{self.value} says how scales are computed, not the dtype that stores them: use another member")
        return LazyRef(f"torch:{'uint8' if self.value == 'float8_e5m3' else self.value}").load()


class RoundType(_Vocabulary):
    """The rounding of values halfway between two integers. Other values are rounded to the nearest integer.

    ``half_even`` rounds to the even integer, ``round`` rounds to the larger integer, and ``floor`` rounds
    away from 0. These names have the same meanings in AMD Quark's GPU kernel. If the values of a format are
    not integers, the format ignores these names, and always rounds halfway values to the even code. AMD Quark
    does the same.
    """

    round = 2
    floor = 3
    half_even = 8


class ZeroPointType(_Vocabulary):
    """The type of zero points: ``int32`` means integers, and ``float32`` means real numbers."""

    int32 = "int32"
    float32 = "float32"


class QuantizationMode(_OpenVocabulary):
    """The way in which a model is quantized: layer by layer (eager mode), or in a mode of a plugin."""

    eager_mode = 1
    fx_graph_mode = 2

    @classmethod
    def _missing_(cls, value: object) -> QuantizationMode:
        """Return the member whose name is ``value``. If there is none, return a value for a plugin's mode."""
        if not is_valid_name(value):
            raise ConfigError(f"{value!r} is not the name of a quantization mode: a name is {NAME_RULE}")
        return cls.__members__.get(str(value)) or cls._beside_members(str(value))


class DeviceType(_Vocabulary):
    """Target devices that AMD Quark defines for a layer. They have no effect."""

    CPU = "cpu"
    IPU = "ipu"


class QuantFlow(_Vocabulary):
    """Quantization flows that AMD Quark defines. quark runs the same pipeline for all of them."""

    standard = "standard"
    file2file = "file2file"
    per_block = "per_block"
