"""Ranks receive data as it was sent, and divide work among them completely."""

from __future__ import annotations

import copyreg
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.base.ranks import ALONE, Ranks, _Unpickler, owners
from quark.errors import RankError
from quark_devkit.threads import in_threads


def test_values_are_gathered_in_the_order_of_ranks_with_all_bits_of_their_tensors() -> None:
    tensors = [torch.randn(3, 4, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16).t() for n in range(3)]
    for gathered in in_threads(lambda ranks: ranks.gather({"x": tensors[ranks.rank], "n": ranks.rank, "e": torch.empty(0, 5)}), 3):
        assert [each["n"] for each in gathered] == [0, 1, 2]
        assert all(torch.equal(each["x"], x) and each["x"].dtype is x.dtype for each, x in zip(gathered, tensors, strict=True))
        assert all(each["e"].shape == (0, 5) for each in gathered)


def test_values_are_gathered_if_picklers_have_no_attributes_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Since Python 3.13 `persistent_id` cannot be set on a pickler; here no attribute can, in every version.
    class Closed(pickle.Pickler):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"'{name}' is read-only")

    monkeypatch.setattr(pickle, "Pickler", Closed)
    assert in_threads(lambda ranks: [x.tolist() for x in ranks.gather(torch.full((1,), ranks.rank))], 2) == [[[0], [1]]] * 2


def test_sums_facts_and_broadcasts_are_the_same_on_all_ranks() -> None:
    def exchange(ranks: Ranks) -> tuple[object, ...]:
        x = torch.full((2,), float(ranks.rank))
        ranks.sum_(x)
        own = ranks.rank if ranks.rank else None
        return (
            ranks.sum(ranks.rank + 1),
            x.tolist(),
            ranks.any(ranks.rank == 1),
            ranks.all(ranks.rank == 1),
            ranks.first(own),
            ranks.broadcast(own, 2),
        )

    assert in_threads(exchange, 3) == [(6, [3.0, 3.0], True, False, 1, 2)] * 3


def test_one_rank_has_nothing_to_exchange() -> None:
    thing = object()
    assert ALONE.gather(thing) == [thing]


@given(st.integers(1, 9), st.integers(0, 40))
def test_parts_are_consecutive_and_differ_by_one_at_most(size: int, count: int) -> None:
    parts = [list(range(count))[Ranks(rank, size).part(count)] for rank in range(size)]
    assert [n for part in parts for n in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8), st.integers(0, 1000))
def test_no_rank_owns_more_than_its_share_and_one_piece(sizes: list[int], ranks: int, first: int) -> None:
    owner_of = owners(sizes, ranks, first)
    loads = [sum(size for size, owner in zip(sizes, owner_of, strict=True) if owner == rank) for rank in range(ranks)]
    loads[0] += first
    # The last piece that a rank takes goes to the one with the least load, which is at most the mean.
    assert max(loads) <= max(first, (sum(sizes) + first) / ranks + max(sizes, default=0))


def test_where_one_rank_fails_the_others_do_not_wait() -> None:
    stopped: list[type[BaseException]] = []

    def fail(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("disk on fire")
        try:
            ranks.barrier()
        except RankError as error:
            stopped.append(type(error))
            raise

    with pytest.raises(ValueError, match="disk on fire"):
        in_threads(fail, 3)
    assert stopped == [RankError] * 2


@pytest.mark.parametrize("thing", [subprocess.Popen, eval, torch.load, copyreg.__newobj__], ids=lambda thing: thing.__name__)
def test_a_message_that_names_what_could_run_programs_is_refused(thing: object) -> None:
    with pytest.raises(RankError, match="which ranks may not send"):
        in_threads(lambda ranks: ranks.gather(thing), 2)


@pytest.mark.parametrize("name", ["os.getcwd", "getcwd"])
def test_a_message_reaches_nothing_that_a_module_has_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_module")
    vars(module).update(os=os, getcwd=os.getcwd)
    monkeypatch.setitem(sys.modules, "a_module", module)
    texts = (b"\x8c" + bytes([len(text)]) + text for text in (b"a_module", name.encode()))
    with pytest.raises(RankError, match="which ranks may not send"):
        _Unpickler(b"\x80\x04" + b"".join(texts) + b"\x93)R.", ()).load()
