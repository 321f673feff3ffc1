"""The enumerations of AMD Quark's public API. No torch here.

`Dtype`, `QSchemeType` and `QuantizationMode` are open: their members are AMD Quark's names, and names from
plugins are values too. A number format or a quantization mode has its registered name
(``Dtype("acme_nf3")``). A granularity is not registered: a number format defines it, under a name with the
vendor's prefix (``QSchemeType("acme.diagonal")``). Reading a configuration needs no plugin. Planning checks,
before any work, whether the format is installed and defines the granularity.
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
    """An enum whose members are written to JSON by name and read back in any case."""

    @classmethod
    def from_str(cls, text: str) -> Any:
        """Return the member of that name, upper or lower case.

        Raises:
            ConfigError: (a ValueError) There is no such member.
        """
        for name, member in cls.__members__.items():
            if name.lower() == text.lower():
                return member
        raise ConfigError(f"{cls.__name__} has no member {text!r}; it has {', '.join(cls.__members__)}")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and send a value by its text: Python up to 3.11.3 looks a value up among the members."""
        return type(self), (self.value,)


class _OpenVocabulary(_Vocabulary):
    """A vocabulary that also accepts other names than its members.

    The values of two such names are equal if the names are. The class does not store these values, so a
    misspelt name leaves no trace.
    """

    @classmethod
    def _beside_members(cls, name: str) -> Any:
        value = object.__new__(cls)
        value._name_ = value._value_ = name
        return value

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Return the member of that name, in any case, or the value for a plugin's name.

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
        """Return the bits of an element, rounded up; for mx6 and mx9, including its part of the shared bits.

        Raises:
            UnknownNameError: (a ValueError) No installed plugin provides the format.
        """
        # The registry is asked only here, because it depends on the installed plugins.
        return math.ceil(_FORMATS.load()().get(self.name).bits)

    def to_torch_packed_dtype(self) -> Any:
        """Return the torch dtype in which a checkpoint holds codes of this format.

        Raises:
            UnknownNameError: (a ValueError) No installed plugin provides the format.
        """
        return _PACKED_DTYPE.load()(self)


class QSchemeType(_OpenVocabulary):
    """Which elements share one scale.

    A number format may define more, named ``"vendor.name"``, in its `quark.numbers.NumberFormat.granularity`.
    """

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"

    @classmethod
    def _missing_(cls, value: object) -> QSchemeType:
        """Return the value for a vendor's own name."""
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
            ConfigError: (a ValueError) There is none, for ``float`` and ``pof2``.
        """
        if self.value in ("float", "pof2"):
            raise ConfigError(f"ScaleType.{self.value} says how scales are computed, not the dtype that stores them: use another member")
        return LazyRef(f"torch:{'uint8' if self.value == 'float8_e5m3' else self.value}").load()


class RoundType(_Vocabulary):
    """How a value halfway between two integers is rounded; all other values go to the nearest integer.

    ``half_even`` gives the even one, ``round`` the larger one, and ``floor`` the one farther from 0: AMD
    Quark's GPU kernel does this under these names. Formats other than integers round half to even under each
    of them, as in AMD Quark.
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
        """Return the member of that name, or the value for the name of a plugin's mode."""
        if not is_valid_name(value):
            raise ConfigError(f"{value!r} is not the name of a quantization mode: a name is {NAME_RULE}")
        return cls.__members__.get(str(value)) or cls._beside_members(str(value))


class DeviceType(_Vocabulary):
    """Target devices of AMD Quark for a layer; without effect."""

    CPU = "cpu"
    IPU = "ipu"


class QuantFlow(_Vocabulary):
    """Flows of AMD Quark; here all of them are one pipeline."""

    standard = "standard"
    file2file = "file2file"
    per_block = "per_block"
