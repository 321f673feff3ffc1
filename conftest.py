"""Options, marks and fixtures of every test of the repository."""

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# The time of an example depends on the machine more than on the property.
settings.register_profile("quark", deadline=None)
settings.register_profile("few", deadline=None, max_examples=25)
settings.load_profile("quark")

OTHER_CPU = Path(__file__).parent / "tests" / "kit" / "other_cpu"
OTHER_SYSTEM = OTHER_CPU.with_name("other_system")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add ``--few``, ``--other-cpu`` and ``--system``; the last two change this process and its children.

    With ``--other-cpu``, torch computes products, factorizations and sums in another order.
    """
    parser.addoption("--few", action="store_true", help="leave out thorough tests and most combinations of parameters")
    parser.addoption("--other-cpu", action="store_true", help="sum in another order, like the libraries of another CPU")
    parser.addoption("--system", choices=["windows", "macos"], help="refuse calls that this system does not offer (tests/kit/other_system)")
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--system")
    config: Any = pluginmanager.get_plugin("pytestconfig")
    if (system := early.parse_known_args(config.invocation_params.args)[0].system) is not None:
        # Before the next conftest.py, which imports code that must see that system.
        os.environ["QUARK_OTHER_SYSTEM"] = system
        _import_first(OTHER_SYSTEM)
        from simulated_system import install

        install(system)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the kernels of torch if ``--other-cpu`` is given, and try fewer examples with ``--few``."""
    if config.getoption("--few"):
        settings.load_profile("few")
    if config.getoption("--other-cpu") and config.getoption("--system"):
        raise pytest.UsageError("--other-cpu and --system exclude each other: choose one")
    if config.getoption("--other-cpu"):
        _import_first(OTHER_CPU)
        import torch  # noqa: F401  # first: in a process that xdist starts, the import itself installs the kernels
        from other_cpu_kernels import install

        install()


def _import_first(folder: Path) -> None:
    """Put a folder first on the import path, here and in processes that tests start."""
    sys.path.insert(0, str(folder))
    others = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *others])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests with the garbage collector off, and exempt imported objects from later collections.

    They live until the session ends, and a pass over torch, transformers and 15,000 tests takes half a
    second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow: of a test ``one_in(n)`` all but every n-th combination of its parameters; of what has ``slow_runs``, whole runs.

    Tests that are marked ``posix`` are skipped on Windows.

    ``slow_runs`` stands for `quark_devkit.extent.WHOLE_RUNS`, or names checks: then these are slow, and no others.
    With n values of one parameter each value of the others is combined with one of them, in turn.
    """
    marker = item.get_closest_marker("one_in")
    if marker is not None and sum(_positions(item)) % marker.args[0]:
        item.add_marker(pytest.mark.slow)
    marker = item.get_closest_marker("posix")
    if marker is not None and (item.config.getoption("--system") == "windows" or sys.platform == "win32"):
        item.add_marker(pytest.mark.skip(reason=f"not on Windows: {marker.args[0]}"))
    from quark_devkit.extent import WHOLE_RUNS

    marker = item.get_closest_marker("slow_runs")
    if marker is not None:
        callspec = getattr(item, "callspec", None)
        check = item.name.removeprefix("test_") if callspec is None else callspec.id.rpartition(":")[2]
        if check in (marker.args or WHOLE_RUNS):
            item.add_marker(pytest.mark.slow)


MOST = 3
"""Largest number of values of a parameter, or of records for a conformance check, with ``--few``."""


@pytest.hookimpl(trylast=True)  # after those that -m and -k leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--few``, deselect long tests and most combinations of parameters.

    Long tests are marked thorough, or are conformance checks that take long. `tests.kit.covering` chooses the
    combinations that stay, and the records of all distributions for each check of their kind.
    """
    if not config.getoption("--few"):
        return
    from tests.kit.covering import covering

    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") is None and not _is_long_check(item):
            functions.setdefault(_function(item), []).append(item)
    kept: set[pytest.Item] = set()
    for name, combinations in functions.items():
        subjects: dict[Any, int] = {}
        rows = [
            (subjects.setdefault(item.parent, len(subjects)), *(_positions(item) if hasattr(item, "callspec") else ()))
            for item in combinations
        ]
        kept.update(combinations[number] for number in covering(rows, name, MOST))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print the size of a run of many tests, unless other processes run them."""
    if not hasattr(session.config, "workerinput") and not session.config.getoption("numprocesses", None):
        _announce(session.config, len(session.items), 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Print the size of a run of many tests when the first process has collected them."""
    if node.gateway.id == "gw0":
        _announce(node.config, len(ids), node.workerinput["workercount"])


def _announce(config: pytest.Config, tests: int, processes: int) -> None:
    from tests.kit.announcement import MANY, announcement

    if tests >= MANY and not config.getoption("collectonly"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(announcement(tests, processes, few=config.getoption("--few")))


def _is_long_check(item: Any) -> bool:
    """Return whether an item is a conformance check of the repository's own plugins that is not quick."""
    from quark_devkit.extent import LAWS, OF_DISTRIBUTIONS, WHOLE_RUNS

    is_check = getattr(item.cls, "kind", None) is not None or "::" in getattr(getattr(item, "callspec", None), "id", "")
    return is_check and item.name.partition("[")[0].removeprefix("test_") in WHOLE_RUNS | LAWS | OF_DISTRIBUTIONS


def _function(item: Any) -> str:
    """Return a key that items with different parameters share; classes of the conformance suite count as parameters."""
    is_check = getattr(item.cls, "subject", None) and getattr(item.cls, "kind", None)
    return f"{item.cls.kind}::{item.originalname}" if is_check else item.nodeid.partition("[")[0]


_PARAM = type(pytest.param(0))


def _positions(item: Any) -> Iterator[int]:
    """Yield the position of each parameter's value; parameters given together count as one."""
    fixtures = dict(item.callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        together = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        own = [item.callspec.params[name] for name in together]
        for name in together:
            del fixtures[name]
        rows = (v.values if isinstance(v, _PARAM) else [v] if len(together) == 1 else v for v in values)
        yield next(number for number, row in enumerate(rows) if all(one is other for one, other in zip(row, own, strict=True)))
    yield from fixtures.values()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Triton kernels on a GPU or in Triton's interpreter; see ``tests/kit/interpreted_kernels.py``."""
    from tests.kit.interpreted_kernels import kernels_or_skip

    yield from kernels_or_skip(monkeypatch)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Return a function that imports a script of ``tools/``, by its path in the repository."""

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), Path(__file__).parent / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # classes of the script look themselves up there
        spec.loader.exec_module(module)
        return module

    return load
