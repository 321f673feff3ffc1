"""References in strings go down as imports do: import-linter does not see them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UPWARD = {
    "quark.numbers:packed_dtype": "`Dtype` answers AMD Quark's question for the dtype of packed codes, and config imports no torch",
    "quark.models.hf.weight_converters:make_converters": "a template with converters imports transformers, and others do not",
}
"""Why a reference may go up: what it names is called by users of the module, and never while that is imported."""


def layers() -> list[str]:
    """The packages of core, the highest first, as import-linter has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    return next(contract["layers"] for contract in contracts if contract.get("containers") == ["quark"])


def rank(module: str) -> int:
    """The height of a module of core: 0 is the lowest layer."""
    package = module.split(".")[1]
    return next(number for number, layer in enumerate(reversed(layers())) if package in layer.split(" | "))


def references() -> Iterator[tuple[str, str]]:
    """Each module of core with a target of a `LazyRef` that is written in it."""
    source = ROOT / "core/src"
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "LazyRef" and isinstance(node.args[0], ast.Constant):
                yield module, str(node.args[0].value)


def test_a_reference_in_a_string_goes_down_like_an_import() -> None:
    own = [(module, target) for module, target in references() if target.startswith("quark.")]
    assert len(own) >= len(UPWARD)
    up = {target for module, target in own if rank(target.partition(":")[0]) > rank(module)}
    assert up == set(UPWARD)
