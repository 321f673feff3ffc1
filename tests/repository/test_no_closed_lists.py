"""Core has no list that a third party would have to edit.

It does not test names of modules: what is attention, an expert or a norm is a fact of an `Architecture`, or
inferred in one module. Its vocabularies accept names of a vendor's own. It does not ask of which class a
granularity is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity
from quark.plugins import FormatRecord

CORE = Path(__file__).parents[2] / "core" / "src" / "quark"
NAMES = re.compile(r"expert|_proj\b|[Nn]orm\b|attn|attention|lm_head|embed|router|mlp|\bln_")
"""Parts of names that model families give to modules."""
TESTS = {
    "startswith",
    "endswith",
    "removesuffix",
    "removeprefix",
    "fnmatchcase",
    "fnmatch",
    "compile",
    "search",
    "match",
    "fullmatch",
    "find",
}
"""Calls that test a name, by method or function."""
INFERENCE = "models/plan/inferred_architecture.py"
OTHER_NAMES = {"inputs_embeds", "attention_mask", "num_attention_heads", "layer|expert|depth", "max_norm"}
"""Arguments of forwards and keys of config.json, which transformers defines, not a model family."""


def _strings(node: ast.AST) -> Iterator[str]:
    return (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _tested(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that code compares with something or matches against something, by line; constants of the module included."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            operands = list(node.args) if name in TESTS else []
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            operands = [node.left, node.right]
        elif isinstance(node, ast.comprehension):
            operands = [node.iter]
        for operand in operands:
            found = [constants[part.id] for part in ast.walk(operand) if isinstance(part, ast.Name) and part.id in constants]
            for value in (operand, *found):
                yield from ((node.lineno if hasattr(node, "lineno") else operand.lineno, text) for text in _strings(value))


def name_tests(source: str) -> list[tuple[int, str]]:
    tests = {(line, text) for line, text in _tested(ast.parse(source)) if NAMES.search(text) and " " not in text}
    return sorted((line, text) for line, text in tests if text not in OTHER_NAMES)


@pytest.mark.parametrize(
    "source",
    [
        'if "expert" in name: pass',
        'NAMES = ("*attn", "*attention")\nfound = [n for n in names if any(fnmatchcase(n, p) for p in NAMES)]',
        '_E = re.compile(r"experts\\\\.[0-9]+")',
        'kind = "norm" if "norm" in prev.lower() else "value"',
        'is_query = name.endswith("q_proj")',
    ],
)
def test_tests_of_names_are_seen(source: str) -> None:
    assert name_tests(source)


def test_core_tests_no_name_of_a_module_outside_inference() -> None:
    found = {
        path.relative_to(CORE).as_posix(): tests
        for path in sorted(CORE.rglob("*.py"))
        if (tests := name_tests(path.read_text(encoding="utf-8")))
    }
    assert INFERENCE in found, "the test sees nothing: inference is by names"
    assert {name: tests for name, tests in found.items() if name != INFERENCE} == {}


@pytest.mark.parametrize("name", ["acme.diagonal", "acme-quant.per_row_pair"])
def test_vocabularies_accept_names_of_a_vendors_own(name: str) -> None:
    spec = QTensorConfig(dtype="acme_nf3", qscheme=name, scale_format="acme_e3m0")
    assert QTensorConfig.from_dict(spec.to_dict()) == spec
    assert FormatRecord(name="acme_nf3", bits=3, format="acme:X", capabilities=[name]).capabilities == {name}


@pytest.mark.parametrize("name", ["diagonal", "acme.", ".diagonal", "acme.a.b", "acme/diagonal"])
def test_vocabularies_refuse_other_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"a number format's granularity is named 'vendor\.name'"):
        QTensorConfig(dtype="int8", qscheme=name)
    with pytest.raises(ValueError, match=r"a vendor's own, 'vendor\.name'"):
        FormatRecord(name="acme_nf3", bits=3, format="acme:X", capabilities=[name])


GRANULARITIES = {cls.__name__ for cls in Granularity.__subclasses__() if cls.__module__.startswith("quark.")} - {"PerTensor"}
"""Core's classes of granularities but the one that spans a tensor, of which there can be one only."""


def class_tests(source: str) -> list[int]:
    """Lines that test whether something is a granularity of one class."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 2)
    tests = (c for c in calls if isinstance(c.func, ast.Name) and c.func.id in {"isinstance", "issubclass"})
    return [c.lineno for c in tests if GRANULARITIES & {n.id for n in ast.walk(c.args[1]) if isinstance(n, ast.Name)}]


def test_tests_of_granularities_are_seen() -> None:
    assert len(GRANULARITIES) >= 4
    assert class_tests("if isinstance(granularity, PerBlock | PerGroup): pass") == [1]


def test_core_asks_no_granularity_for_its_class() -> None:
    tests = {path.relative_to(CORE).as_posix(): class_tests(path.read_text(encoding="utf-8")) for path in sorted(CORE.rglob("*.py"))}
    assert {name: lines for name, lines in tests.items() if lines} == {}
