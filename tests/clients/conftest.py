"""A vLLM process that serves all tests, and the file of results, which CLIENTS_RESULTS names (`make clients` sets it)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .client_process import ClientProcess
from .results import Results
from .shown_packages import shown_packages
from .vllm_on_cpu import vllm_process


@pytest.fixture(scope="session")
def results() -> Results:
    path = os.environ.get("CLIENTS_RESULTS")
    return Results(Path(path) if path else None)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientProcess]:
    """vLLM without plugins of this project, even if they are installed beside it."""
    with vllm_process(tmp_path_factory.mktemp("vllm"), VLLM_PLUGINS="") as client:
        yield client


@pytest.fixture(scope="session")
def vllm_with_quark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientProcess]:
    """vLLM that finds our packages."""
    folder = tmp_path_factory.mktemp("vllm_with_quark")
    with vllm_process(folder, PYTHONPATH=str(shown_packages(folder / "site"))) as client:
        yield client
