"""The golden files are the recordings that the manifest describes, and the script can record each of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script(manifest: dict, load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script(manifest["script"])


def test_every_file_has_the_hash_of_the_manifest(manifest: dict, script: ModuleType) -> None:
    hashes = {p.relative_to(GOLDEN).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in script.golden_files(GOLDEN)}
    assert hashes == manifest["sha256"]


def test_the_manifest_names_the_reference_and_what_it_ran_with(manifest: dict, script: ModuleType) -> None:
    assert manifest["versions"].keys() == set(script.PACKAGES)
    assert manifest["versions"][script.REFERENCE] == script.REFERENCE_VERSION


def test_the_script_records_every_scheme_that_is_stored(manifest: dict, script: ModuleType) -> None:
    folders = {name.partition("/")[0] for name in manifest["sha256"] if "/" in name}
    assert folders == {*script.SCHEMES, "specs", "layers", "observers"}


def test_the_script_makes_the_stored_model_tokens_and_inputs(manifest: dict, script: ModuleType) -> None:
    stored, seed = load_file(GOLDEN / "inputs.safetensors"), manifest["seed"]
    state = script.awkward_model(seed).state_dict()
    assert {name.removeprefix("state.") for name in stored if name.startswith("state.")} == state.keys()
    assert all(torch.equal(stored[f"state.{name}"], tensor) for name, tensor in state.items())
    assert torch.equal(stored["calib_ids"], script.calibration_tokens(seed))
    inputs, _ = script.layer_inputs(seed)
    for name, tensor in inputs.items():
        expected = stored[f"input.{name}"]
        # Sums of 256 products in another order: 255 roundings of 2**-24 each, relative to terms that may
        # cancel, so to the whole tensor.
        assert float((tensor - expected).norm()) <= 2**-16 * float(expected.norm()), name


def test_a_comparison_names_the_tensor_whose_bits_differ(script: ModuleType, tmp_path: Path) -> None:
    for folder, zero in (("stored", 0.0), ("recorded", -0.0)):
        (tmp_path / folder).mkdir()
        save_file({"same": torch.ones(2), "zero": torch.tensor([zero])}, tmp_path / folder / "a.safetensors")
    assert script.differences(tmp_path / "stored", tmp_path / "recorded") == ["a.safetensors: zero differs"]
    assert script.differences(tmp_path / "stored", tmp_path / "stored") == []
