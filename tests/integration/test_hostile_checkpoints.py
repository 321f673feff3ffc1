"""Damaged and hostile checkpoints through the program and the reader: a result, or one paragraph that names the culprit and exit code 2.

Cases are drawn from a fixed seed: fields of another type or gone, bytes changed, files cut, nested, empty, or of another kind.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint import import_model_from_safetensors
from quark.cli.main import main
from quark.errors import QuarkError
from quark.testing.tiny import held_out_text, tiny_model_dir

CASES = 6
VALUES: list[Any] = [None, True, -1, 0, 7, 10**6, 1.5, "", "x", [], {}, [[1]], {"a": 1}, "\u0000", [None], 10**30]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
COMMON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD = "model-00001-of-00003.safetensors"
FILES = {
    "float": (*COMMON, "model.safetensors"),
    "sharded": (*COMMON, "model.safetensors.index.json", SHARD),
    "quantized": (*COMMON, "model.safetensors"),
}
ROUTES = {"quantize": ("float", "sharded"), "gptq": ("float",), "evaluate": ("float", "sharded", "quantized"), "reader": ("quantized",)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one small model, and texts."""
    base = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.bfloat16)
    model.save_pretrained(base / "float")
    model.save_pretrained(base / "sharded", max_shard_size="70KB")
    for directory, name in ((d, n) for d in ("float", "sharded") for n in ("tokenizer.json", "tokenizer_config.json")):
        shutil.copy(tiny_model_dir() / name, base / directory / name)
    (base / "text.txt").write_text(held_out_text()[:3000], encoding="utf-8")
    return base


Program = Callable[..., tuple[int, str]]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs ``quark`` with arguments; its exit code and what it says on stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["quark", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def quantized(sources: Path, program: Program) -> Path:
    if not (sources / "quantized").exists():
        assert program("quantize", sources / "float", sources / "quantized", "--scheme", "int4_wo_32")[0] == 0
    return sources / "quantized"


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to the values within a JSON value; of large objects, to the first sixty."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in list(items)[:60] for path in ((*at, key), *places(inner, (*at, key)))]


def with_a_field_changed(text: bytes, rng: random.Random) -> tuple[bytes, str]:
    data = json.loads(text)
    *path, last = rng.choice(places(data))
    owner = data
    for key in path:
        owner = owner[key]
    value = rng.choice(VALUES)
    if gone := rng.random() < 0.2:
        del owner[last]
    else:
        owner[last] = value
    return json.dumps(data).encode(), f"{'.'.join(map(str, (*path, last)))} {'gone' if gone else f'= {value!r}'}"


def with_bytes_changed(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    at = rng.randrange(min(len(data), 4000))
    return rng.choice(
        [
            (data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], f"another byte at {at}"),
            (data[:at], f"cut at {at}"),
            (data[:at] + b"\xff\xfe" + data[at:], f"no UTF-8 at {at}"),
            (b"", "empty"),
            (b"[" * 2000 + b"]" * 2000, "nested lists"),
            (b"[]", "a list"),
            (b"7", "a number"),
            (b"\0" * 40, "zeros"),
        ]
    )


def damaged(data: bytes, file: str, rng: random.Random) -> tuple[bytes, str]:
    """What a file becomes, and what was done to it."""
    if not file.endswith(".safetensors"):
        return (with_a_field_changed if rng.random() < 0.6 else with_bytes_changed)(data, rng)
    if rng.random() < 0.3:
        return with_bytes_changed(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header, what = with_a_field_changed(data[8:end], rng)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:], what


def outcome(route: str, directory: Path, out: Path, text: Path, program: Program) -> str:
    """What is wrong with how a run ended; empty where it is as promised."""
    if route == "reader":
        try:
            import_model_from_safetensors(None, directory)
        except QuarkError as error:
            return "" if str(directory) in str(error) else f"no file is named: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
    arguments: dict[str, tuple[object, ...]] = {
        "quantize": ("quantize", directory, out, "--scheme", "int4_wo_32"),
        "gptq": ("quantize", directory, out, "--scheme", "int4_wo_32", "--algorithm", "gptq", "--calib", text, "--num-calib", 1),
        "evaluate": ("evaluate", directory, "--text", text, "--limit", 1),
    }
    code, said = program(*arguments[route], "--seq-len", 32)
    left = sorted(p.name for p in out.parent.iterdir() if p != directory)
    if code == 0:
        return "" if left == ([] if route == "evaluate" else [out.name]) else f"there is {left}"
    last = said.strip().splitlines()[-1]
    culprit = str(directory) in last or "layer" in last
    return "" if (code, left) == (2, []) and last.startswith("quark: ") and culprit and "--debug" not in last else f"{code} {left} {last}"


@pytest.mark.parametrize(
    ("route", "source", "file"), [(route, source, file) for route, of in ROUTES.items() for source in of for file in FILES[source]]
)
def test_a_damaged_file_gives_a_result_or_one_paragraph(
    route: str, source: str, file: str, sources: Path, quantized: Path, program: Program, tmp_path: Path
) -> None:
    wrong = []
    for case in range(CASES):
        rng = random.Random(f"{route} {source} {file} {case}")
        place = tmp_path / str(case)
        directory = Path(shutil.copytree(sources / source, place / "in"))
        data, what = damaged((directory / file).read_bytes(), file, rng)
        (directory / file).write_bytes(data)
        if ending := outcome(route, directory, place / "out", sources / "text.txt", program):
            wrong.append(f"{what}: {ending}")
    assert not wrong, "\n".join(wrong)


def test_a_defect_is_one_sentence_and_a_traceback_only_on_demand(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(directory: Path) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("quark.hf.skeleton.meta_model", broken)
    arguments = ("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "int4_wo_64")
    code, said = program(*arguments)
    assert code == 2
    assert said.startswith("quark: ZeroDivisionError: of ours. ")
    assert "--debug" in said
    with pytest.raises(ZeroDivisionError, match="of ours"):
        program(*arguments, "--debug")


def test_weights_that_are_not_stored_are_not_made_up(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    for arguments in (("evaluate", directory, "--seq-len", 32), ("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")):
        code, said = program(*arguments)
        assert code == 2
        assert f"'{directory}' lacks 9 tensor(s)" in said


def test_layers_that_config_json_does_not_count_are_told(
    sources: Path, program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert program("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")[0] == 0
    assert "holds 9 tensor(s)" in caplog.text
    assert "config.json may name fewer layers" in caplog.text


def test_a_model_of_endless_layers_is_not_begun(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    code, said = program("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")
    assert code == 2
    assert "num_hidden_layers = 1,000,000,000" in said


def test_a_tokenizer_of_another_vocabulary_is_told(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    torch.manual_seed(0)
    smaller = AutoConfig.for_model("llama", **SIZES | {"vocab_size": 64})
    AutoModelForCausalLM.from_config(smaller, dtype=torch.bfloat16).save_pretrained(directory)
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert "a vocabulary of 64" in said


def test_a_config_that_names_files_elsewhere_gets_none_of_them(sources: Path, program: Program, tmp_path: Path) -> None:
    """Of all paths that files of a checkpoint may hold, none leads out of its directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt"):
        (elsewhere / name).write_text("secret")
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"_name_or_path": str(elsewhere), "name_or_path": str(elsewhere)}))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    names = {key: str(elsewhere / "vocab.json") for key in ("tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer | names))
    code, _ = program("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")
    assert code == 0
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.is_file() and "secret" in p.read_text(errors="ignore")]


def test_a_token_id_that_would_take_all_memory_is_refused(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["W"] = 10**9
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert "tokenizer.json' has the token id 1,000,000,000" in said
