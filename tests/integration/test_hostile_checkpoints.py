"""Damaged and hostile checkpoints through the program and the reader.

A result, or one paragraph that names the culprit and exit code 2.

Cases are drawn from a fixed seed: fields of another type or gone, bytes changed, files cut, nested, empty, or
of another kind.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quark.config.templates.template import LLMTemplate
from quark.errors import UnsupportedError
from quark.runs.from_disk import quantize_checkpoint
from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.main import main
from tools.fuzz.mutations import DAMAGES, damage, damaged
from tools.fuzz.routes import PROMISED, RESULT, ROUTES, ending, judged, run
from tools.fuzz.sources import FILES, FLOAT, QUANTIZED, SIZES, TEXT, build

CASES = 3


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one small model, and texts."""
    base = tmp_path_factory.mktemp("sources")
    build(base)
    return base


Program = Callable[..., tuple[int, str]]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs ``quark`` with arguments; its exit code and its text on stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["quark", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("route", "source", "file"),
    [
        pytest.param(route, source, file, marks=() if source in (*FLOAT, "quantized") else pytest.mark.slow)
        for route, of in ROUTES.items()
        for source in of
        for file in FILES[source]
    ],
)
def test_a_damaged_file_gives_a_result_or_one_paragraph(route: str, source: str, file: str, sources: Path, tmp_path: Path) -> None:
    wrong = []
    for case in range(CASES):
        rng = random.Random(f"{route} {source} {file} {case}")
        place = tmp_path / str(case)
        directory = Path(shutil.copytree(sources / source, place / "in"))
        data, what = damaged((directory / file).read_bytes(), file, rng)
        (directory / file).write_bytes(data)
        end = ending(route, directory, place / "out", *run(route, directory, place / "out", sources / TEXT))
        if end == RESULT and route == "verify":
            end = judged(route, directory, place / "out", sources / source, place / "right")
        if end not in PROMISED:
            wrong.append(f"{what}: {end}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_kind_of_damage_gives_a_result_or_one_paragraph(kind: str, sources: Path, tmp_path: Path) -> None:
    """One case of each kind and source on one route: `make fuzz` has hundreds on all."""
    for source in DAMAGES[kind][0]:
        directory = Path(shutil.copytree(sources / source, tmp_path / source / "in"))
        out = tmp_path / source / "out"
        what = DAMAGES[kind][1](directory, source, random.Random(f"{kind} {source}"))
        route = "plan" if source in FLOAT else "reader"
        assert ending(route, directory, out, *run(route, directory, out, sources / TEXT)) in PROMISED, what


def test_the_same_seed_does_the_same_damage(sources: Path, tmp_path: Path) -> None:
    for seed in range(20):
        found = []
        for name in ("one", "other"):
            directory = Path(shutil.copytree(sources / "sharded", tmp_path / f"{seed}" / name / "in"))
            what = damage(directory, "sharded", random.Random(seed))
            found.append((what, {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file() and p.name != "own.py"}))
        assert found[0] == found[1]


def test_a_defect_is_one_sentence_and_a_traceback_only_on_demand(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(directory: Path, **_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("quark.models.hf.skeleton.meta_model", broken)
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


def test_layers_that_config_json_does_not_count_are_carried_over(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    code, said = program("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")
    assert code == 0, said
    stored, kept = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "out"))
    behind = [name for name in stored if name.startswith("model.layers.1.")]
    assert len(behind) == 9
    assert all(torch.equal(kept[name], stored[name]) for name in behind)


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
    assert "the vocabulary in its config.json has 64" in said


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
    code, said = program("quantize", directory, tmp_path / "out", "--scheme", "int4_wo_32")
    assert code == 0, said
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.is_file() and "secret" in p.read_text(errors="ignore")]


def test_a_token_id_that_would_take_all_memory_is_refused(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["W"] = 10**9
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert "tokenizer.json' has the token id 1,000,000,000" in said


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja"])
def test_a_small_file_of_a_gigabyte_is_not_read(file: str, sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    with (directory / file).open("ab") as sparse:
        sparse.truncate(1 << 30)
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert f"{file}' has 1,073,741,824 bytes" in said


def test_a_configuration_of_countless_patterns_is_refused(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "quantized", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["exclude"] = [f"*x{i}*" for i in range(100_000)]
    (directory / "config.json").write_text(json.dumps(config))
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert "'exclude' has 100,000 patterns with wildcards, and at most 10,000 are read" in said


@pytest.mark.parametrize("route", ["quantize", "inspect", "reader", "evaluate"])
def test_a_value_of_a_quantization_config_that_cannot_be_used_names_the_checkpoint(route: str, sources: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "quantized", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["global_quant_config"]["weight"]["is_dynamic"] = 7
    (directory / "config.json").write_text(json.dumps(config))
    code, said = run(route, directory, tmp_path / "out", sources / TEXT)
    assert code == 2
    assert str(directory) in said
    assert "'is_dynamic' is 7 instead of true or false" in said


def test_a_quantization_config_that_is_none_names_the_checkpoint(sources: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "quantized", tmp_path / "in"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": True}))
    code, said = run("quantize", directory, tmp_path / "out", sources / TEXT)
    assert code == 2
    assert f"the quantization_config in '{directory / 'config.json'}' cannot be used: it is a bool instead of a table" in said


@pytest.mark.parametrize("source", QUANTIZED)
def test_a_flipped_bit_of_a_quantized_checkpoint_is_found_by_its_checksums(source: str, sources: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / source, tmp_path / "in"))
    assert run("verify", directory, tmp_path / "out", sources / TEXT)[0] == 0
    assert DAMAGES["a flipped bit"][1](directory, source, random.Random(7)).startswith("model.safetensors: bit")
    code, said = run("verify", directory, tmp_path / "out", sources / TEXT)
    assert code == 2
    assert f"'{directory}' is damaged" in said


def test_numbers_that_are_none_name_the_checkpoint(sources: Path, program: Program, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sources / "float", tmp_path / "in"))
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.full((32,), torch.nan, dtype=torch.bfloat16)}, directory / "model.safetensors")
    code, said = program("evaluate", directory, "--text", sources / "text.txt", "--seq-len", 32, "--limit", 1)
    assert code == 2
    assert f"'{directory}': the logits of the model hold NaN or Inf" in said


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("route", [*(route for route in ROUTES if route != "verify"), "inspect", "quantize_checkpoint", "compared"])
def test_no_command_and_no_loader_fetches_code_that_a_config_names(
    route: str, key: str, sources: Path, program: Program, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(sources / ROUTES.get(route, ("quantized",))[-1], tmp_path / "in"))
    if route in ("quantize_checkpoint", "compared"):
        directory = Path(shutil.copytree(sources / "float", tmp_path / "float"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: "evil/kern"}))
    if route == "inspect":
        code, said = program("inspect", directory)
    elif route == "compared":
        with_text = ("--text", sources / TEXT, "--limit", 1, "--seq-len", 32)
        code, said = program("evaluate", sources / "quantized", "--reference", directory, *with_text)
    elif route == "quantize_checkpoint":
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
        code, said = 2, str(_refusal(quantize_checkpoint, directory, tmp_path / "out", config))
    else:
        code, said = run(route, directory, tmp_path / "out", sources / TEXT)
    assert code == 2
    assert f"says {key} = 'evil/kern', which is code or a model on a hub" in said


def _refusal(call: Callable[..., object], *arguments: object) -> Exception:
    with pytest.raises(UnsupportedError) as caught:
        call(*arguments)
    return caught.value
