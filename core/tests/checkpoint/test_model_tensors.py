"""Parts of a model: each has tensors that are computed together, on demand."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, get_ident

import pytest
import torch
from torch import Tensor

from quark.checkpoint.model_tensors import Part, small_joined


def test_parts_are_made_when_they_are_asked_for() -> None:
    log: list[str] = []

    def lazily(name: str, size: int) -> Part:
        return Part({name: torch.zeros(size, dtype=torch.uint8, device="meta")}, lambda: log.append(name) or {})

    parts = small_joined([lazily("a", 1), lazily("b", 1 << 24)])
    assert log == []
    next(parts).make()
    assert log == ["a"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_parts_are_made_as_one_by_several_threads(two_threads: None) -> None:
    both, sizes = Barrier(2), {"a": 1, "b": 2, "large": 1 << 24, "c": 1, "larger": 1 << 25}

    def made(name: str) -> Part:
        def make() -> dict[str, Tensor]:
            if name in "ab":
                both.wait(60)  # the other part is made at the same time
            return {name: torch.full((sizes[name],), len(name), dtype=torch.uint8)}

        return Part({name: torch.empty(sizes[name], dtype=torch.uint8, device="meta")}, make)

    joined = list(small_joined([made(name) for name in sizes]))
    assert [list(part.meta) for part in joined] == [["a", "b"], ["large", "c"], ["larger"]]
    for part in joined:
        assert {name: (t.numel(), int(t[0])) for name, t in part.make().items()} == {name: (sizes[name], len(name)) for name in part.meta}


def test_parts_of_another_device_are_made_by_the_calling_thread(two_threads: None) -> None:
    makers: list[int] = []
    part = Part({}, lambda: makers.append(get_ident()) or {}, torch.device("meta"))
    joined = Part.joined([Part({}, dict), part, part])
    joined.make()
    assert joined.device == torch.device("meta")
    assert makers == [get_ident()] * 2
