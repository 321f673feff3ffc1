"""Packing: how the codes and the scales of a tensor are stored in a checkpoint."""

from __future__ import annotations

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers.granularity import Granularity
from quark.numbers.qparams import QParams

__all__ = ["AS_THEY_ARE", "Packing"]


class Packing:
    """Stores codes and scales as they are.

    Number formats that store them otherwise give a subclass of their own as their ``packing``.

    All methods must work on meta tensors, by which the shapes of a checkpoint are known without data: no
    operation may look at values. ``unpack(pack(codes))`` equals ``codes`` and
    ``unpack_qparams(pack_qparams(qparams))`` equals ``qparams``, to the bit.
    """

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        """Return codes as they are stored.

        Args:
            codes: ``[O, I]``, or of any other shape, in the format's ``storage_dtype``.
            granularity: Which elements share a scale.
            order: Order of codes in a word, for formats that have two of them: ``"reorder"`` or ``"order"``.
        """
        return codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        """Undo `pack`: return codes of that shape."""
        return packed

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        """Return scales and zero points as they are stored, by suffix: ``scale``, ``zero_point``."""
        return {"scale": qparams.scale} if qparams.zero_point is None else {"scale": qparams.scale, "zero_point": qparams.zero_point}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        """Undo `pack_qparams`; ``shape`` is that of the tensor."""
        return QParams(tensors["scale"], tensors.get("zero_point"))


AS_THEY_ARE = Packing()
"""The packing of formats that name none."""
