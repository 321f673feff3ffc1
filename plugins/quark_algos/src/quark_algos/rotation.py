"""Settings of rotations: orthogonal changes of basis that spread outliers over all channels."""

from __future__ import annotations

from typing import Any

import attrs

from quark.specs.algorithm import AlgoConfig
from quark.specs.dataclass_view import with_dataclass_view
from quark_algos.fields import LEGACY


@with_dataclass_view
@attrs.define(kw_only=True)
class OnlineRotationConfig:
    """Rotations that run with the model instead of being folded into its weights.

    Attributes:
        shared_parallel: Layers that read the same input share one rotation.
        online_rotation_layers: Names of the layers, relative to a decoder block; None for all.
        use_input_prescale: Scale inputs before rotating them.
    """

    shared_parallel: bool
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


def _online(value: Any) -> Any:
    return OnlineRotationConfig(**value) if isinstance(value, dict) else value


@with_dataclass_view
@attrs.define(kw_only=True)
class RotationConfig(AlgoConfig):
    """Rotations R1 to R4 of a model (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

    Attributes:
        scaling_layers: Which modules a rotation is folded into, by block position.
        r1: Rotate the residual stream.
        r2: Rotate values, head by head.
        r3: Rotate queries and keys after the rotary embedding.
        r4: Rotate the input of the MLP's output projection.
        rotation_size: Size of the blocks of a block-diagonal rotation; None for the full width.
        random_r1: Take a random rotation for R1 instead of a Hadamard matrix. ``random`` sets both this and ``random_r2``.
        random_r2: Likewise for R2.
        backbone: Name of the module that holds embeddings and blocks.
        model_decoder_layers: Full name of the list of decoder blocks.
        v_proj: Value projection, relative to a decoder block.
        o_proj: Projection that closes attention, likewise.
        self_attn: Attention, likewise.
        mlp: MLP, likewise.
        online_r1_rotation: Run R1 with the model; None is False.
        online_config: Settings of rotations that run with the model.
        trainable: Learn the rotations.
        train_smooth: Learn smoothing scales as well.
        smooth_positions: Where.
        random: Accepted from configurations before 0.12.
    """

    name: str = "rotation"
    scaling_layers: dict[str, list[dict[str, Any]]] | list[dict[str, Any]]
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = "model.layers"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | None = attrs.field(default=None, converter=_online)
    trainable: bool = False
    train_smooth: bool | None = None
    smooth_positions: list[str] | None = None
    random: bool | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        if self.random is not None:
            self.random_r1 = self.random_r2 = self.random
            self.random = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RotationConfig:
        """Read the JSON form; the older name ``"quarot"`` means all four rotations unless said otherwise."""
        if data.get("name") == "quarot":
            return QuaRotConfig(**data | {"name": "rotation"})
        return cls(**data)


@with_dataclass_view
@attrs.define(kw_only=True)
class QuaRotConfig(RotationConfig):
    """The older name: all four rotations unless said otherwise."""

    r2: bool = True
    r3: bool = True
    r4: bool = True
