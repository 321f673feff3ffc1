"""Registers the algorithms of this plugin: four transforms, three rounding algorithms, two tuning algorithms
and one branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quark.plugins import AlgorithmRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_algorithms"]

QUARK_API = (2, 2)
_DOCUMENTED = "quark_algos.tuning.documented"
_TUNING: dict[str, Any] = {"kind": "block_tuning", "role": "block_tuning", "capabilities": {"calibration"}}


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """Yield the records of equalization, rotation, Hessian-based rounding, block tuning and LQER."""
    summary = "AWQ: searches the scales that protect channels with large activations best"
    yield _equalization("awq", "awq:Awq", "AWQConfig", "awq.awq", summary)
    summary = "SmoothQuant: moves part of the activations' range into the weights"
    yield _equalization("smoothquant", "smoothquant:SmoothQuant", "SmoothQuantConfig", "awq.smooth", summary, aliases=("smooth",))
    summary = "AutoSmoothQuant: SmoothQuant with alpha searched per mapping"
    yield _equalization("autosmoothquant", "awq:AutoSmoothQuant", "AutoSmoothQuantConfig", "awq.auto_smooth", summary)
    summary = "GPTQ: rounds column by column and compensates each error in the remaining columns"
    yield _rounding("gptq", "GptqProcessor", "GPTQConfig", summary)
    yield _rounding("gptaq", "GptaqProcessor", "GPTAQConfig", "GPTAQ: GPTQ that also compensates the error of its inputs")
    yield _rounding("qronos", "QronosProcessor", "QronosConfig", "Qronos: corrects weights and inputs together, then runs GPTQ")
    yield from _tuning()
    yield _record(
        "rotation",
        "Hadamard rotations: of the residual stream and values, folded into weights; of keys and layer inputs, run with the model",
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
    yield AlgorithmRecord(
        name="lqer",
        kind="branch",
        summary="LQER: a low-rank product beside each layer, which adds what rounding lost",
        processor="quark_algos.lqer.lqer:LQER",
        config="quark_algos.lqer.config:LQERConfig",
        capabilities={"calibration"},
    )


def _equalization(name: str, transform: str, settings: str, module: str, summary: str, **fields: Any) -> AlgorithmRecord:
    """Return the record of an equalization algorithm.

    ``transform`` consists of a file name and a class name in `quark_algos.equalization`. ``module`` is the
    module of AMD Quark that defines the processor.
    """
    return _record(
        name,
        summary,
        config=f"quark_algos.equalization.config:{settings}",
        documented=f"quark.torch.algorithm.{module}:{transform.partition(':')[2]}Processor",
        kind="transform",
        role="equalization",
        processor=f"quark_algos.equalization.{transform}",
        **fields,
    )


def _rounding(name: str, processor: str, settings: str, summary: str) -> AlgorithmRecord:
    """Return the record of an algorithm that rounds columns. ``processor`` is the name of a class of AMD
    Quark.
    """
    return _record(
        name,
        summary,
        config=f"quark_algos.gptq.config:{settings}",
        documented=f"quark.torch.algorithm.{name}.{name}:{processor}",
        kind="rounding",
        processor="quark_algos.gptq.gptq:ColumnRounding",
    )


def _tuning() -> Iterator[AlgorithmRecord]:
    yield AlgorithmRecord(
        name="tuning",
        summary="tunes codes, scales and norms of each rounded block to match the output of the float block",
        processor="quark_algos.tuning.block:TuneBlock",
        config="quark_algos.tuning.config:TuningConfig",
        exports={
            "quark.torch.algorithm.api:blockwise_tuning_algo": f"{_DOCUMENTED}:blockwise_tuning_algo",
            "quark.torch.algorithm.config:BlockwiseTuningConfig": f"{_DOCUMENTED}:BlockwiseTuningConfig",
            "quark.torch.algorithm.config:BlockwiseJointTuningConfig": f"{_DOCUMENTED}:BlockwiseJointTuningConfig",
        },
        **_TUNING,
    )
    yield AlgorithmRecord(
        name="autoround",
        summary="AutoRound: tunes rounding offsets and clipping with signed gradients of each block's error",
        processor="quark_algos.tuning.autoround:AutoRound",
        config="quark_algos.tuning.config:AutoRoundConfig",
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
        summary: Summary of the algorithm.
        config: Reference to the settings class. AMD Quark's class has the same name.
        documented: Reference to AMD Quark's processor class. The class in `quark_algos.processors` has the
            same name.
        more_settings: Names of further settings classes.
        fields: Other fields of the record. By default, the algorithm needs calibration data.
    """
    module, _, settings = config.partition(":")
    exports = {name: f"{module}:{name}" for name in (settings, *more_settings)}
    exports[documented] = f"quark_algos.processors:{documented.partition(':')[2]}"
    fields = {"capabilities": {"calibration"}, **fields}
    return AlgorithmRecord(name=name, summary=summary, config=config, exports=exports, **fields)
