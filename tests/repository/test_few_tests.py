"""`--few`, which `make test` has, leaves out thorough tests and most combinations; a plain pytest runs all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COSTS = "tests/test_costs.py"
FACTS = "plugins/quark_templates/tests/test_facts.py"


def collected(*arguments: str) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "--collect-only", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, COSTS, FACTS]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_few_tests_are_some_of_all_and_each_function_but_the_thorough_ones_has_one() -> None:
    few, every = collected("--few"), collected()
    assert set(few) < set(every)
    assert any(name.startswith(COSTS) for name in every)
    functions = {name.partition("[")[0] for name in every if name.startswith(FACTS)}
    assert {name.partition("[")[0] for name in few} == functions
    assert max(sum(name.startswith(f"{function}[") for name in few) for function in functions) == 3
