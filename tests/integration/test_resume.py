"""A run from disk that was killed or failed goes on from its finished blocks, and gives the bytes of a run that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quark.calibration.report import CalibrationReport
from quark.checkpoint import CheckpointContent, ExportOptions
from quark.checkpoint.atomic_directory import JOURNAL, building
from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.errors import ConfigError, NonFiniteError, OutputError, ResumeError, UnsupportedError
from quark.hf.loading import load_model
from quark.plugins import ExporterRecord, exporters
from quark.runs import ModelQuantizer, quantize_block, quantize_checkpoint
from quark.runs.sink import JournaledSink
from quark.testing.tiny import calibration_batches, tiny_model_dir
from quark.torch import LLMTemplate

DATA = [torch.arange(3, 40)[None], torch.arange(20, 50)[None]]
BLOCKS = 3
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
STATIC = {"scheme": "fp8", "kv_cache_scheme": "fp8"}
CASES: dict[str, dict[str, Any]] = {
    "round to nearest": {"scheme": "int4_wo_32"},
    "gptq": {"scheme": "int4_wo_32", "algorithm": "gptq"},
    "a float forward beside it": {"scheme": "int4_wo_32", "algorithm": "gptaq"},
    "awq": {"scheme": "int4_wo_32", "algorithm": "awq"},
    "awq and gptq": {"scheme": "int4_wo_32", "algorithm": ["awq", "gptq"]},
    "awq and a float forward": {"scheme": "int4_wo_32", "algorithm": ["awq", "gptaq"]},
    "static activations and cache": STATIC,
    "a transform before static activations": {"scheme": "int8", "algorithm": "smoothquant"},
    "static activations, cache and attention, with gptq": {
        **STATIC,
        "algorithm": "gptq",
        "attention_scheme": "fp8",
        "kv_cache_post_rope": True,
    },
    "two levels of scales": {"scheme": "nvfp4", "algorithm": "gptq"},
}


class InterruptedRunError(Exception):
    """What ends a run in a test."""


def config(name: str = "round to nearest", family: str = "llama") -> QConfig:
    return LLMTemplate.get(family).get_config(**CASES[name])


def checkpoint(directory: Path, family: str = "llama", **more: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source") / "model")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def partial_of(out: Path) -> Path:
    (partial,) = out.parent.glob(f".{out.name}.*.partial")
    return partial


@contextmanager
def interrupted_behind(block: int) -> Iterator[None]:
    """Let runs in the body fail when they have finished that many blocks."""
    plain, count = JournaledSink.end_block, 0

    def end_block(sink: JournaledSink, one: Any, result: Any) -> None:
        nonlocal count
        if count == block:
            raise InterruptedRunError
        count += 1
        plain(sink, one, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournaledSink, "end_block", end_block)
        try:
            yield
        except InterruptedRunError:
            return
    raise AssertionError(f"the run has ended before it had finished {block} blocks")


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that have been quantized, in order."""
    names: list[str] = []
    plain = quantize_block.quantize_block

    def recording(pipeline: Any, block: Any, *rest: Any) -> None:
        names.append(block.name)
        plain(pipeline, block, *rest)

    monkeypatch.setattr(quantize_block, "quantize_block", recording)
    return names


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calibration reports of all runs."""
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(CalibrationReport, "log", lambda report: logged.append(report.to_dict()))
    return logged


def left_behind(source: Path, out: Path, name: str = "round to nearest", block: int = 2, **more: Any) -> Path:
    """The directory that a run has left which failed behind that many blocks."""
    with interrupted_behind(block):
        quantize_checkpoint(source, out, config(name), DATA, **more)
    return partial_of(out)


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_report_are_those_of_a_run_that_was_not_interrupted(
    name: str, source: Path, tmp_path: Path, quantized: list[str], reports: list[dict[str, Any]]
) -> None:
    quantize_checkpoint(source, tmp_path / "once", config(name), DATA)
    for block in (1, BLOCKS):
        out = tmp_path / f"behind {block}"
        left_behind(source, out, name, block)
        quantized.clear()
        quantize_checkpoint(source, out, config(name), DATA, resume=True)
        assert len(quantized) == BLOCKS - block
        assert files(out) == files(tmp_path / "once")
        assert reports[-1] == reports[0]
    assert not list(tmp_path.glob(".*"))


def test_a_run_may_be_interrupted_again_and_again(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    quantized.clear()
    out = tmp_path / "out"
    for _ in range(BLOCKS):
        with interrupted_behind(1):
            quantize_checkpoint(source, out, config("gptq"), DATA, resume=True)
    quantize_checkpoint(source, out, config("gptq"), DATA, resume=True)
    assert files(out) == files(tmp_path / "once")
    # Each run has quantized one block that it could enter, and one that it could not.
    assert [name.rpartition(".")[2] for name in quantized] == ["0", "1", "1", "2", "2"]


FORMS: dict[str, tuple[str, dict[str, Any], ExportOptions, dict[str, Any]]] = {
    "several files": ("llama", {}, ExportOptions(max_shard_bytes=30_000), {}),
    "rounded values": ("llama", {}, ExportOptions(weight_format="fake_quantized"), {}),
    "no zero points": ("llama", {}, ExportOptions(zero_points=False), {}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}, ExportOptions(), {}),
    "transposed weights": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": BLOCKS, "n_inner": 64, "n_positions": 64},
        ExportOptions(),
        {},
    ),
    "fused projections": ("phi3", {}, ExportOptions(), {}),
    "experts": ("mixtral", {"num_local_experts": 4}, ExportOptions(), {}),
    "experts that are stored fused": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, ExportOptions(), {}),
    "two passes of each block": ("llama", {}, ExportOptions(), {"activation_memory": 1}),
    "another dtype": ("llama", {}, ExportOptions(), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_so_they_are_whatever_is_stored(form: str, tmp_path: Path) -> None:
    family, sizes, options, fields = FORMS[form]
    source = checkpoint(tmp_path / "source", family, **sizes)
    asked = attrs.evolve(LLMTemplate.get(family).get_config(**STATIC, algorithm="gptq"), **fields)
    more: Any = {"options": options, "dtype": "float16" if form == "another dtype" else "auto"}
    quantize_checkpoint(source, tmp_path / "once", asked, DATA, **more)
    with interrupted_behind(2):
        quantize_checkpoint(source, tmp_path / "out", asked, DATA, **more)
    quantize_checkpoint(source, tmp_path / "out", asked, DATA, resume=True, **more)
    assert files(tmp_path / "out") == files(tmp_path / "once")


def test_the_memory_mode_is_that_of_the_interrupted_run_whatever_is_free_now(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.runs.run.free_bytes", lambda _: 1)
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    left_behind(source, tmp_path / "out", "gptq")
    monkeypatch.setattr("quark.runs.run.free_bytes", lambda _: 2**40)
    plan = quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
    assert any("passed twice" in note for note in plan.notes)
    assert files(tmp_path / "out") == files(tmp_path / "once")


@pytest.mark.parametrize("what", ["header", "tensor", "end"])
def test_blocks_from_the_first_damaged_one_on_are_quantized_again_and_it_is_named(
    what: str, source: Path, tmp_path: Path, quantized: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    shard = left_behind(source, tmp_path / "out", "gptq") / "checkpoint" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = "model.layers.1.mlp.up_proj.weight"
    begin = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    if what == "end":
        data = data[: begin + 3]
    else:
        data[begin + 3 if what == "tensor" else 12] ^= 1
    shard.write_bytes(data)
    quantized.clear()
    quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "once")
    if what == "header":  # it is known, and written anew
        assert len(quantized) == 1
        return
    assert quantized == ["model.layers.1", "model.layers.2"]
    assert "has written of 'model.layers.1' is damaged" in caplog.text
    assert "this block and the 0 finished block(s) behind it are quantized again" in caplog.text
    assert what == "end" or f"(1 of {sum('layers.1.' in n for n in header)} tensors: {name})" in caplog.text


def change_source(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor += 0.01


def add_to_source(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more"] = torch.zeros(2, dtype=torch.bfloat16)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another scheme": (
        {"config": LLMTemplate.get("llama").get_config(scheme="int8", algorithm="gptq")},
        r"settings\.configuration\.global_quant",
    ),
    "another setting of the algorithm": (
        {"config": LLMTemplate.get("llama").get_config("int4_wo_32", algorithm="gptq", algorithm_options={"gptq": {"damp_percent": 0.05}})},
        r"settings\.configuration\.algo_config\.0\.damp_percent was 0\.01 and is 0\.05",
    ),
    "other data": ({"data": [DATA[0], DATA[1] + 1]}, r"data\.digest was"),
    "fewer data": ({"data": DATA[:1]}, r"data\.calls was 2 and is 1"),
    "another dtype": ({"dtype": "float32"}, r"settings\.dtype was 'torch\.bfloat16' and is 'torch\.float32'"),
    "another size of files": (
        {"options": ExportOptions(max_shard_bytes=10_000)},
        r"settings\.exporter options\.max_shard_bytes was 5000000000 and is 10000",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_is_not_the_same_is_refused_and_the_difference_is_named(change: str, source: Path, tmp_path: Path) -> None:
    partial = left_behind(source, tmp_path / "out", "gptq")
    before = files(partial / "checkpoint")
    arguments, says = CHANGES[change]
    arguments = {"config": config("gptq"), "data": DATA, **arguments}
    with pytest.raises(ResumeError, match=f"It differs in: {says}.*--restart") as caught:
        quantize_checkpoint(source, tmp_path / "out", resume=True, **arguments)
    assert caught.value.differences
    assert files(partial / "checkpoint") == before
    quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [(change_source, r"source\.model\.safetensors\.sample was"), (add_to_source, r"source\.model\.safetensors\.bytes was \d+ and is \d+")],
)
def test_another_source_is_refused(change: Callable[[dict[str, torch.Tensor]], None], says: str, source: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    left_behind(own, tmp_path / "out")
    tensors = load_file(own / "model.safetensors")
    change(tensors)
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(ResumeError, match=says):
        quantize_checkpoint(own, tmp_path / "out", config(), resume=True)


def test_another_config_of_the_model_and_another_version_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    left_behind(own, tmp_path / "out")
    text = (own / "config.json").read_text()
    (own / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (own / "config.json").read_text() != text
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(ResumeError, match=r"versions\.torch was .* and is '9\.9'; source\.config\.json was"):
        quantize_checkpoint(own, tmp_path / "out", config(), resume=True)


def test_finished_blocks_are_neither_ignored_nor_removed_unless_that_is_asked_for(
    source: Path, tmp_path: Path, quantized: list[str]
) -> None:
    out = tmp_path / "out"
    partial = left_behind(source, out)
    model = ModelQuantizer(config()).quantize_model(load_model(source))
    for again in (lambda: quantize_checkpoint(source, out, config()), lambda: export_with("safetensors", model, out)):
        with pytest.raises(ResumeError, match=r"2 finished blocks are in .*resume=True \(--resume\).*restart=True \(--restart\)"):
            again()
    assert (partial / JOURNAL).is_file()
    quantized.clear()
    quantize_checkpoint(source, out, config(), restart=True)
    assert len(quantized) == BLOCKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_run_that_has_not_finished_a_block_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with interrupted_behind(0):
        quantize_checkpoint(source, tmp_path / "out", config())
    assert list(tmp_path.iterdir()) == []


def test_with_nothing_to_resume_a_run_starts_from_the_beginning(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    quantize_checkpoint(source, tmp_path / "out", config(), resume=True)
    assert len(quantized) == BLOCKS


def test_to_resume_and_to_restart_is_a_contradiction(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set one of the two"):
        quantize_checkpoint(source, tmp_path / "out", config(), resume=True, restart=True)


def test_a_second_run_on_the_same_output_is_refused_at_once_and_the_first_is_named(source: Path, tmp_path: Path) -> None:
    for choice in ({}, {"resume": True}, {"restart": True}):
        with building(tmp_path / "out"), pytest.raises(OutputError, match=f"process {os.getpid()} is writing to '{tmp_path / 'out'}'"):
            quantize_checkpoint(source, tmp_path / "out", config(), **choice)


def test_the_documented_method_resumes_too(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    left_behind(source, tmp_path / "out")
    quantized.clear()
    quantizer = ModelQuantizer(config())
    with pytest.raises(ResumeError, match="--resume"):
        quantizer.direct_quantize_checkpoint(source, tmp_path / "out", device="cpu")
    quantizer.direct_quantize_checkpoint(source, tmp_path / "out", device="cpu", resume=True)
    assert quantized == ["model.layers.2"]


class WholeModels:
    """An exporter that knows nothing of blocks."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("algorithm", "exporter", "says"), [("rotation", "safetensors", "changes the whole model"), (None, "other", "reopen")]
)
def test_a_run_that_cannot_be_resumed_says_so_before_any_work(
    algorithm: str | None, exporter: str, says: str, source: Path, tmp_path: Path
) -> None:
    exporters().register(ExporterRecord(name="other", exporter=f"{__name__}:WholeModels"))
    asked = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=algorithm)
    try:
        with pytest.raises(UnsupportedError, match=f"cannot be resumed: .*{says}"):
            quantize_checkpoint(source, tmp_path / "out", asked, DATA, exporter=exporter, resume=True)
    finally:
        exporters().unregister("other")


def test_an_error_in_a_late_block_says_what_is_kept(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    tensors = load_file(own / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"layers\.2\.mlp\.down_proj"):
        quantize_checkpoint(own, tmp_path / "out", config())
    assert f"2 finished blocks are in '{partial_of(tmp_path / 'out')}'" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_block_is_on_the_disk_before_the_journal_says_so_and_everything_before_the_output_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []

    def recorded(name: str, of: Callable[[Any], str]) -> None:
        plain = getattr(os, name)

        def record(first: Any, *rest: Any, **named: Any) -> Any:
            events.append((name, of(first)))
            return plain(first, *rest, **named)

        monkeypatch.setattr(os, name, record)

    for name in ("pwrite", "fdatasync", "fsync"):
        recorded(name, lambda file: Path(os.readlink(f"/proc/self/fd/{file}")).name)
    recorded("rename", lambda path: Path(path).name)
    quantize_checkpoint(source, tmp_path / "out", config(), options=ExportOptions(max_shard_bytes=30_000))
    unsynchronized: set[str] = set()
    entries = 0
    for event, file in events:
        if event == "rename" and file == "checkpoint":
            assert not unsynchronized
        elif event == "pwrite" and file != "owner.lock":
            if file == JOURNAL:
                assert not unsynchronized
                entries += 1
            unsynchronized.add(file)
        elif event in ("fsync", "fdatasync"):
            unsynchronized.discard(file)
    assert entries == 1 + BLOCKS
    renamed = events.index(("rename", "checkpoint"))
    behind_last_write = max(i for i, (event, _) in enumerate(events) if event == "pwrite")
    synchronized = {file for event, file in events[behind_last_write:renamed] if event == "fsync"}
    assert synchronized >= {path.name for path in (tmp_path / "out").iterdir()} | {"checkpoint"}
    assert ("fsync", tmp_path.name) in events[renamed:]


class Killer:
    """Runs jobs in processes that are killed (`killed_runs`)."""

    def __init__(self, process: subprocess.Popen[str], source: Path, data: list[torch.Tensor], max_shard_bytes: int) -> None:
        self._process = process
        self._common = {"source": str(source), "data": [x.tolist() for x in data], "max_shard_bytes": max_shard_bytes}

    def run(self, out: Path, name: str, **job: Any) -> int:
        """The exit code of a run; its report lies beside ``out``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        report = str(out.parent / f"{out.name}.json")
        line = {**self._common, "out": str(out), "choices": CASES[name], "resume": True, "report": report, **job}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def compare(self, tmp_path: Path, name: str, rng: random.Random, kills: int) -> None:
        """Check that a run that is killed ``kills`` times at random points, resumed each time, gives what one run gives."""
        once, out, count = tmp_path / "once", tmp_path / "out", tmp_path / "count"
        assert self.run(once, name, count=str(count)) == 0
        total, killed = int(count.read_text()), 0
        points = [rng.randrange(100, total) for _ in range(kills)]
        for point in points:
            # A resumed run writes less than the whole: some points lie behind its end.
            code = self.run(out, name, kill_after=point)
            assert code in (-9, 0)
            killed += code == -9
            if code == 0:
                break
        if not out.exists():
            assert self.run(out, name) == 0
        assert killed, f"no run was killed after {points} of {total} bytes"
        assert files(out) == files(once)
        assert (tmp_path / "out.json").read_text() == (tmp_path / "once.json").read_text()
        assert not list(tmp_path.glob(".*"))


@contextmanager
def killer(source: Path, data: list[torch.Tensor], max_shard_bytes: int) -> Iterator[Killer]:
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Killer(process, source, data, max_shard_bytes)
        assert process.stdin is not None
        process.stdin.close()


def test_a_run_that_is_killed_in_the_middle_of_a_write_is_resumed(source: Path, tmp_path: Path) -> None:
    rng = random.Random(15)
    with killer(source, DATA, 60_000) as jobs:
        for name in ("round to nearest", "awq and gptq"):
            (tmp_path / name).mkdir()
            jobs.compare(tmp_path / name, name, rng, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round to nearest", "gptq", "awq", "awq and gptq", "static activations and cache"])
def test_a_run_of_the_tiny_model_is_killed_at_many_points_and_resumed(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    with killer(tiny_model_dir(), calibration_batches(4, 64), 500_000) as jobs:
        for number in range(12):
            (tmp_path / str(number)).mkdir()
            jobs.compare(tmp_path / str(number), name, rng, kills=1 + number % 4)
