"""`quark.base.parallel` gives the same results with any number of threads, and restores torch's settings."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.base.parallel import SMALL, beside, coarsely, one_thread, parallel_map, row_slices


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(rows=st.integers(0, 50), length=st.integers(0, 20), elements=st.integers(1, 200))
def test_row_slices_cover_all_rows_once_in_order(rows: int, length: int, elements: int) -> None:
    slices = row_slices(rows, length, elements)
    assert [r for part in slices for r in range(rows)[part]] == list(range(rows))
    assert all((part.stop - part.start) * length <= max(elements, length) for part in slices)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parallel_map_returns_results_in_order(threads: int) -> None:
    torch.set_num_threads(threads)
    assert parallel_map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
    assert parallel_map(lambda i: i, []) == []


def test_parallel_map_gives_every_number_of_threads_the_same_bits() -> None:
    x = torch.randn(300, 257, generator=torch.Generator().manual_seed(0))

    def product(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        return torch.cat(parallel_map(lambda rows: x[rows] @ x.t(), row_slices(300, 1, 37)))

    assert torch.equal(product(2), product(1))
    assert torch.equal(product(3), product(1))


def test_parallel_map_computes_with_one_torch_thread_in_each_thread_and_nested_calls_stay_in_theirs() -> None:
    torch.set_num_threads(3)
    together = threading.Barrier(3)  # all three threads have an item at the same time

    def work(_: int) -> tuple[int, int, bool]:
        together.wait(timeout=60)
        own = threading.get_ident()
        return own, torch.get_num_threads(), all(ident == own for ident in parallel_map(lambda _: threading.get_ident(), range(4)))

    results = parallel_map(work, range(3))
    assert len({ident for ident, _, _ in results}) == 3
    assert threading.get_ident() in {ident for ident, _, _ in results}
    assert all(count == 1 and is_alone for _, count, is_alone in results)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parallel_map_raises_the_error_of_the_first_item_that_fails(threads: int) -> None:
    torch.set_num_threads(threads)

    def work(i: int) -> int:
        if i in (5, 7):
            raise LookupError(i)
        return i

    with pytest.raises(LookupError) as caught:
        parallel_map(work, range(40))
    assert caught.value.args == (5,)
    assert torch.get_num_threads() == threads
    assert parallel_map(lambda i: i, range(4)) == [0, 1, 2, 3]


def test_no_setting_of_threads_leaks() -> None:
    torch.set_num_threads(2)
    parallel_map(lambda i: i, range(8))
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (2, [2])


@pytest.mark.parametrize("is_enabled", [True, False])
def test_parallel_map_keeps_the_callers_grad_and_inference_mode(is_enabled: bool) -> None:
    torch.set_num_threads(2)
    both = threading.Barrier(2)

    def modes(_: int) -> tuple[bool, bool]:
        both.wait(timeout=60)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.set_grad_enabled(is_enabled):
        assert parallel_map(modes, range(2)) == [(is_enabled, False)] * 2
    with torch.inference_mode():
        assert parallel_map(modes, range(2)) == [(False, True)] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_threads_of_its_own_and_both_processes_end() -> None:
    program = """
import os, torch
from quark.base.parallel import parallel_map
torch.set_num_threads(2)
assert parallel_map(lambda i: i, range(9)) == list(range(9))
child = os.fork()
torch.set_num_threads(2)
assert parallel_map(lambda i: i + 1, range(9)) == list(range(1, 10))
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=120, check=False, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_coarsely_operations_take_one_thread_and_parallel_map_takes_all(threads: int) -> None:
    torch.set_num_threads(threads)
    together = threading.Barrier(threads, timeout=20)  # broken, and so an error, where fewer threads take the items

    def work(_: int) -> tuple[int, list[int]]:
        together.wait()
        return torch.get_num_threads(), parallel_map(lambda _: threading.get_ident(), range(3))

    with coarsely(100):
        assert torch.get_num_threads() == 1
        results = parallel_map(work, range(threads))
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    for inside, nested in results:
        assert inside == 1
        assert len(set(nested)) == 1  # a call inside of an item stays in its thread


def test_coarsely_changes_nothing_for_large_matrices() -> None:
    torch.set_num_threads(2)
    with coarsely(SMALL + 1):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_work_beside_is_done_by_another_thread_where_there_is_one(threads: int) -> None:
    torch.set_num_threads(threads)
    with coarsely(100), torch.no_grad():
        result = beside(lambda: (threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))
        ident, inside, has_grad = result()
        assert (inside, has_grad) == (1, False)
        assert (ident == threading.get_ident()) == (threads == 1)
        assert result()[0] == ident, "computed once"
        # the thread takes its part of other work when it has done its own
        assert parallel_map(lambda x: x + 1, range(4)) == [1, 2, 3, 4]


def test_work_beside_is_done_at_once_outside_of_coarsely_and_on_large_matrices() -> None:
    torch.set_num_threads(2)
    done: list[int] = []
    beside(lambda: done.append(threading.get_ident()))
    with coarsely(SMALL + 1):
        beside(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()] * 2


def test_an_error_of_work_beside_comes_out_where_its_result_is_asked_for() -> None:
    torch.set_num_threads(2)
    with coarsely(100):
        result = beside(lambda: torch.zeros(0)[0])
        with pytest.raises(IndexError):
            result()
