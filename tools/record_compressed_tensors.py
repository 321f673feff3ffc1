"""Record golden files from compressed-tensors: compressed weights, and their decompressed values.

    python tools/record_compressed_tensors.py plugins/quark_exporters/tests/compressed_tensors/golden

Run it on a CPU in a separate environment with ``compressed-tensors==0.20.0``. ``weights.safetensors`` has the
tensors of each case as ``<case>.<name>`` and the decompressed weight as ``<case>.decompressed``.
``cases.json`` has the ``config_groups`` of each case. ``MANIFEST.json`` has versions and hashes, and the
tests check the files against it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PACKAGES = ("compressed-tensors", "torch", "safetensors")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}),
    "int4_group_asymmetric": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
    "int4_channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}),
    "int4_channel_asymmetric": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8_packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}),
    "int8_channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
    "int8_channel_asymmetric": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8_tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
    "fp8_block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32], "symmetric": True}),
}
SHAPE = (20, 96)
"""Number of rows: a multiple of neither 8 (codes in a word) nor 16 (rows of a block)."""


def scales_and_zero_points(weight: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return scales and zero points from the range of each tensor, row, group or block."""
    rows, columns = weight.shape
    row_blocks, column_blocks = {
        "tensor": (1, 1),
        "channel": (rows, 1),
        "group": (rows, columns // arguments.get("group_size", columns)),
        "block": tuple(-(-n // size) for n, size in zip(weight.shape, arguments.get("block_structure", (1, 1)), strict=True)),
    }[arguments["strategy"]]
    most = 448.0 if arguments["type"] == "float" else 2.0 ** (arguments["num_bits"] - 1) - 1
    generator = torch.Generator().manual_seed(1)
    scale = weight.abs().max() / most * (0.5 + torch.rand(row_blocks, column_blocks, generator=generator))
    half = 2 ** (arguments["num_bits"] - 1)
    zero_point = torch.randint(-half, half, scale.shape, generator=generator, dtype=torch.int8)
    if arguments["strategy"] == "tensor":
        scale, zero_point = scale.reshape(1), zero_point.reshape(1)
    return scale, zero_point


def recorded(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one case in the form to which the package compresses them, and the decompressed
    values as ``decompressed``."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format_name, arguments = CASES[case]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale, zero_point = scales_and_zero_points(weight.float(), arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=format_name)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
    compressed = compressor.compress(dict(state), scheme)
    decompressed = compressor.decompress(dict(compressed), scheme)["weight"]
    return {**{name: tensor.contiguous().clone() for name, tensor in compressed.items()}, "decompressed": decompressed.contiguous()}


def main() -> int:
    """Record all cases, and write them to the folder that the command line names."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tensors, groups = {}, {}
    for case, (format_name, arguments) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{case}_{str(dtype).removeprefix('torch.')}"
            tensors |= {f"{name}.{key}": tensor for key, tensor in recorded(case, dtype).items()}
            groups[name] = {"format": format_name, "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}}}
    save_file(tensors, out / "weights.safetensors")
    (out / "cases.json").write_text(json.dumps(groups, indent=1) + "\n")
    hashes = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in ("cases.json", "weights.safetensors")}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_compressed_tensors.py", "versions": versions, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
