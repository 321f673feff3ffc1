"""Record the golden files from AMD Quark: a model with awkward values in each scheme, and a tensor in each
spec.

    python tools/record_golden.py OUT                             # record everything, write OUT/MANIFEST.json
    python tools/record_golden.py OUT --only fp8 specs/BFP16Spec  # record these files, without a manifest
    python tools/record_golden.py OUT --compare tests/golden      # record, then compare with the stored files

Run it in a separate environment with ``amd-quark==0.13`` and without this repository's packages, since both
are imported as ``quark``. The manifest has the versions of the packages, the seed, and the SHA-256 of every
file; `tests/repository/test_golden_files.py` checks it. Everything is float32, on a CPU, in one thread.
``tests/golden/README.md`` describes each file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

REFERENCE = "amd-quark"
REFERENCE_VERSION = "0.13"
PACKAGES = (REFERENCE, "torch", "transformers", "safetensors", "numpy")
MANIFEST = "MANIFEST.json"
MODEL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
RECORDED_LAYERS = {
    "q_proj": "model.layers.0.self_attn.q_proj",
    "k_proj": "model.layers.0.self_attn.k_proj",
    "down_proj": "model.layers.0.mlp.down_proj",
}
SCHEMES = (
    *("int4_wo_32", "int4_wo_64", "int4_wo_128", "int4_wo_per_channel", "int4_wa_64"),
    *("uint4_wo_32", "uint4_wo_64", "uint4_wo_128", "uint4_wo_per_channel"),
    *("int8", "fp8", "ptpc_fp8", "int4_fp8", "mx6", "bfp16", "nvfp4"),
    *("mxfp4", "mxfp4_weight_only", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3", "mxfp4_fp8"),
    *("amdfp4", "amdfp4_g32", "amdfp4_global16", "amdfp4_global32"),
)
WITH_FP8_KV_CACHE = ("fp8", "mxfp4", "ptpc_fp8")


def awkward_values(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return small random values with outliers, as ``[rows, columns]``. Many of the rows 3 to 17 are hard
    cases.

    There must be at least 18 rows. The number of columns must be a multiple of 16.
    """
    values = torch.randn(rows, columns, generator=generator) * 0.05
    outlier_rows = torch.randint(0, rows, (8,), generator=generator)
    outlier_columns = torch.randint(0, columns, (8,), generator=generator)
    values[outlier_rows, outlier_columns] *= 10
    column = torch.arange(columns).float()
    values[3] = 0  # zero range
    values[5] = 0.0371  # constant
    values[7] *= 1e-6  # scales near underflow
    values[:, 11] *= 8  # an outlier channel
    values[9] = torch.linspace(-1, 1, columns)
    values[10] = column % 16 - 8  # every int4 code
    values[11] = (column % 31 - 15) * 0.5  # halfway between int4 codes
    fp4_halves = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6])
    values[12] = fp4_halves.repeat(columns // 16) * torch.tensor([1.0, -1.0]).repeat(columns // 2)
    values[14] = values[14].abs()  # positive only
    values[15] = -values[15].abs() - 0.1  # negative only, away from zero
    values[16] *= 20
    values[17] = 2.0 ** -(column % 40)  # powers of two, down to below float16
    return values


@torch.no_grad()
def awkward_model(seed: int) -> Any:
    """Return a Llama with one decoder layer. Projections are `awkward_values`, and norm weights are not 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL)).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            parameter.copy_(awkward_values(*parameter.shape, generator))
        elif name.endswith("norm.weight"):
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        elif "embed" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def calibration_tokens(seed: int) -> Tensor:
    """Return four sequences of 16 random tokens."""
    return torch.randint(0, MODEL["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(seed + 1))


@torch.no_grad()
def layer_inputs(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of the recorded float layers for the calibration tokens, and the model's logits."""
    model, inputs = awkward_model(seed), {}

    def keep(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda _module, arguments: inputs.update({name: arguments[0].detach().clone()})

    for name, path in RECORDED_LAYERS.items():
        model.get_submodule(path).register_forward_pre_hook(keep(name))
    return inputs, model(calibration_tokens(seed)).logits


def record_inputs(out: Path, seed: int) -> str:
    """Record the model, the calibration tokens, the inputs of the recorded layers, and the float logits."""
    inputs, logits = layer_inputs(seed)
    tensors = {f"state.{name}": tensor for name, tensor in awkward_model(seed).state_dict().items()}
    tensors |= {f"input.{name}": tensor for name, tensor in inputs.items()}
    tensors |= {"calib_ids": calibration_tokens(seed), "float_logits": logits}
    _save(tensors, out / "inputs.safetensors")
    (out / "model_config.json").write_text(json.dumps(MODEL))
    return "recorded"


@torch.no_grad()
def record_scheme(out: Path, scheme: str, seed: int) -> str:
    """Record fake-quantized weights and inputs, logits, and the tensors and the configuration of the
    export."""
    from quark.torch import LLMTemplate, ModelQuantizer

    (out / scheme).mkdir(parents=True, exist_ok=True)
    cache = "fp8" if scheme in WITH_FP8_KV_CACHE else None
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache))
    with torch.enable_grad():  # as in the reference's own examples
        quantized = quantizer.quantize_model(awkward_model(seed), DataLoader(calibration_tokens(seed), batch_size=1))
        quantized = quantizer.freeze(quantized)
    inputs, _ = layer_inputs(seed)
    tensors = {"quant_logits": quantized(calibration_tokens(seed)).logits.float()}
    for name, path in RECORDED_LAYERS.items():
        layer = quantized.get_submodule(path)
        weight_quantizer = getattr(layer, "_weight_quantizer", None) or torch.nn.Identity()
        tensors[f"qdq.{name}.weight"] = weight_quantizer(layer.weight).float()
        if (input_quantizer := getattr(layer, "_input_quantizer", None)) is not None:
            tensors[f"qdq.{name}.input"] = input_quantizer(inputs[name].clone()).float()
    exported, configuration, status = _export(quantized)
    if configuration is not None:
        (out / scheme / "quantization_config.json").write_text(json.dumps(configuration, indent=1))
    _save(tensors | {f"export.{name}": tensor for name, tensor in exported.items() if "proj" in name}, out / scheme / "outputs.safetensors")
    return status


def _export(model: Any) -> tuple[dict[str, Tensor], dict[str, Any] | None, str]:
    """Return the export's tensors, ``quantization_config`` and status; mx6 and bfp16 have no export."""
    from quark.torch import export_safetensors

    with tempfile.TemporaryDirectory() as folder:
        try:
            export_safetensors(model, folder)
            configuration = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
            return load_file(Path(folder, "model.safetensors")), configuration, "recorded"
        except Exception as error:  # the status records that the reference refuses this
            return {}, None, f"recorded, without an export: {type(error).__name__}"


def tensor_specs() -> Iterator[tuple[str, Any]]:
    """Yield names of recordings, and AMD Quark's specs of every kind in AMD Quark's documentation."""
    from quark.torch.quantization.config import config as reference

    scopes: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "PerTensor": (("Uint4", "Int4", "Uint8", "Int8"), {}),
        "PerChannel": (("Uint4", "Int4", "Int3", "Uint8", "Int8"), {"ch_axis": 0}),
        "PerGroup": (("Uint4", "Int4", "Int3", "Int2", "Uint8", "Int8"), {"ch_axis": -1, "group_size": 32}),
    }
    for scope, (types, where) in scopes.items():
        for name in (f"{prefix}{scope}Spec" for prefix in types):
            for suffix, symmetric in (("sym", True), ("asym", False)):
                yield f"{name}-{suffix}", getattr(reference, name)(symmetric=symmetric, is_dynamic=False, **where)
    float_zero_point = {"ch_axis": 0, "symmetric": False, "is_dynamic": False, "zero_point_type": "float32"}
    yield "Uint4PerChannelSpec-floatzp", reference.Uint4PerChannelSpec(**float_zero_point)
    for prefix in ("FP8E4M3", "FP8E5M2"):
        yield f"{prefix}PerTensorSpec", getattr(reference, f"{prefix}PerTensorSpec")(is_dynamic=False)
        yield f"{prefix}PerChannelSpec", getattr(reference, f"{prefix}PerChannelSpec")(ch_axis=0, is_dynamic=False)
    for prefix in ("FP8E4M3", "FP8E5M2", "FP6E2M3", "FP6E3M2", "FP4"):
        groups = {"ch_axis": -1, "group_size": 32, "scale_format": "float32", "is_dynamic": True}
        yield f"{prefix}PerGroupSpec-float32", getattr(reference, f"{prefix}PerGroupSpec")(**groups)
    for element in ("MXFP4", "MXFP6E2M3", "MXFP6E3M2", "MXFP8E4M3", "MXFP8E5M2"):
        for mode in ("even", "floor", "ceil"):
            spec = getattr(reference, f"OCP_{element}Spec")
            yield f"OCP_{element}Spec-{mode}", spec(ch_axis=-1, is_dynamic=True, scale_calculation_mode=mode)
    yield "OCP_MXINT8Spec", reference.OCP_MXINT8Spec(ch_axis=-1, is_dynamic=True)
    for size in (16, 32):
        yield f"MX6Spec-{size}", reference.MX6Spec(ch_axis=-1, block_size=size)
        yield f"MX9Spec-{size}", reference.MX9Spec(ch_axis=-1, block_size=size)
        yield f"AmdFP4Spec-{size}", reference.AmdFP4Spec(ch_axis=-1, group_size=size, is_dynamic=True)
    yield "BFP16Spec", reference.BFP16Spec(ch_axis=-1)


@torch.no_grad()
def record_spec(out: Path, name: str, spec: Any, seed: int) -> str:
    """Record one tensor, and the values to which AMD Quark's fake-quantizer rounds it."""
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    (out / "specs").mkdir(parents=True, exist_ok=True)
    values = awkward_values(32, 64, torch.Generator().manual_seed(seed + 2))
    try:
        quantizer = FakeQuantizeBase.get_fake_quantize(spec.to_quantization_spec())
        quantizer.enable_observer()
        quantizer.enable_fake_quant()
        result = quantizer(values.clone()).float()
    except Exception as error:  # as in `_export`
        return f"not recorded, the reference raises {type(error).__name__}"
    _save({"x": values, "y": result}, out / "specs" / f"{name}.safetensors")
    return "recorded"


def layer_cases() -> Iterator[tuple[str, torch.nn.Module, Tensor, dict[str, Any]]]:
    """Yield names of recordings, float layers that are not linear, the layers' inputs, and specs."""
    from quark.torch.quantization.config import config as reference

    int8 = reference.Int8PerTensorSpec()
    fp8 = reference.FP8E4M3PerTensorSpec()
    rows = reference.Int8PerChannelSpec(ch_axis=0, symmetric=True)
    columns = reference.Int8PerChannelSpec(ch_axis=1, symmetric=True)
    groups = reference.Int4PerGroupSpec(ch_axis=1, group_size=16)
    tokens = reference.FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True)
    blocks = {static: reference.OCP_MXFP4Spec(ch_axis=1, is_dynamic=not static) for static in (True, False)}
    nn, pictures, ids = torch.nn, torch.randn(2, 32, 5, 5), torch.arange(12).view(3, 4)
    pictures[:, 3] *= 10  # an outlier channel
    everything = {"weight": rows, "input_tensors": int8, "output_tensors": int8, "bias": int8}
    yield "conv2d-int8", nn.Conv2d(32, 16, 3, padding=1), pictures, everything
    yield "conv2d-grouped-fp8", nn.Conv2d(32, 16, 3, groups=2), pictures, {"weight": fp8, "input_tensors": fp8}
    yield "conv2d-int4-group", nn.Conv2d(32, 16, 3, stride=2), pictures, {"weight": groups}
    yield "conv2d-mxfp4", nn.Conv2d(32, 16, 3), pictures, {"weight": blocks[True], "input_tensors": blocks[False]}
    yield "conv2d-input-channels", nn.Conv2d(32, 16, 3), pictures, {"weight": int8, "input_tensors": columns}
    yield "conv2d-dynamic", nn.Conv2d(32, 16, 3), pictures, {"weight": fp8, "input_tensors": tokens}
    yield "conv_transpose2d-int8", nn.ConvTranspose2d(32, 16, 3, stride=2, groups=2), pictures, {"weight": int8, "input_tensors": int8}
    yield "conv_transpose2d-outputs", nn.ConvTranspose2d(32, 16, 3), pictures, {"weight": columns}
    yield "embedding-int8", nn.Embedding(16, 32), ids, {"weight": rows}
    yield "embedding_bag-int4", nn.EmbeddingBag(16, 32), ids, {"weight": groups}


@torch.no_grad()
def record_layer(out: Path, name: str, seed: int) -> str:
    """Record a float layer with an input, and AMD Quark's quantized layer with weight, input and output."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    (out / "layers").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    layer, x, specs = next((layer, x, specs) for case, layer, x, specs in layer_cases() if case == name)
    tensors = {"x": x, **{f"state.{key}": tensor.clone() for key, tensor in layer.state_dict().items()}}
    own = QLayerConfig(**{slot: spec.to_quantization_spec() for slot, spec in specs.items()})
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={type(layer): own}))
    if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):  # the reference finds it only by its name
        quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(), layer_quant_config={"0": own}))
    model = quantizer.freeze(quantizer.quantize_model(torch.nn.Sequential(layer), [x]))
    tensors |= {"y": model(x), "qdq.weight": model[0].weight}
    if (input_quantizer := model[0]._input_quantizer) is not None:
        tensors["qdq.input"] = input_quantizer(x.clone())
    if "bias" in specs:
        tensors["qdq.bias"] = model[0].bias
    _save(tensors, out / "layers" / f"{name}.safetensors")
    return "recorded"


OBSERVERS = {
    "percentile": "PerTensorPercentileObserver",
    "mse": "PerTensorMSEObserver",
    "histogram": "PerTensorHistogramObserver",
    "histogram_pro": "PerTensorHistogramObserverPro",
    "power_of_two": "PerTensorPowOf2MinMaxObserver",
    "power_of_two_mse": "PerTensorPowOf2MinMSEObserver",
}
"""Observers of static activations in symmetric int8, by name of recording. Each sees several batches."""


def activation_batches(seed: int) -> list[Tensor]:
    """Return three batches of activations. Outliers in the first batch bound the bins of histograms."""
    generator = torch.Generator().manual_seed(seed + 3)
    batches = [torch.randn(4, 32, 8, generator=generator) for _ in range(3)]
    batches[0].view(-1)[::257] *= 10
    return batches


@torch.no_grad()
def record_observer(out: Path, name: str, seed: int) -> str:
    """Record batches of activations, and the scale that an observer computes for them."""
    from quark.torch.quantization.config.config import QTensorConfig
    from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
    from quark.torch.quantization.observer import observer as reference

    (out / "observers").mkdir(parents=True, exist_ok=True)
    batches, cls = activation_batches(seed), getattr(reference, OBSERVERS[name])
    settings = {"symmetric": True, "scale_type": ScaleType.float, "round_method": RoundType.half_even, "is_dynamic": False}
    observer = cls(QTensorConfig(dtype=Dtype.int8, observer_cls=cls, qscheme=QSchemeType.per_tensor, **settings))
    try:
        for batch in batches:
            observer(batch.clone())
        scale, _ = observer._calculate_qparams()
    except Exception as error:  # as in `_export`
        return f"not recorded, the reference raises {type(error).__name__}"
    tensors = {f"batch.{i}": batch for i, batch in enumerate(batches)} | {"scale": torch.as_tensor(scale).float().reshape(())}
    _save(tensors, out / "observers" / f"{name}.safetensors")
    return "recorded"


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def golden_files(folder: Path) -> list[Path]:
    """Return the recorded files of a folder, in order. The manifest and the README are left out."""
    return sorted(p for p in folder.rglob("*") if p.suffix in {".safetensors", ".json"} and p.name != MANIFEST)


def write_manifest(out: Path, seed: int) -> None:
    """Write versions, seed and the SHA-256 of every recorded file to ``MANIFEST.json``."""
    manifest = {
        "script": "tools/record_golden.py",
        "seed": seed,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "sha256": {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in golden_files(out)},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def differences(stored: Path, recorded: Path) -> list[str]:
    """Return a sentence for each tensor whose dtype, shape or bits differ from the stored tensor."""
    lines = []
    for path in golden_files(recorded):
        name = path.relative_to(recorded).as_posix()
        if not (stored / name).is_file():
            lines.append(f"{name}: not among the stored files")
        elif path.suffix == ".json":
            if json.loads(path.read_text()) != json.loads((stored / name).read_text()):
                lines.append(f"{name}: another configuration")
        else:
            old, new = load_file(stored / name), load_file(path)
            lines += [f"{name}: {key} differs" for key in sorted(old.keys() | new.keys()) if not _same_bits(old.get(key), new.get(key))]
    return lines


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main() -> int:
    """Record, then write the manifest or compare; return 1 if a file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the recordings")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="inputs, schemes, specs/NAME, layers/NAME, observers/NAME; default: everything"
    )
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="stored golden files to compare with")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        version = importlib.metadata.version(REFERENCE)
    except importlib.metadata.PackageNotFoundError:
        parser.error(f"{sys.executable} has no {REFERENCE}: `pip install {REFERENCE}=={REFERENCE_VERSION}` in a separate environment")
    if version != REFERENCE_VERSION:
        parser.error(f"the golden files are recordings of {REFERENCE} {REFERENCE_VERSION}, and {version} is installed")
    torch.set_num_threads(1)
    out, seed = arguments.out, arguments.seed
    out.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, Callable[[], str]] = {"inputs": lambda: record_inputs(out, seed)}
    jobs |= {scheme: lambda scheme=scheme: record_scheme(out, scheme, seed) for scheme in SCHEMES}
    jobs |= {f"specs/{name}": lambda name=name, spec=spec: record_spec(out, name, spec, seed) for name, spec in tensor_specs()}
    jobs |= {f"layers/{name}": lambda name=name: record_layer(out, name, seed) for name, *_ in layer_cases()}
    jobs |= {f"observers/{name}": lambda name=name: record_observer(out, name, seed) for name in OBSERVERS}
    wanted = arguments.only or list(jobs)
    if unknown := sorted(set(wanted) - jobs.keys()):
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(jobs)}")
    for name in wanted:
        print(f"{name}: {jobs[name]()}", flush=True)
    if not arguments.only:
        write_manifest(out, seed)
    if arguments.compare is None:
        return 0
    lines = differences(arguments.compare, out)
    print("\n".join(lines) or f"{len(golden_files(out))} files equal those in {arguments.compare}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
