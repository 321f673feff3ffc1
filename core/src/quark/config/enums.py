"""The enumerations of AMD Quark's public API. This module imports no torch.

`Dtype`, `QSchemeType` and `QuantizationMode` are open: AMD Quark's names are members, and further names from
plugins are accepted too. For a number format or a quantization mode, this is the registered name
(``Dtype("acme_nf3")``). Granularities are not registered. A number format can define a granularity, under a
name with the vendor's prefix (``QSchemeType("acme.diagonal")``). A configuration can be read although the
plugin is not installed. The planning of a run checks whether the format is installed and defines the
granularity.
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
    """An enum whose members are written to JSON as names. Names are read in upper or lower case."""

    @classmethod
    def from_str(cls, text: str) -> Any:
        """Return the member with that name, in upper or lower case.

        Raises:
            ConfigError: (a ValueError) There is no such member.
        """
        for name, member in cls.__members__.items():
            if name.lower() == text.lower():
                return member
        raise ConfigError(f"{cls.__name__} has no member {text!r}; it has {', '.join(cls.__members__)}")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Serialize a value as the class and its text.

        Python up to 3.11.3 would look the value up among the members, where names of plugins are missing.
        """
        return type(self), (self.value,)


class _OpenVocabulary(_Vocabulary):
    """An enum that also accepts names that are not members.

    Two values for such names are equal if their names are equal. The class does not store these values, so a
    misspelt name does not become a member.
    """

    @classmethod
    def _beside_members(cls, name: str) -> Any:
        value = object.__new__(cls)
        value._name_ = value._value_ = name
        return value

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Return the member with that name, in upper or lower case, or a value for the name of a plugin.

        Raises:
            ConfigError: (a ValueError) The name is not valid.
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
        """Return the value for the name of a plugin's number format."""
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

        For mx6 and mx9, this includes the element's part of the bits that a block shares.

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
    """Which elements share one scale.

    A number format may define further granularities, with names such as ``"vendor.name"``, in its method
    `quark.numbers.NumberFormat.granularity`.
    """

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"

    @classmethod
    def _missing_(cls, value: object) -> QSchemeType:
        """Return a value for a granularity that a number format defines."""
        if not is_vendor_name(value):
            near = closest(str(value), cls.__members__)
            suggestion = f"; did you mean {near!r}?" if near else "."
            known = ", ".join(cls.__members__)
            raise ConfigError(
                f"{cls.__name__} has no member {value!r}{suggestion} It has {known}; a number format's own name is written 'vendor.name'"
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
        """Return the torch dtype in which such scales are stored. This imports torch.

        Raises:
            ConfigError: (a ValueError) The member is ``float`` or ``pof2``, which is not a dtype.
        """
        if self.value in ("float", "pof2"):
            raise ConfigError(f"ScaleType.{self.value} says how scales are computed, not the dtype that stores them: use another member")
        return LazyRef(f"torch:{'uint8' if self.value == 'float8_e5m3' else self.value}").load()


class RoundType(_Vocabulary):
    """How a value halfway between two integers is rounded. Other values are rounded to the nearest integer.

    ``half_even`` rounds to the even integer, ``round`` to the larger one, and ``floor`` to the one farther
    from 0. AMD Quark's GPU kernel gives these names the same meanings. Formats whose values are not integers
    ignore these names. They always round halfway values to the even code, as in AMD Quark.
    """

    round = 2
    floor = 3
    half_even = 8


class ZeroPointType(_Vocabulary):
    """Whether zero points are integers or real numbers."""

    int32 = "int32"
    float32 = "float32"


class QuantizationMode(_OpenVocabulary):
    """How a model is quantized: layer by layer (eager mode), or in a mode that a plugin registers."""

    eager_mode = 1
    fx_graph_mode = 2

    @classmethod
    def _missing_(cls, value: object) -> QuantizationMode:
        """Return the member with that name, or a value for the name of a plugin's mode."""
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
