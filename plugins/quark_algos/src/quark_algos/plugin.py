"""Registers four transforms, three roundings, two tunings and a selector."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import AlgorithmRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_algorithms"]

QUARK_API = (2, 2)
_DOCUMENTED = "quark_algos.tuning.documented"
_PROCESSORS = "quark_algos.processors"


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """Yield the records of equalization, rotation, Hessian-based rounding and block tuning."""
    yield AlgorithmRecord(
        name="awq",
        summary="AWQ: scales that protect the channels with large activations, searched by the outputs",
        kind="transform",
        role="equalization",
        processor="quark_algos.equalization.transforms:Awq",
        config="quark_algos.equalization.config:AWQConfig",
        capabilities={"calibration"},
        exports={
            "AWQConfig": "quark_algos.equalization.config:AWQConfig",
            "quark.torch.algorithm.awq.awq:AwqProcessor": f"{_PROCESSORS}:AwqProcessor",
        },
    )
    yield AlgorithmRecord(
        name="smoothquant",
        aliases=("smooth",),
        summary="SmoothQuant: moves part of the activations' range into the weights",
        kind="transform",
        role="equalization",
        processor="quark_algos.equalization.transforms:SmoothQuant",
        config="quark_algos.equalization.config:SmoothQuantConfig",
        capabilities={"calibration"},
        exports={
            "SmoothQuantConfig": "quark_algos.equalization.config:SmoothQuantConfig",
            "quark.torch.algorithm.awq.smooth:SmoothQuantProcessor": f"{_PROCESSORS}:SmoothQuantProcessor",
        },
    )
    yield AlgorithmRecord(
        name="autosmoothquant",
        summary="AutoSmoothQuant: SmoothQuant with alpha searched per mapping",
        kind="transform",
        role="equalization",
        processor="quark_algos.equalization.transforms:AutoSmoothQuant",
        config="quark_algos.equalization.config:AutoSmoothQuantConfig",
        capabilities={"calibration"},
        exports={
            "AutoSmoothQuantConfig": "quark_algos.equalization.config:AutoSmoothQuantConfig",
            "quark.torch.algorithm.awq.auto_smooth:AutoSmoothQuantProcessor": f"{_PROCESSORS}:AutoSmoothQuantProcessor",
        },
    )
    yield from (*_rounding(), *_tuning())
    yield AlgorithmRecord(
        name="rotation",
        aliases=("quarot",),
        summary="rotations of the residual stream and of values, folded into weights, of keys and of layers' inputs, run with the model",
        kind="transform",
        role="rotation",
        before=("equalization",),
        processor="quark_algos.rotation.transform:Rotate",
        restorer="quark_algos.rotation.restore:RestoreRotations",
        config="quark_algos.rotation.config:RotationConfig",
        exports={
            "RotationConfig": "quark_algos.rotation.config:RotationConfig",
            "QuaRotConfig": "quark_algos.rotation.config:QuaRotConfig",
            "OnlineRotationConfig": "quark_algos.rotation.config:OnlineRotationConfig",
            "quark.torch.algorithm.rotation.rotation:RotationProcessor": f"{_PROCESSORS}:RotationProcessor",
        },
    )


def _rounding() -> Iterator[AlgorithmRecord]:
    yield AlgorithmRecord(
        name="gptq",
        summary="GPTQ: rounds column by column and compensates each error in the remaining columns",
        kind="rounding",
        processor="quark_algos.gptq.rounding:ColumnRounding",
        config="quark_algos.gptq.config:GPTQConfig",
        capabilities={"calibration"},
        exports={
            "GPTQConfig": "quark_algos.gptq.config:GPTQConfig",
            "quark.torch.algorithm.gptq.gptq:GptqProcessor": f"{_PROCESSORS}:GptqProcessor",
        },
    )
    yield AlgorithmRecord(
        name="gptaq",
        summary="GPTAQ: GPTQ that also compensates the error of its inputs",
        kind="rounding",
        processor="quark_algos.gptq.rounding:ColumnRounding",
        config="quark_algos.gptq.config:GPTAQConfig",
        capabilities={"calibration"},
        exports={
            "GPTAQConfig": "quark_algos.gptq.config:GPTAQConfig",
            "quark.torch.algorithm.gptaq.gptaq:GptaqProcessor": f"{_PROCESSORS}:GptaqProcessor",
        },
    )
    yield AlgorithmRecord(
        name="qronos",
        summary="Qronos: weights and inputs corrected together, then GPTQ",
        kind="rounding",
        processor="quark_algos.gptq.rounding:ColumnRounding",
        config="quark_algos.gptq.config:QronosConfig",
        capabilities={"calibration"},
        exports={
            "QronosConfig": "quark_algos.gptq.config:QronosConfig",
            "quark.torch.algorithm.qronos.qronos:QronosProcessor": f"{_PROCESSORS}:QronosProcessor",
        },
    )


def _tuning() -> Iterator[AlgorithmRecord]:
    yield AlgorithmRecord(
        name="tuning",
        summary="tunes codes, scales and norms of each rounded block to give what the float model's block gives",
        kind="block_tuning",
        role="block_tuning",
        processor="quark_algos.tuning.block:TuneBlock",
        config="quark_algos.tuning.config:TuningConfig",
        capabilities={"calibration"},
        exports={
            "quark.torch.algorithm.api:blockwise_tuning_algo": f"{_DOCUMENTED}:blockwise_tuning_algo",
            "quark.torch.algorithm.config:BlockwiseTuningConfig": f"{_DOCUMENTED}:BlockwiseTuningConfig",
            "quark.torch.algorithm.config:BlockwiseJointTuningConfig": f"{_DOCUMENTED}:BlockwiseJointTuningConfig",
        },
    )
    yield AlgorithmRecord(
        name="autoround",
        summary="AutoRound: rounding offsets and clipping by signed gradients of each block's error, from round-to-nearest",
        kind="block_tuning",
        role="block_tuning",
        processor="quark_algos.tuning.block:AutoRound",
        config="quark_algos.tuning.config:AutoRoundConfig",
        capabilities={"calibration"},
        exports={
            "AutoRoundConfig": f"{_DOCUMENTED}:AutoRoundConfig",
            "quark.experimental.torch.autoround:AutoRoundProcessor": f"{_DOCUMENTED}:AutoRoundProcessor",
        },
    )
