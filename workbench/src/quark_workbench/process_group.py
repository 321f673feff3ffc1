"""The connection of the processes that ``torchrun`` has started.

If one process fails, the other processes get its error message. ``torchrun`` (torch.distributed.elastic)
starts the processes and ends all of them when one has failed. It passes each process its number in an
environment variable, and runs a key-value store that outlives the processes. Data are sent over ``gloo``, and
sums of tensors on GPUs are computed over ``nccl``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from quark.base.log import get_logger
from quark.base.ranks import Ranks
from quark.errors import ConfigError, RankError, UnsupportedError

__all__ = ["is_one_of_many", "ranks_of_environment"]

TIMEOUT = timedelta(minutes=30)
"""Maximum time that a rank waits for the others in an exchange: longer than any work that one rank does
alone.
"""
_ERROR = "error"
_PATIENCE = 2.0
"""Seconds that a rank whose connection has broken waits for the other ranks' error messages."""
_SILENCE = 10.0
"""Seconds that a rank waits for the others to start before it logs that it waits."""


def is_one_of_many() -> bool:
    """Return whether ``torchrun`` has started this process as one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def ranks_of_environment(device: torch.device, *, is_deterministic: bool = False) -> Iterator[tuple[Ranks, torch.device]]:
    """Yield two values: the `Ranks` of this process's run, and the device of this process.

    There is only one rank if ``torchrun`` has not started the process.

    If the body of the ``with`` statement raises an exception, the other ranks stop with a RankError. The
    RankError has the message of that exception.

    Args:
        device: Device of the run. For ``"cuda"`` without a number, each process of a machine gets its own
            GPU.
        is_deterministic: As in `quark.base.ranks.Ranks`.

    Raises:
        ConfigError: An environment variable is missing, or all processes of a machine would use one GPU.
        RankError: The other processes cannot be reached.
        UnsupportedError: This build of PyTorch has no torch.distributed.
    """
    if not is_one_of_many():
        yield Ranks(is_deterministic=is_deterministic), device
        return
    if not dist.is_available():
        raise UnsupportedError("this build of PyTorch has no torch.distributed: run in one process, or install another build")
    device = _own_device(device)
    with _waiting_aloud():
        store, rank, size = _meet()
        group = _ProcessGroup(rank, size, store)
        try:
            dist.init_process_group(_backend(device), store=PrefixStore("group", store), rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} cannot reach the other {size - 1} processes of this run: {_first_line(error)}") from error
    try:
        yield Ranks(rank, size, is_deterministic, group), device
        group.gather(b"")  # a rank that ended earlier would close connections that others still use
    except BaseException as error:
        group.report(error)
        raise
    finally:
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


class _ProcessGroup:
    """A `quark.base.ranks.Group` that exchanges data over the default process group of torch.distributed."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self._rank = rank
        self._size = size
        self._store = store

    def gather(self, data: bytes) -> list[bytes]:
        """Do what `quark.base.ranks.Group.gather` says."""
        with self._failing_together():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
        lengths = [int(size) for size in sizes]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return [each.numpy().tobytes() for each in self.gather_tensors(own, lengths)]

    def gather_tensors(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Do what `quark.base.ranks.Group.gather_tensors` says, on the device of ``x``."""
        with self._failing_together():
            longest = max(sizes)
            received = [x.new_empty(longest) for _ in sizes]
            dist.all_gather(received, torch.nn.functional.pad(x, (0, longest - len(x))))
        return [each[:size] for each, size in zip(received, sizes, strict=True)]

    def sum_(self, x: Tensor) -> None:
        """Do what `quark.base.ranks.Group.sum_` says."""
        with self._failing_together():
            dist.all_reduce(x)

    def report(self, error: BaseException) -> None:
        """Send the other ranks the error that stops this rank, unless another rank failed first."""
        if isinstance(error, RankError | SystemExit):
            return  # another rank has failed, and told this one or torchrun, which ends all
        kind = "" if isinstance(error, Exception) and type(error).__module__.startswith("quark.") else f"{type(error).__name__}: "
        with suppress(RuntimeError, ValueError):
            self._store.compare_set(_ERROR, "", f"rank {self._rank} of {self._size} has stopped: {kind}{_first_line(error)}")

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises one for a lost connection, the other for a time-out
            raise self._cause(error) from error

    def _cause(self, error: Exception) -> RankError:
        """Return the error that another rank has reported, or an error that describes ``error``."""
        until = time.monotonic() + _PATIENCE
        is_reached = False  # the store may have ended with the first rank, which holds it without torchrun
        while time.monotonic() < until:
            with suppress(RuntimeError, ValueError):
                if self._store.check([_ERROR]):
                    return RankError(self._store.get(_ERROR).decode(errors="replace"), is_told=True)
                is_reached = True
            time.sleep(0.05)
        return RankError(
            f"another process of this run ended without a message, or has not answered for {TIMEOUT.seconds // 60} minutes: check whether "
            f"it was killed (out of memory?) and whether its machine is reachable. Rank {self._rank} reports: {_first_line(error)}",
            is_told=is_reached,
        )


@contextmanager
def _waiting_aloud() -> Iterator[None]:
    """Log a warning if the body of the ``with`` statement waits long for processes that have not started."""
    told = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    text = (
        "Rank {RANK} waits at {MASTER_ADDR}:{MASTER_PORT} until all {WORLD_SIZE} processes of this run have started, for up to "
        f"{TIMEOUT.seconds // 60} minutes."
    )
    timer = threading.Timer(_SILENCE, lambda: get_logger(__name__).warning(text.format(**told)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _meet() -> tuple[Store, int, int]:
    """Return the store of all processes, the rank of this process, and the number of processes."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: start the processes with "
            "`torchrun --nproc-per-node N -m quark …`, or unset WORLD_SIZE to run in one process"
        )
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the processes of this run cannot connect to {os.environ['MASTER_ADDR']}: {_first_line(error)}") from error
    # The store outlives processes that torchrun restarts, and still has the addresses of the earlier ones.
    return PrefixStore(f"quark/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, size


def _own_device(device: torch.device) -> torch.device:
    """Return the device of this process, which for ``"cuda"`` without a number is one GPU of the machine."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ConfigError(f"all processes would use the device '{device}': give 'cuda', and the processes divide the GPUs of a machine")
    number = int(os.environ.get("LOCAL_RANK", "0"))  # type: ignore[unreachable]
    own = torch.device("cuda", number % max(torch.cuda.device_count(), 1))
    torch.cuda.set_device(own)
    return own


def _backend(device: torch.device) -> str:
    # nccl refuses two processes on one GPU, which only tests need.
    has_own = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if has_own and dist.is_nccl_available() else "gloo"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
