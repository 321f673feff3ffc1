"""What holds for every test of the repository."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the law it is an example of.
settings.register_profile("quark", deadline=None)
settings.load_profile("quark")


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """A function that imports a script of ``tools/``, by its path in the repository."""

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), Path(__file__).parent / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # classes of the script look themselves up there
        spec.loader.exec_module(module)
        return module

    return load
