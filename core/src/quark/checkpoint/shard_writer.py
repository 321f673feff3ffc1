"""Streamed writing of safetensors files. Tensors that are written need not stay in memory.

The layout of the files must be known beforehand (`quark.checkpoint.shard_layout`). The writer writes headers
first, and then tensors in any order. Several runs or processes may open the same files, one after another or
at the same time.
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
    """A writer of the files of a `ShardLayout`. Tensors can be written in any order.

    The writer is a context manager. When the ``with`` statement ends, the files are closed.

    If a file already has the header that the layout describes, the content of the file stays, because an
    earlier writer or another process has written it. Other files are created.

    Args:
        layout: Layout of the files.
        directory: The output directory, which must exist.

    Raises:
        OSError: The file system reports an error. If there is not enough space on the disk for all tensors,
            the error is ``ENOSPC``, and no file is written.
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
            # While this thread writes one part, the caller computes the next one, so at most two parts are in
            # memory. Another thread waits for the disk.
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
        """Return whether a tensor with the full name ``name`` was announced."""
        return name in self._layout.places

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to write tensors to their places in the files. The keys of ``tensors`` are full names.

        When this method returns, a thread may still be writing the tensors. The next call waits for the
        thread.
        """
        self._refuse_others(tensors)
        self._wait()
        self._unstored += tensors
        self._pending = self._thread.submit(self._write_all, tensors)

    def write_beside(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to write tensors in a second thread. Meanwhile, `write` can write other tensors.

        The tensors must stay in memory until they are written. `when_stored` does not report them. If the
        writing fails, a later method call raises the error, at the latest the call of `finish`.
        """
        self._refuse_others(tensors)
        self._storing.append(self._storing_thread.submit(self._write_all, tensors))

    def _refuse_others(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that tensors have the announced shapes and dtypes, and record the files that will change."""
        for name, tensor in tensors.items():
            place = self._layout.places[name]
            if tensor.shape != place.meta.shape or tensor.dtype != place.meta.dtype:
                raise RuntimeError(
                    f"'{name}' was announced as {place.meta.dtype}{list(place.meta.shape)}, but is {tensor.dtype}{list(tensor.shape)}. An "
                    "exporter must write each tensor with the announced dtype and shape"
                )
            self._written_to.add(place.file)

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``then`` with the checksums of the written tensors as soon as the tensors are on the disk.

        Another thread calls ``then``. The checksums do not include tensors for which this method was already
        called. If ``then`` raises an error, a later method call of this object raises the same error.
        """
        while len(self._storing) >= _LAG:
            self._storing.popleft().result()
        names, self._unstored = self._unstored, []
        files, self._written_to = self._written_to, set()
        self._storing.append(self._storing_thread.submit(self._store, self._pending, files, names, then))

    def adopt(self, checksums: Mapping[str, str]) -> list[str]:
        """Record those tensors as written whose bytes in the files have the expected checksums.

        Return the names of all other tensors in ``checksums``.

        Args:
            checksums: A dictionary from the full name of a tensor to the expected checksum. `when_stored` has
                passed this checksum to ``then``, for example in an earlier run.
        """
        same = {name: expected for name, expected in checksums.items() if name in self and checksum(self._stored(name)) == expected}
        self._checksums |= same
        return [name for name in checksums if name not in same]

    def read(self, name: str) -> Tensor:
        """Read a tensor from the files and return it in newly allocated memory."""
        place = self._layout.places[name]
        data = torch.cat([torch.empty(0, dtype=torch.uint8), *(chunk.clone() for chunk in self._stored(name))])
        return data.view(place.meta.dtype).reshape(place.meta.shape)

    def names_under(self, module: str) -> Sequence[str]:
        """Return the names of the announced tensors that belong directly to the module ``module``.

        The names are relative to this module.
        """
        return self._layout.names_under.get(module, ())

    def written(self) -> dict[str, str]:
        """Wait for pending tensors. Return a dictionary from full name to checksum of all written tensors."""
        self._wait(for_disk=True)
        return dict(self._checksums)

    def count_as_written(self, checksums: Mapping[str, str]) -> None:
        """Record that another process has written tensors.

        ``checksums`` maps the full names of these tensors to their checksums.
        """
        self._checksums |= checksums

    def finish(self) -> None:
        """Wait until all parts are on the disk, and then write the index and the checksums.

        Raises:
            OutputError: A file was removed or replaced since this writer opened it.
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
        """Raise OutputError if a file that this writer has written was removed, replaced or truncated."""
        sizes = self._layout.file_sizes()
        for (name, header), file in zip(self._layout.headers.items(), self._files, strict=True):
            path, written = self._directory / name, os.fstat(file)
            is_whole = written.st_size == sizes[name] and pread(file, len(header), 0) == header
            if not is_whole or not path.is_file() or not os.path.samestat(path.stat(), written):
                raise OutputError(
                    f"'{path}' was removed, replaced or truncated after this run wrote it. Start the run again, and let no other program "
                    "change that directory"
                )

    def _wait(self, *, for_disk: bool = False) -> None:
        """Wait until no part is being written. If ``for_disk`` is True, wait until everything is on the disk.

        If a writing thread has failed, this method raises the thread's error.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        while self._storing and (for_disk or self._storing[0].done()):
            self._storing.popleft().result()

    def _write_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their places, and record their checksums.

        This method runs in a thread. Tensors on an accelerator are copied to the CPU in this thread, so that
        the thread of the caller does not wait for the copy.
        """
        for name, tensor in tensors.items():
            place, data = self._layout.places[name], tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._checksums[name] = checksum(self._written(place, data))

    def _written(self, place: Place, data: Tensor) -> Iterator[Tensor]:
        """Write ``data`` block by block.

        Yield each block after it was written. The caller uses the block while it is in the CPU's cache.
        """
        for number, block in enumerate(data.split(BLOCK)):
            write_at(self._files[place.file], memoryview(block.numpy().data), place.offset + number * BLOCK)
            yield block

    def _store(
        self, written: Future[None] | None, files: Iterable[int], names: Iterable[str], then: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Wait for the future ``written``, and until ``files`` are on the disk. Then call ``then``."""
        if written is not None:
            written.result()
        for number in sorted(files):
            sync_data(self._files[number])
        then({name: self._checksums[name] for name in names})

    def _stored(self, name: str) -> Iterator[Tensor]:
        """Read the bytes of a tensor from its file, and yield them in chunks of dtype uint8.

        If the file ends before the end of the tensor, yield fewer bytes.
        """
        place = self._layout.places[name]
        return stored_bytes(self._files[place.file], place.offset, place.size)


def _begin(file: int, header: bytes, size: int) -> None:
    """Write the header of an open file, unless the file already has this header.

    ``size`` is the final size of the file. If a file without this header is larger, it is truncated.
    """
    if pread(file, len(header), 0) == header:
        return
    write_at(file, memoryview(header), 0)
    os.ftruncate(file, min(size, os.fstat(file).st_size))
    sync_data(file)
