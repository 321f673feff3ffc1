"""Every way to write a checkpoint keeps the checksums of its tensors, and no flipped bit passes them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.base.ranks import Ranks
from quark.checkpoint import ExportOptions, shard_writer
from quark.checkpoint.checksum import checksum
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.inspection import inspect_checkpoint
from quark.checkpoint.run_file import verify
from quark.errors import OutputError
from quark.runs import quantize_checkpoint
from quark.torch import ModelQuantizer, export_safetensors
from quark_devkit.threads import in_threads

from .interrupted import DATA, config, files, left_behind
from .program import run

OPTIONS = ExportOptions(max_shard_bytes=30_000)
COUNTS = pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])


def from_disk(source: Path, out: Path) -> None:
    quantize_checkpoint(source, out, config("gptq"), DATA)


def resumed(source: Path, out: Path) -> None:
    left_behind(source, out, "gptq")
    quantize_checkpoint(source, out, config("gptq"), DATA, resume=True)


def shared(source: Path, out: Path) -> None:
    def part(ranks: Ranks) -> None:
        quantize_checkpoint(source, out, config("gptq"), DATA, ranks=ranks)

    in_threads(part, 2, is_deterministic=True)


def divided(source: Path, out: Path) -> None:
    """Two ranks write a block each, without a forward."""
    in_threads(lambda ranks: quantize_checkpoint(source, out, config(), ranks=ranks), 2)


def in_memory(source: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    export_safetensors(ModelQuantizer(config("gptq")).quantize_model(model, DATA), out)


def layout(name: str) -> Callable[[Path, Path], None]:
    return lambda source, out: quantize_checkpoint(source, out, config(), exporter=name, options=OPTIONS) and None


ROUTES: dict[str, Callable[[Path, Path], None]] = {
    "from disk": from_disk,
    "resumed": resumed,
    "shared by ranks": shared,
    "divided among ranks": divided,
    "in memory": in_memory,
    "the layout awq": layout("awq"),
    "the layout compressed-tensors": layout("compressed-tensors"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_keeps_a_checksum_of_every_tensor(route: str, source: Path, tmp_path: Path) -> None:
    ROUTES[route](source, tmp_path / "out")
    stored = [json.loads(header) for header in map(header_of, sorted((tmp_path / "out").glob("*.safetensors")))]
    sums = json.loads((tmp_path / "out" / RUN_FILE).read_text())["checksums"]
    assert sums["tensors"].keys() == {name for header in stored for name in header} - {"__metadata__"}
    assert verify(tmp_path / "out").changes == ()
    assert inspect_checkpoint(tmp_path / "out", verify=True).verified == len(sums["tensors"])


def test_every_byte_is_summed_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums cost what was measured: a pass over each tensor, in the thread that writes it."""
    summed: list[int] = []

    def counting(chunks: Iterable[torch.Tensor]) -> str:
        text = checksum(chunks)
        summed.append(int(text.rpartition(":")[2]))
        return text

    monkeypatch.setattr(shard_writer, "checksum", counting)
    quantize_checkpoint(source, tmp_path / "out", config(), options=OPTIONS)
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert sum(summed) == sum(path.stat().st_size - 8 - len(header_of(path)) for path in shards)


def header_of(shard: Path) -> bytes:
    data = shard.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def places(out: Path, count: int) -> list[tuple[str, Path, int]]:
    """Return places of an export: kind, file and position; as many of each kind."""
    ranges: dict[str, list[tuple[Path, int, int]]] = {}
    for shard in sorted(out.glob("*.safetensors")):
        header = header_of(shard)
        ranges.setdefault("header", []).append((shard, 0, 8 + len(header)))
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = (8 + len(header) + offset for offset in entry["data_offsets"])
                kind = "codes" if entry["dtype"].startswith("I") else "scales" if "scale" in name else "floats"
                ranges.setdefault(kind, []).append((shard, start, end))
    for name in ("config.json", "model.safetensors.index.json"):
        ranges[name] = [(out / name, 0, (out / name).stat().st_size)]
    rng = random.Random(13)
    kinds = [kind for kind in sorted(ranges) for _ in range(count // len(ranges))]
    return [(kind, path, rng.randrange(start, end)) for kind in kinds for path, start, end in [rng.choice(ranges[kind])]]


@pytest.fixture(scope="module")
def export(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    quantize_checkpoint(source, out, config(), options=OPTIONS)
    return out


@COUNTS
def test_a_flipped_bit_anywhere_is_noticed(count: int, export: Path) -> None:
    rng = random.Random(13)
    missed = []
    tried = places(export, count)
    assert {kind for kind, _, _ in tried} == {"header", "codes", "scales", "floats", "config.json", "model.safetensors.index.json"}
    for kind, path, place in tried:
        with path.open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            bit = 1 << rng.randrange(8)
            file.seek(place)
            file.write(bytes([byte ^ bit]))
            file.flush()
            missed += [] if verify(export).changes else [f"{kind}: byte {place} of {path.name}"]
            file.seek(place)
            file.write(bytes([byte]))
    assert not missed
    assert not verify(export).changes


def test_the_program_verifies_where_that_is_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_checkpoint(source, tmp_path / "out", config(), options=OPTIONS)
    assert run("inspect", tmp_path / "out", "--verify", monkeypatch=monkeypatch) == 0
    assert "tensors agree" in capsys.readouterr().out
    _, path, place = next(one for one in places(tmp_path / "out", 6) if one[0] == "codes")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert run("inspect", tmp_path / "out", monkeypatch=monkeypatch) == 0  # no weight is read
    capsys.readouterr()
    assert run("inspect", tmp_path / "out", "--verify", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert f"damaged: 1 tensor(s) in '{path.name}' have changed since they were written: model." in said.out
    assert "export or download it again" in said.err
    assert run("inspect", source, "--verify", monkeypatch=monkeypatch) == 2
    assert "has no quark_run.json" in capsys.readouterr().err


def test_a_finished_run_that_has_been_changed_is_not_called_finished(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, config(), options=OPTIONS)
    before = files(out)
    quantize_checkpoint(source, out, config(), options=OPTIONS, resume=True)
    assert files(out) == before
    _, path, place = next(one for one in places(out, 6) if one[0] == "floats")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(OutputError, match=r"was completed by this run, but files have changed since \(1 tensor\(s\) in 'model-"):
        quantize_checkpoint(source, out, config(), options=OPTIONS, resume=True)


def test_exchanged_words_of_a_finished_block_are_noticed_on_resuming(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    shard = left_behind(source, tmp_path / "out", "gptq") / "checkpoint" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    header: dict[str, Any] = json.loads(header_of(shard))
    start = 8 + len(header_of(shard)) + header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
    one, other = slice(start, start + 8), slice(start + 8, start + 16)
    assert data[one] != data[other]
    data[one], data[other] = data[other], data[one]
    shard.write_bytes(data)
    quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
    assert "The files of 'model.layers.1' from the interrupted run are damaged" in caplog.text
    assert files(tmp_path / "out") == files(tmp_path / "once")
