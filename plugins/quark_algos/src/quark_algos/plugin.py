"""Registers four transforms, three roundings, two tunings and a selector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quark.plugins import AlgorithmRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_algorithms"]

QUARK_API = (2, 2)
_DOCUMENTED = "quark_algos.tuning.documented"
_EQUALIZATION: dict[str, Any] = {"kind": "transform", "role": "equalization"}
_ROUNDING: dict[str, Any] = {"kind": "rounding", "processor": "quark_algos.gptq.rounding:ColumnRounding"}
_TUNING: dict[str, Any] = {"kind": "block_tuning", "role": "block_tuning"}


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """Yield the records of equalization, rotation, Hessian-based rounding and block tuning."""
    yield _record(
        "awq",
        "AWQ: scales that protect the channels with large activations, searched by the outputs",
        config="quark_algos.equalization.config:AWQConfig",
        documented="quark.torch.algorithm.awq.awq:AwqProcessor",
        processor="quark_algos.equalization.transforms:Awq",
        **_EQUALIZATION,
    )
    yield _record(
        "smoothquant",
        "SmoothQuant: moves part of the activations' range into the weights",
        config="quark_algos.equalization.config:SmoothQuantConfig",
        documented="quark.torch.algorithm.awq.smooth:SmoothQuantProcessor",
        processor="quark_algos.equalization.transforms:SmoothQuant",
        aliases=("smooth",),
        **_EQUALIZATION,
    )
    yield _record(
        "autosmoothquant",
        "AutoSmoothQuant: SmoothQuant with alpha searched per mapping",
        config="quark_algos.equalization.config:AutoSmoothQuantConfig",
        documented="quark.torch.algorithm.awq.auto_smooth:AutoSmoothQuantProcessor",
        processor="quark_algos.equalization.transforms:AutoSmoothQuant",
        **_EQUALIZATION,
    )
    yield from (*_rounding(), *_tuning())
    yield _record(
        "rotation",
        "rotations of the residual stream and of values, folded into weights, of keys and of layers' inputs, run with the model",
        config="quark_algos.rotation.config:RotationConfig",
        documented="quark.torch.algorithm.rotation.rotation:RotationProcessor",
        more_settings=("QuaRotConfig", "OnlineRotationConfig"),
        capabilities=(),
        aliases=("quarot",),
        kind="transform",
        role="rotation",
        before=("equalization",),
        processor="quark_algos.rotation.transform:Rotate",
        restorer="quark_algos.rotation.restore:RestoreRotations",
    )


def _rounding() -> Iterator[AlgorithmRecord]:
    yield _record(
        "gptq",
        "GPTQ: rounds column by column and compensates each error in the remaining columns",
        config="quark_algos.gptq.config:GPTQConfig",
        documented="quark.torch.algorithm.gptq.gptq:GptqProcessor",
        **_ROUNDING,
    )
    yield _record(
        "gptaq",
        "GPTAQ: GPTQ that also compensates the error of its inputs",
        config="quark_algos.gptq.config:GPTAQConfig",
        documented="quark.torch.algorithm.gptaq.gptaq:GptaqProcessor",
        **_ROUNDING,
    )
    yield _record(
        "qronos",
        "Qronos: weights and inputs corrected together, then GPTQ",
        config="quark_algos.gptq.config:QronosConfig",
        documented="quark.torch.algorithm.qronos.qronos:QronosProcessor",
        **_ROUNDING,
    )


def _tuning() -> Iterator[AlgorithmRecord]:
    yield AlgorithmRecord(
        name="tuning",
        summary="tunes codes, scales and norms of each rounded block to give what the float model's block gives",
        processor="quark_algos.tuning.block:TuneBlock",
        config="quark_algos.tuning.config:TuningConfig",
        capabilities={"calibration"},
        exports={
            "quark.torch.algorithm.api:blockwise_tuning_algo": f"{_DOCUMENTED}:blockwise_tuning_algo",
            "quark.torch.algorithm.config:BlockwiseTuningConfig": f"{_DOCUMENTED}:BlockwiseTuningConfig",
            "quark.torch.algorithm.config:BlockwiseJointTuningConfig": f"{_DOCUMENTED}:BlockwiseJointTuningConfig",
        },
        **_TUNING,
    )
    yield AlgorithmRecord(
        name="autoround",
        summary="AutoRound: rounding offsets and clipping by signed gradients of each block's error, from round-to-nearest",
        processor="quark_algos.tuning.block:AutoRound",
        config="quark_algos.tuning.config:AutoRoundConfig",
        capabilities={"calibration"},
        exports={
            "AutoRoundConfig": f"{_DOCUMENTED}:AutoRoundConfig",
            "quark.experimental.torch.autoround:AutoRoundProcessor": f"{_DOCUMENTED}:AutoRoundProcessor",
        },
        **_TUNING,
    )


def _record(name: str, summary: str, config: str, documented: str, more_settings: Sequence[str] = (), **fields: Any) -> AlgorithmRecord:
    """Return the record of an algorithm that has a processor in AMD Quark's public API.

    Args:
        name: Name of the algorithm.
        summary: Its summary.
        config: Reference to its settings; AMD Quark's class has the same name.
        documented: AMD Quark's reference to the processor; the class in `quark_algos.processors` has the same
            name.
        more_settings: Names of other classes of settings beside ``config``.
        fields: Other fields of the record; by default it needs calibration data.
    """
    module, _, settings = config.partition(":")
    exports = {name: f"{module}:{name}" for name in (settings, *more_settings)}
    exports[documented] = f"quark_algos.processors:{documented.partition(':')[2]}"
    fields = {"capabilities": {"calibration"}, **fields}
    return AlgorithmRecord(name=name, summary=summary, config=config, exports=exports, **fields)
