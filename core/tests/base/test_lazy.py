"""``quark.templates()`` and ``quark.algorithms()`` return registries, although packages have these names."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.base.lazy import LazyRef


@pytest.mark.parametrize("first", ["", "import quark.algorithms;", "import quark.torch; quark.torch.ModelQuantizer;"])
def test_registries_can_be_asked_for_whatever_was_imported_before(first: str) -> None:
    code = f"import quark; {first} print(type(quark.templates()).__name__, type(quark.algorithms()).__name__)"
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["TemplateRegistry", "AlgorithmRegistry"], done.stderr


MODULE = """
import torch
VALUES = torch.tensor([0.1, 0.3])
EMPTY = torch.empty(2)
IS_INFERENCE = torch.ones(1).is_inference()
LEAF = torch.ones(1, requires_grad=True)
PRODUCT = LEAF * 2
MATRIX = torch.ones(2, 2) @ torch.ones(2, 2)
"""


@pytest.mark.parametrize(
    "states", [["meta"], ["bfloat16"], ["inference"], ["autocast"], ["no_grad"], ["meta", "bfloat16", "no_grad"]], ids=str
)
def test_a_module_is_imported_as_in_a_fresh_process(states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"a_plugin_{'_'.join(states)}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    contexts: dict[str, Any] = {
        "meta": torch.device("meta"),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad(),
    }
    try:
        with ExitStack() as stack:
            for state in states:
                if state == "bfloat16":
                    torch.set_default_dtype(torch.bfloat16)
                else:
                    stack.enter_context(contexts[state])
            before = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            found = LazyRef(f"{name}:VALUES").load()
            after = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        assert after == before
    finally:
        torch.set_default_dtype(torch.float32)
    module: Any = sys.modules.pop(name)
    assert torch.equal(found, torch.tensor([0.1, 0.3]))
    assert (module.EMPTY.device.type, module.EMPTY.dtype, module.MATRIX.dtype) == ("cpu", torch.float32, torch.float32)
    assert not module.IS_INFERENCE
    assert module.PRODUCT.requires_grad


def test_so_is_a_module_that_a_package_imports_when_its_attribute_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_late_part.py").write_text(MODULE, encoding="utf-8")
    late = "def __getattr__(name):\n    import a_late_part\n    return getattr(a_late_part, name)\n"
    (tmp_path / "a_late_plugin.py").write_text(late, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    LazyRef("a_late_plugin:__name__").load()
    with torch.device("meta"):
        found = LazyRef("a_late_plugin:VALUES").load()
    for name in ("a_late_part", "a_late_plugin"):
        del sys.modules[name]
    assert torch.equal(found, torch.tensor([0.1, 0.3]))


def test_a_reference_without_torch_imports_none() -> None:
    code = "import sys; from quark.base.lazy import LazyRef; LazyRef('json:dumps').load(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
