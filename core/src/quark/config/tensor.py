"""`QTensorConfig` says how one tensor is quantized.

AMD Quark has used three names for this class in its releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from quark.base.names import NAME_RULE, is_valid_name
from quark.config.enums import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.config.fields import checked, value_of, with_dataclass_view
from quark.errors import ConfigError

__all__ = ["QTensorConfig", "observer_name"]

_JSON_TYPES: dict[str, type] = {
    **dict.fromkeys(("is_dynamic", "symmetric", "is_scale_quant", "enable_buffer_reuse"), bool),
    **dict.fromkeys(("ch_axis", "group_size", "max_input_numel"), int),
    "block_size": list,
    "observer_options": Mapping,
}
"""The type of the JSON value for each key. The values of all other keys are strings."""
_LEGACY_KEYS = {"dynamic": "is_dynamic", "axis": "ch_axis"}


def observer_name(observer: type | str | None) -> str | None:
    """Return the public name of an observer, or None if ``observer`` is None."""
    return observer if observer is None or isinstance(observer, str) else observer.__name__


def _member(enum: type[Enum], value: Any) -> Any:
    if value is None or isinstance(value, enum):
        return value
    if isinstance(value, str):
        return enum.from_str(value)  # type: ignore[attr-defined]
    raise ConfigError(f"expected a {enum.__name__} or its name, not {value!r}")


def _dtype(value: Any) -> Any:
    return _member(Dtype, value)


def _qscheme(value: Any) -> Any:
    return _member(QSchemeType, value)


def _round_type(value: Any) -> Any:
    return _member(RoundType, value)


def _scale_type(value: Any) -> Any:
    return _member(ScaleType, value)


def _zero_point_type(value: Any) -> Any:
    return _member(ZeroPointType, value)


def _options(value: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(dict(value or {}).items()))


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    if value is None:
        return None
    pair = tuple(value)
    if len(pair) != 2 or not all(isinstance(v, int) and v > 0 for v in pair):
        raise ConfigError(f"block_size must be two positive whole numbers [rows, columns], not {value!r}")
    return pair


def _size(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1):
        raise ConfigError(f"{attribute.name}={value!r} is not a size: use a positive whole number, or -1 for the whole axis")


def _scale_format(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not is_valid_name(value):
        raise ConfigError(
            f"{attribute.name}={value!r} is not the name of a format of scales, such as 'float32' or 'e4m3': a name is {NAME_RULE}"
        )


@with_dataclass_view
@attrs.define(unsafe_hash=True)
class QTensorConfig:
    """The quantization of one tensor: its number format, granularity, scales, zero points and observer.

    You can assign to fields. The value is checked immediately. When the configuration is used, quark checks
    whether the fields contradict each other. A run works on a copy (`copied`). The hash depends on the
    values, so do not change a configuration that is a key of a dictionary.

    AMD Quark up to 0.11 calls this class ``QuantizationSpec``.

    Attributes:
        dtype: Number format of the elements, as a `Dtype` or its name.
        observer_cls: Class of the observer, or its public name.
        is_dynamic: Whether ranges are computed in every forward pass (dynamic). If False, the ranges are
            computed once (static).
        qscheme: The granularity, which determines the elements that share a scale: a `QSchemeType` or its
            name. If a number format defines a granularity, the name has the form ``"vendor.name"``.
        ch_axis: If there is one scale per channel, the axis of the channels. If there is one scale per group,
            the axis along which the elements of a group are adjacent.
        group_size: Number of elements in a group. -1 means the whole axis.
        block_size: Numbers of rows and columns of a 2-D block.
        symmetric: Whether the zero point is fixed at 0. None if the format has no zero point.
        round_method: The rounding of values halfway between two representable values (`RoundType`).
        scale_type: Dtype of the stored scales.
        scale_format: Number format of the scales: None or ``"float32"``, ``"e8m0"``, ``"e4m3"``, ``"e5m3"``,
            or another name that the number format of the elements supports.
        scale_calculation_mode: The method that chooses a power-of-two scale: ``"even"``, ``"floor"``,
            ``"ceil"`` or ``"rceil"``.
        qat_spec: This field exists for compatibility with AMD Quark. quark has no quantization-aware
            training.
        mx_element_dtype: Number format of the elements if ``dtype`` is ``Dtype.mx``.
        zero_point_type: Whether zero points are integers or real numbers.
        is_scale_quant: Whether this configuration is a second level, which quantizes the scales of the first
            level.
        enable_buffer_reuse: This field has no effect. The JSON form contains it because other programs read
            it.
        max_input_numel: This field has no effect. The JSON form contains it because other programs read it.
        observer_options: Mapping from the name of an observer's option to its value, such as
            ``{"percentile": 99.9}``. The field stores it as sorted pairs. The JSON form contains it only if
            it is not empty.

    Raises:
        ConfigError: (a ValueError) A value is out of range. Or a field that the granularity needs is None.
    """

    dtype: Dtype = attrs.field(converter=_dtype)
    observer_cls: type | str | None = attrs.field(default=None, eq=observer_name, hash=True)
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = attrs.field(default=None, converter=_qscheme)
    ch_axis: int | None = None
    group_size: int | None = attrs.field(default=None, validator=_size)
    block_size: tuple[int, int] | None = attrs.field(default=None, converter=_pair)
    symmetric: bool | None = None
    round_method: RoundType | None = attrs.field(default=None, converter=_round_type)
    scale_type: ScaleType | None = attrs.field(default=None, converter=_scale_type)
    scale_format: str | None = attrs.field(default=None, validator=_scale_format)
    scale_calculation_mode: str | None = None
    qat_spec: object = None
    mx_element_dtype: Dtype | None = attrs.field(default=None, converter=_dtype)
    zero_point_type: ZeroPointType = attrs.field(default=ZeroPointType.int32, converter=_zero_point_type)
    is_scale_quant: bool = False
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4 * 1024 * 1024
    observer_options: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_options)

    def __attrs_post_init__(self) -> None:
        if (error := _missing_field(self)) is not None:
            raise ConfigError(f"QTensorConfig(dtype={self.dtype.name}): {error}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. The keys are names of fields. Names replace enums and the observer class."""
        names = [a.name for a in attrs.fields(type(self)) if a.name not in ("qat_spec", "observer_options")]
        out: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            out[name] = value.name if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
        out["observer_cls"] = observer_name(self.observer_cls)
        return out | ({"observer_options": dict(self.observer_options)} if self.observer_options else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QTensorConfig:
        """Create a configuration from its JSON form. The older keys ``dynamic`` and ``axis`` are accepted.

        Raises:
            ConfigError: A key is unknown, ``dtype`` is missing, or a value has the wrong type.
        """
        values = {_LEGACY_KEYS.get(key, key): value for key, value in checked(data, Mapping, "a tensor's quantization").items()}
        known = {a.name for a in attrs.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or values.get("dtype") is None:
            problem = f"unknown keys {unknown}" if unknown else "the key 'dtype' is missing"
            raise ConfigError(f"a tensor's quantization in JSON has {problem}; its keys are {', '.join(sorted(known - {'qat_spec'}))}")
        for a in attrs.fields(cls):
            if a.name != "qat_spec":
                value_of(values, a.name, _JSON_TYPES.get(a.name, str))
        return cls(**{key: value for key, value in values.items() if key != "zero_point_type" or value is not None})

    def set(self, **changes: Any) -> QTensorConfig:
        """Return a copy in which the fields have the values in ``changes``."""
        return attrs.evolve(self, **changes)

    def set_group_size(self, group_size: int) -> None:
        """Change ``group_size``. Raise ConfigError if the value is not a valid size."""
        if group_size is None:
            raise ConfigError("group_size=None is not a size: use a positive whole number, or -1 for the whole axis")
        self.group_size = group_size

    def copied(self) -> QTensorConfig:
        """Return an independent copy. Raise ConfigError if values of the fields contradict each other."""
        return attrs.evolve(self)


def _missing_field(spec: QTensorConfig) -> str | None:
    """Return a message if a field that the granularity needs is None. Otherwise return None.

    The message also says what to set. Number formats themselves check the fields that they need.
    """
    if spec.qscheme is QSchemeType.per_channel and spec.ch_axis is None:
        return "per_channel needs ch_axis, the axis of the channels; set ch_axis=0 for the output channels of a weight"
    if spec.qscheme is QSchemeType.per_group and (spec.ch_axis is None or spec.group_size is None):
        return "per_group needs ch_axis and group_size; set ch_axis=-1 and group_size, such as 128"
    if spec.qscheme is QSchemeType.per_block and spec.block_size is None:
        return "per_block needs block_size; set block_size=[rows, columns], such as [128, 128]"
    return None
