"""Streamed writing of safetensors files: written tensors are not held in memory.

The layout of the files is known beforehand (`quark.checkpoint.shard_layout`). Headers are written first, and
tensors in any order; several runs or processes may open the same files one after another or at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from quark.base.files import allocated_bytes, open_file, pread, sync_data, write_at
from quark.base.names import folded
from quark.checkpoint.checksum import BLOCK, checksum, stored_bytes
from quark.checkpoint.destination import refuse_full_disk
from quark.checkpoint.run_file import begin_run_file
from quark.checkpoint.shard_layout import Place, ShardLayout
from quark.errors import OutputError
from quark.models.hf.shards import INDEX

_LAG = 2
"""Number of pending `ShardWriter.when_stored` calls before the caller waits for the disk."""


class ShardWriter:
    """The files of a layout, filled in any order. The context manager closes them.

    Files with the headers of the layout keep their content, because an earlier writer or another process has
    written it. Other files are created.

    Args:
        layout: Layout of the files.
        directory: The output directory, which exists.

    Raises:
        OSError: From the file system; with ``ENOSPC`` before any file is written if the tensors do not fit.
    """

    def __init__(self, layout: ShardLayout, directory: Path) -> None:
        self._layout = layout
        self._directory = directory
        self._checksums: dict[str, str] = {}
        self._unstored: list[str] = []
        self._written_to: set[int] = set()
        self._files: list[int] = []
        held = sum(allocated_bytes(directory / name) for name in layout.files if (directory / name).exists())
        refuse_full_disk(directory, layout.size - held)
        with ExitStack() as stack:
            sizes = layout.file_sizes()
            for name, header in layout.headers.items():
                self._files.append(open_file(directory / name, os.O_RDWR | os.O_CREAT, 0o644))
                stack.callback(os.close, self._files[-1])
                _begin(self._files[-1], header, sizes[name])
            # While one part is written, the next is computed: at most two are in memory. Nothing waits for
            # the disk meanwhile.
            self._thread = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            self._storing_thread = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            self._closing = stack.pop_all()
        self._pending: Future[None] | None = None
        self._storing: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of that full name was announced."""
        return name in self._layout.places

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Start writing tensors, by full name, to their places in the files.

        The writing may continue in the background, until the next call.
        """
        self._refuse_others(tensors)
        self._wait()
        self._unstored += tensors
        self._pending = self._thread.submit(self._write_all, tensors)

    def write_beside(self, tensors: Mapping[str, Tensor]) -> None:
        """Start writing tensors that stay in memory anyway; `when_stored` leaves them out.

        Other tensors are written meanwhile. An error is raised by a later call, at the latest by `finish`.
        """
        self._refuse_others(tensors)
        self._storing.append(self._storing_thread.submit(self._write_all, tensors))

    def _refuse_others(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that tensors match their announcement, and note the files that they are written to."""
        for name, tensor in tensors.items():
            place = self._layout.places[name]
            if tensor.shape != place.meta.shape or tensor.dtype != place.meta.dtype:
                raise RuntimeError(
                    f"'{name}' was announced as {place.meta.dtype}{list(place.meta.shape)}, but is {tensor.dtype}{list(tensor.shape)}: an "
                    "exporter must write each tensor as announced"
                )
            self._written_to.add(place.file)

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``then`` with the checksums of the written tensors when these are on the disk.

        The call happens in the background. Checksums of earlier calls are left out. If ``then`` raises, the
        next method that is called raises the error.
        """
        while len(self._storing) >= _LAG:
            self._storing.popleft().result()
        names, self._unstored = self._unstored, []
        files, self._written_to = self._written_to, set()
        self._storing.append(self._storing_thread.submit(self._store, self._pending, files, names, then))

    def adopt(self, checksums: Mapping[str, str]) -> list[str]:
        """Count tensors as written if their bytes have these checksums, and return the names of the others.

        Args:
            checksums: Checksums by full name of a tensor, from `when_stored`, for instance of an earlier run.
        """
        same = {name: expected for name, expected in checksums.items() if name in self and checksum(self._stored(name)) == expected}
        self._checksums |= same
        return [name for name in checksums if name not in same]

    def read(self, name: str) -> Tensor:
        """Return a tensor from the files, in its own memory."""
        place = self._layout.places[name]
        data = torch.cat([torch.empty(0, dtype=torch.uint8), *(chunk.clone() for chunk in self._stored(name))])
        return data.view(place.meta.dtype).reshape(place.meta.shape)

    def names_under(self, module: str) -> Sequence[str]:
        """Return the names of a module's own announced tensors, relative to the module."""
        return self._layout.names_under.get(module, ())

    def written(self) -> dict[str, str]:
        """Wait for pending tensors, and return the checksums of all tensors in the files, by name."""
        self._wait(for_disk=True)
        return dict(self._checksums)

    def count_as_written(self, checksums: Mapping[str, str]) -> None:
        """Count tensors that another process has written, with their checksums."""
        self._checksums |= checksums

    def finish(self) -> None:
        """Wait until all parts are written, and write the index and the checksums.

        Raises:
            OutputError: A file was removed or replaced meanwhile.
            RuntimeError: An announced tensor was not written.
        """
        self._wait(for_disk=True)
        if unwritten := sorted(self._layout.places.keys() - self._checksums):
            raise RuntimeError(f"{len(unwritten)} announced tensor(s) were not written: {folded(unwritten)}")
        self._refuse_replaced()
        index = self._layout.index()
        if index is not None:
            (self._directory / INDEX).write_text(index, encoding="utf-8", newline="\n")
        begin_run_file(self._directory, self._layout.headers, self._checksums)

    def _refuse_replaced(self) -> None:
        """Raise OutputError unless the layout's file names still lead to the files that were written."""
        sizes = self._layout.file_sizes()
        for (name, header), file in zip(self._layout.headers.items(), self._files, strict=True):
            path, written = self._directory / name, os.fstat(file)
            is_whole = written.st_size == sizes[name] and pread(file, len(header), 0) == header
            if not is_whole or not path.is_file() or not os.path.samestat(path.stat(), written):
                raise OutputError(
                    f"'{path}' was removed, replaced or truncated after this run wrote it. Run it again, and let no other program change "
                    "that directory"
                )

    def _wait(self, *, for_disk: bool = False) -> None:
        """Wait until no part is being written, or, if ``for_disk``, until everything is on the disk.

        Raises the errors of the writing threads.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        while self._storing and (for_disk or self._storing[0].done()):
            self._storing.popleft().result()

    def _write_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors; tensors on an accelerator are copied here, so that the caller does not wait."""
        for name, tensor in tensors.items():
            place, data = self._layout.places[name], tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._checksums[name] = checksum(self._written(place, data))

    def _written(self, place: Place, data: Tensor) -> Iterator[Tensor]:
        """Write bytes to a place, and yield each block of them while it is in the processor's cache."""
        for number, block in enumerate(data.split(BLOCK)):
            write_at(self._files[place.file], memoryview(block.numpy().data), place.offset + number * BLOCK)
            yield block

    def _store(
        self, written: Future[None] | None, files: Iterable[int], names: Iterable[str], then: Callable[[Mapping[str, str]], None]
    ) -> None:
        if written is not None:
            written.result()
        for number in sorted(files):
            sync_data(self._files[number])
        then({name: self._checksums[name] for name in names})

    def _stored(self, name: str) -> Iterator[Tensor]:
        """Yield the bytes of a tensor in chunks, uint8; fewer if the file ends early."""
        place = self._layout.places[name]
        return stored_bytes(self._files[place.file], place.offset, place.size)


def _begin(file: int, header: bytes, size: int) -> None:
    """Write the header of an open file, unless it has been written; ``size`` is the file's final size."""
    if pread(file, len(header), 0) == header:
        return
    write_at(file, memoryview(header), 0)
    os.ftruncate(file, min(size, os.fstat(file).st_size))
    sync_data(file)
