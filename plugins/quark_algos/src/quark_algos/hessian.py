"""Settings of the algorithms that choose codes by the second moment of a layer's inputs: GPTQ, GPTAQ, Qronos."""

from __future__ import annotations

import attrs
from attrs import validators

from quark.errors import ConfigError
from quark.specs.algorithm import AlgoConfig
from quark.specs.dataclass_view import with_dataclass_view
from quark_algos.fields import LEGACY, positive


@with_dataclass_view
@attrs.define(kw_only=True)
class _HessianConfig(AlgoConfig):
    """What the three have in common; see `GPTQConfig`."""

    block_size: int = attrs.field(default=128, validator=positive)
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = attrs.field(default=True, repr=False, eq=False, metadata=LEGACY)
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        if self.desc_act and not self.static_groups:
            raise ConfigError(
                f"{type(self).__name__}: desc_act=True with static_groups=False would scatter the columns of a group over the matrix; "
                "set static_groups=True, or desc_act=False"
            )


@with_dataclass_view
@attrs.define(kw_only=True)
class GPTQConfig(_HessianConfig):
    """GPTQ: columns are rounded one after another, each spreading its error over the rest (arXiv 2210.17323).

    Attributes:
        block_size: Columns between two updates of the rest of the matrix.
        damp_percent: Share of the Hessian's mean diagonal that is added to it, above 0 and below 1.
        desc_act: Go through the columns by descending diagonal of the Hessian.
        static_groups: Find the groups' scales before any column is rounded; needed with ``desc_act``.
        inside_layer_modules: Names of the linear layers, relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks.
        true_sequential: Accepted from configurations before 0.12; calibration is sequential here in any case.
        embedding_layers: Accepted from configurations before 0.6; not needed.

    Raises:
        ConfigError: (a ValueError) ``desc_act`` without ``static_groups``.
        ValueError: A number is out of its range.
    """

    name: str = "gptq"
    damp_percent: float = attrs.field(default=0.01, validator=[positive, validators.lt(1)])
    inside_layer_modules: list[str] = attrs.field(factory=list)
    model_decoder_layers: str = ""


@with_dataclass_view
@attrs.define(kw_only=True)
class GPTAQConfig(GPTQConfig):
    """GPTAQ: GPTQ that also makes up for the error of the inputs that earlier layers have left (arXiv 2504.02692).

    Attributes:
        alpha: Weight of that term.
    """

    name: str = "gptaq"
    alpha: float = 0.25


@with_dataclass_view
@attrs.define(kw_only=True)
class QronosConfig(_HessianConfig):
    """Qronos: corrects for quantized inputs and weights together, then goes on as GPTQ (arXiv 2505.11695).

    Attributes:
        inside_layer_modules: Names of the linear layers, relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks.
        alpha: Damping, as a share of the Hessian's largest eigenvalue, above 0.
        beta: Scale of the Hessian's inverse before its second factorization, for accuracy alone, above 0.
    """

    name: str = "qronos"
    inside_layer_modules: list[str]
    model_decoder_layers: str
    alpha: float = attrs.field(default=1e-3, validator=positive)
    beta: float = attrs.field(default=1e4, validator=positive)
