"""Ranks are the processes that share one run. This module exchanges values between them.

A run of one process uses the same code, but exchanges nothing.

Every exchange is collective: all ranks call the same methods in the same order.
`quark.calibration.sample_grid` decides which rank processes which calibration samples, and which rank adds
which terms of the sums over samples. The program that starts the processes connects them with a `Group`. For
``torchrun``, the module `quark_workbench.process_group` of the distribution quark-workbench provides the
`Group`.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from quark.errors import RankError, UnsupportedError

T = TypeVar("T")


class Group(Protocol):
    """The protocol of objects that transfer data between the ranks of a run.

    Its methods are collective, and raise RankError if another rank has failed.
    """

    def gather(self, data: bytes) -> list[bytes]:
        """Send ``data`` to all ranks, and return a list of the data from all ranks, sorted by rank."""

    def gather_tensors(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Send the uint8 tensor ``x`` to all ranks, and return a list of the tensors from all ranks, sorted
        by rank.

        The tensor of rank *i* has the shape ``[sizes[i]]``. All returned tensors are on the device of ``x``.
        """

    def sum_(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over all ranks. The result has the same bits on every rank."""


@attrs.frozen(eq=False)
class Ranks:
    """One rank of a run. It has an index, the number of ranks, and methods that exchange values between
    ranks.

    Attributes:
        rank: The index of this rank. The first rank has the index 0.
        size: The number of ranks.
        is_deterministic: Whether the terms of a sum over calibration samples are added in an order that does
            not depend on ``size``. If so, the sum has the same bits for any number of ranks.
        group: The object that transfers data between ranks, or None for a run of one rank.

    Example:
        >>> ALONE.gather("what this rank has")
        ['what this rank has']
    """

    rank: int = 0
    size: int = 1
    is_deterministic: bool = False
    group: Group | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that makes directories, prints, and writes the tensors outside the decoder
        blocks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Send ``value`` to all ranks, and return a list of the values from all ranks, sorted by rank.

        A value can be any object that can be pickled. Received tensors are on the device of this rank.

        Raises:
            UnsupportedError: The value cannot be pickled.
        """
        if self.group is None:
            return [value]
        try:
            message = _Message(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UnsupportedError(
                f"a {type(value).__name__} cannot be sent to the other processes of this run ({error}). Run in one process, or make the "
                "object picklable: its class must be at the top level of a module, and its attributes must be picklable"
            ) from error
        return [value if rank == self.rank else each for rank, each in enumerate(_received(self.group, message))]

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of the rank ``source``. The values of the other ranks are ignored."""
        return self.gather(value if self.rank == source else None)[source]  # type: ignore[return-value]

    def first(self, value: T | None) -> T | None:
        """Return the value of the first rank whose value is not None, or None if all values are None."""
        return next((each for each in self.gather(value) if each is not None), None)

    def sum(self, number: int) -> int:
        """Return the sum of ``number`` over all ranks."""
        return sum(self.gather(number))

    def sum_(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over all ranks. ``x`` must be contiguous.

        The order in which the terms are added is not defined.
        """
        if self.group is not None:
            self.group.sum_(x)

    def any(self, fact: bool) -> bool:
        """Return whether ``fact`` is true on any rank."""
        return any(self.gather(bool(fact)))

    def all(self, fact: bool) -> bool:
        """Return whether ``fact`` is true on all ranks."""
        return all(self.gather(bool(fact)))

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        self.gather(None)

    def part(self, count: int) -> slice:
        """Divide ``count`` items among the ranks, and return the slice of the items that this rank processes.

        The slices of all ranks have about the same size.
        """
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


ALONE = Ranks()
"""The `Ranks` of a run of one process."""


def owners(sizes: Sequence[int], ranks: int, first: int = 0) -> list[int]:
    """Assign pieces of work to ranks, and return the rank of each piece. All ranks get nearly the same amount
    of work.

    Pieces are assigned in order of size, the largest first. Each piece goes to the rank with the least work
    so far.

    Args:
        sizes: The sizes of the pieces, in any unit.
        ranks: The number of ranks.
        first: The size of other work that rank 0 has in addition to these pieces.
    """
    loads = [first, *[0] * (ranks - 1)]
    owner_of = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner_of[number] = loads.index(min(loads))
        loads[owner_of[number]] += sizes[number]
    return owner_of


@attrs.frozen(eq=False)
class _Place:
    """A record of where a message has the bytes of a tensor. It also has the tensor's dtype, shape and device
    type.

    The device type has no index, because the index differs from rank to rank.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    def read(self, data: Tensor) -> Tensor:
        """Return the tensor of this record. ``data`` contains the bytes of all tensors of the message."""
        size = self.dtype.itemsize * math.prod(self.shape)
        return data[self.start : self.start + size].view(self.dtype).reshape(self.shape).to(self.device, copy=True)


class _Message:
    """A value as bytes for another rank. The tensors in the value are stored separately, so that tensors on
    GPUs are sent from GPU to GPU.

    Args:
        value: Anything that can be pickled.

    Attributes:
        data: The pickled value, in which a number replaces each tensor, together with the `_Place` of each
            tensor.
        tensors: A uint8 tensor with the bytes of all tensors. If at least one of the tensors is on a GPU,
            this tensor is on that GPU.
    """

    def __init__(self, value: object) -> None:
        file, tensors = io.BytesIO(), list[Tensor]()
        _Pickler(file, tensors).dump(value)
        device = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
        places, parts, size = [], [torch.empty(0, dtype=torch.uint8, device=device)], 0
        for x in tensors:
            places.append(_Place(size, x.dtype, tuple(x.shape), x.device.type))
            part = x.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            parts.append(torch.nn.functional.pad(part, (0, -len(part) % _ALIGNMENT)))
            size += len(parts[-1])
        self.tensors = torch.cat(parts)
        self.data = pickle.dumps((file.getvalue(), places, size, device.type))


_ALIGNMENT = 16


class _Pickler(pickle.Pickler):
    """A pickler that writes a number instead of each tensor of a value, and appends the tensors to a list."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, part: object) -> int | None:
        """If ``part`` is a tensor, append it to the list and return its number. Return None for any other
        object."""
        if type(part) is not Tensor or part.layout is not torch.strided:
            return None
        self._tensors.append(part)
        return len(self._tensors) - 1


def _received(group: Group, message: _Message) -> Iterator[Any]:
    """Send ``message`` to all ranks, and yield the values of the messages from all ranks, sorted by rank."""
    headers = [_Unpickler(data, ()).load() for data in group.gather(message.data)]
    sizes = [size for _, _, size, _ in headers]
    device = next((kind for _, _, size, kind in headers if size and kind != "cpu"), "cpu")
    tensors = group.gather_tensors(message.tensors.to(device), sizes) if any(sizes) else [message.tensors] * len(headers)
    for (body, places, _, _), data in zip(headers, tensors, strict=True):
        yield _Unpickler(body, [place.read(data) for place in places]).load()


class _Unpickler(pickle.Unpickler):
    """An unpickler that reads a value from another rank. From the standard library and torch, it accepts only
    data types."""

    def __init__(self, body: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """Return the tensor with the number ``number``."""
        return self._tensors[number]

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function with this name, if messages between ranks may contain it.

        Raises:
            RankError: Messages may not contain the class or function.
        """
        package = module.partition(".")[0]
        is_foreign = package in sys.stdlib_module_names or package == "torch" or module not in sys.modules
        is_refused = "." in name or (is_foreign and (module, name) not in _NAMED and module != "torch")
        found = None if is_refused else super().find_class(module, name)
        is_imported = getattr(found, "__module__", module) != module  # imported into the module, not defined there
        is_other_of_torch = module == "torch" and not isinstance(found, torch.dtype) and found not in (torch.device, torch.Size)
        if found is None or is_imported or is_other_of_torch:
            raise RankError(
                f"a process of this run sent an object of the type '{module}.{name}', which ranks may not send, so the run was stopped. If "
                "a plugin sends such an object, let it send numbers, text, tensors or a class of the plugin instead"
            )
        return found


_NAMED = {("builtins", name) for name in ("complex", "frozenset", "range", "set", "slice")}
_NAMED |= {("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")}
