"""A granularity defines which elements of a tensor share a scale.

It is an immutable object. It computes the shape of a tensor's scales. It also converts a tensor to a matrix
in which each row contains the elements that share one scale, and converts the matrix back. If these elements
lie along the last axis, the conversion returns a view.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers.kernels import Runs


class Granularity(ABC):
    """Base class of all granularities.

    A new granularity is a subclass that defines the five abstract methods. The defaults of the other methods
    are always correct, but not always the fastest. A number format chooses the granularity in
    `quark.numbers.NumberFormat.granularity`.

    Attributes:
        is_local: Whether every scale belongs to elements of a single vector along the last axis. If so, a
            tensor can be quantized in parts.
    """

    is_local: ClassVar[bool] = False

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """Return ``x`` as a matrix ``[scales, elements]``.

        Row *i* contains the elements that share scale *i*.
        Scale *i* is element *i* of the flattened tensor of scales, whose shape is `scale_shape`.
        """

    @abstractmethod
    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor whose shape is ``shape``."""

    @abstractmethod
    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo the method `rows`: return the matrix ``rows`` as a tensor whose shape is ``shape``."""

    @abstractmethod
    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the scales of a matrix, repeated so that their shape is ``[rows, groups of columns]``.

        The result is a view if possible. All groups have the same length. It is the largest length for which
        each row has a single scale in each group. If this length does not divide the number of columns, each
        column is a group.
        """

    @abstractmethod
    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo `expand_scale`: compute the scales of a matrix from the repeated scales ``expanded``.
        The shape of the matrix is ``shape``."""

    def columns_per_scale(self, columns: int) -> int | None:
        """Return how many consecutive input channels share a scale in one row of a weight ``[O, columns]``.

        Return None if elements of several rows, or of channels that are not adjacent, share a scale.
        Algorithms then compute all scales before they round.
        """
        return None

    @property
    def rows_per_scale(self) -> int:
        """Number of consecutive rows of a matrix that share their scales.

        It is 1 if each row has its own scales, or if all rows share one scale. A part of a matrix has scales
        of the same granularity if its first row and its number of rows are multiples of this number.
        """
        return 1

    def runs(self, shape: tuple[int, ...]) -> Runs | None:
        """Return the `Runs` of elements that share a scale in a tensor whose shape is ``shape``.

        Kernels use the `Runs` to find the scale of an element. The result is None if the scales do not follow
        the rule that `Runs` describes. In this case, torch operations round the tensor.
        """
        return None

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        """Return why a tensor whose shape is ``shape`` cannot be quantized with this granularity, or None if
        it can be."""
        return None


@attrs.frozen
class PerTensor(Granularity):
    """One scale for the whole tensor. A tensor of shape ``[4, 8]`` has a scale of shape ``[]``."""

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(shape)

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.reshape(1, 1).expand(shape[0], 1)

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[0, 0]

    def runs(self, shape: tuple[int, ...]) -> Runs:
        return Runs(math.prod(shape))


@attrs.frozen
class PerChannel(Granularity):
    """One scale for each index of an axis. With axis 0, a tensor of shape ``[4, 8]`` has scales of shape
    ``[4]``."""

    axis: int

    def rows(self, x: Tensor) -> Tensor:
        channels = x.shape[self.axis]
        return x.movedim(self.axis, 0).reshape(channels, x.numel() // channels if channels else 0)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[self.axis],)

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        moved = [shape[self.axis]] + [s for i, s in enumerate(shape) if i != self.axis % len(shape)]
        return rows.reshape(moved).movedim(0, self.axis)

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale[:, None] if self.axis % 2 == 0 else scale[None].expand(shape)

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[:, 0] if self.axis % 2 == 0 else expanded[0]

    def columns_per_scale(self, columns: int) -> int | None:
        return columns if self.axis in (0, -2) else None

    def runs(self, shape: tuple[int, ...]) -> Runs:
        axis = self.axis % len(shape)
        return Runs(math.prod(shape[axis + 1 :]), period=shape[axis], span=math.prod(shape[: axis + 1]))

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return None if -len(shape) <= self.axis < len(shape) else f"has no axis {self.axis}"


@attrs.frozen
class PerToken(Granularity):
    """One scale for each vector along the last axis.

    A tensor can have any number of axes. A tensor of shape ``[2, 5, 8]`` has scales of shape ``[2, 5]``.
    """

    is_local = True

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[:-1])

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(shape)

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale[:, None]

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[:, 0]

    def columns_per_scale(self, columns: int) -> int | None:
        return columns

    def runs(self, shape: tuple[int, ...]) -> Runs:
        return Runs(shape[-1])


@attrs.frozen
class PerGroup(Granularity):
    """One scale for each run of ``size`` elements along the last axis.

    If ``size`` is -1, a run is the whole axis.
    With ``size=4``, a tensor of shape ``[4, 8]`` has scales of shape ``[4, 2]``.
    """

    size: int
    is_local = True

    def _size(self, length: int) -> int:
        return length if self.size == -1 else self.size

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self._size(x.shape[-1]))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self._size(shape[-1]))

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(shape)

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded

    def columns_per_scale(self, columns: int) -> int | None:
        return self._size(columns)

    def runs(self, shape: tuple[int, ...]) -> Runs | None:
        return Runs(self._size(shape[-1]))

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        size = self._size(shape[-1])
        return None if shape[-1] % size == 0 else f"has {shape[-1]} elements along its last axis, which groups of {size} do not divide"


_FILLED_UP = 1024
"""Maximum size of a group if the rows are shorter than the group.

Such a row is padded to the size, which costs memory.
"""


@attrs.frozen
class PerPaddedGroup(PerGroup):
    """Works like `PerGroup`, but the last run of a row may be shorter.

    That run is quantized as if zeros followed it.
    With ``size=4``, a tensor of shape ``[4, 10]`` has scales of shape ``[4, 3]``.
    """

    @classmethod
    def of(cls, granularity: Granularity) -> Granularity:
        """Return a `PerPaddedGroup` of the same size if ``granularity`` is a `PerGroup`.

        Return any other granularity unchanged.
        """
        return cls(granularity.size) if type(granularity) is PerGroup and granularity.size > 0 else granularity

    def rows(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self.size
        # Zeros do not change a range that contains 0; `restore` cuts them off.
        return (torch.cat([x, x.new_zeros(*x.shape[:-1], missing)], -1) if missing else x).reshape(-1, self.size)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], -(-shape[-1] // self.size))

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(*shape[:-1], -(-shape[-1] // self.size) * self.size)[..., : shape[-1]]

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale if shape[-1] % self.size == 0 else scale.repeat_interleave(self.size, -1)[..., : shape[-1]]

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded if shape[-1] % self.size == 0 else expanded[..., :: self.size]

    def columns_per_scale(self, columns: int) -> int | None:
        return self.size if columns % self.size == 0 else None

    def runs(self, shape: tuple[int, ...]) -> Runs | None:
        return Runs(self.size) if shape[-1] % self.size == 0 else None

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        longest = max(shape[-1], _FILLED_UP)
        if self.size <= longest:
            return None
        return f"has {shape[-1]} elements along its last axis, and groups of {self.size} are much longer"


@attrs.frozen
class PerGroupOfRows(Granularity):
    """One scale for each run of ``size`` elements in a column of a matrix.

    Row *i* of the matrix of scales contains the scales of column *i*.
    With ``size=2``, a matrix of shape ``[8, 4]`` has scales of shape ``[4, 4]``.
    """

    size: int

    @property
    def rows_per_scale(self) -> int:
        return self.size

    def rows(self, x: Tensor) -> Tensor:
        return x.t().reshape(-1, self.size)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], shape[0] // self.size)

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(shape[1], shape[0]).t()

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.t().repeat_interleave(self.size, 0)

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[:: self.size].t()

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) == 2 and shape[0] % self.size == 0
        return None if fits else f"of shape {list(shape)} is not a matrix whose rows groups of {self.size} (ch_axis=0) divide"


@attrs.frozen
class PerBlock(Granularity):
    """One scale for each block of a matrix.

    ``size`` is the number of rows and the number of columns of a block. The last blocks may have fewer rows.
    With ``size=(2, 4)``, a matrix of shape ``[3, 8]`` has scales of shape ``[2, 2]``.
    """

    size: tuple[int, int]

    @property
    def rows_per_scale(self) -> int:
        return self.size[0]

    def rows(self, x: Tensor) -> Tensor:
        (r, c), (n, k) = self.size, x.shape
        if n % r:  # zeros do not change a range that contains 0; `restore` cuts them off
            x = torch.cat([x, x.new_zeros(-n % r, k)])
        return x.reshape(-1, r, k // c, c).transpose(1, 2).reshape(-1, r * c)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-(-shape[0] // self.size[0]), shape[1] // self.size[1])

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        (r, c), (n, k) = self.size, shape
        return rows.reshape(-1, k // c, r, c).transpose(1, 2).reshape(-1, k)[:n]

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.repeat_interleave(self.size[0], 0)[: shape[0]]

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[:: self.size[0]]

    def runs(self, shape: tuple[int, ...]) -> Runs:
        rows, columns = self.size
        return Runs(columns, period=shape[-1] // columns, span=shape[-1] // columns * rows)

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) == 2 and shape[1] % self.size[1] == 0
        return None if fits else f"of shape {list(shape)} cannot be divided into blocks of {list(self.size)}"


def granularity_of(spec: QTensorConfig, *, activation: bool) -> Granularity:
    """Return the granularity of a spec whose ``qscheme`` is available in every number format.

    For an activation, dynamic scales per channel of axis 1 or -2 mean one scale per token, whatever the
    number of axes is. This agrees with the documentation of the formats and with the runtimes.

    Raises:
        ConfigError: Groups run along an axis that is neither the last axis nor the first axis of a weight. Or
            the spec has no ``qscheme``. Or only a plugin's number format has this ``qscheme``.
    """
    if spec.qscheme is QSchemeType.per_tensor:
        return PerTensor()
    if spec.qscheme is QSchemeType.per_channel and spec.ch_axis is not None:
        return PerToken() if activation and spec.is_dynamic and spec.ch_axis in (1, -2) else PerChannel(spec.ch_axis)
    if spec.qscheme is QSchemeType.per_group and spec.group_size is not None:
        if spec.ch_axis == 0 and not activation and spec.group_size > 0:
            return PerGroupOfRows(spec.group_size)
        if spec.ch_axis not in (-1, 1):
            raise ConfigError(
                f"groups of {spec.dtype.name} cannot run along ch_axis={spec.ch_axis} of {'an activation' if activation else 'a weight'}. "
                "Set ch_axis=-1. For a weight with a positive group_size, ch_axis=0 is also possible"
            )
        return PerGroup(spec.group_size)
    if spec.qscheme is QSchemeType.per_block and spec.block_size is not None:
        return PerBlock(spec.block_size)
    wanted = ", ".join(QSchemeType.__members__)
    if spec.qscheme is not None and spec.qscheme.name not in QSchemeType.__members__:
        raise ConfigError(
            f"the number format {spec.dtype.name} has no qscheme '{spec.qscheme.name}'. Use {wanted}, or a number format that has it"
        )
    raise ConfigError(f"{spec.dtype.name} needs a qscheme. Set one of {wanted}")
