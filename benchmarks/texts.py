"""Fetch four kinds of text for calibration and evaluation, with ``python -m benchmarks.texts OUT_DIR``.

==========  ==================================================================================================
file        text
==========  ==================================================================================================
foldoc.txt  a dictionary of computing (Debian's ``dict-foldoc``)
devil.txt   prose: Ambrose Bierce's dictionary (``dict-devil``)
code.txt    Python: modules of the standard library of this interpreter
german.txt  another language: the questions and answers on Debian in German (``debian-faq-de``)
==========  ==================================================================================================

apt fetches the Debian packages from the configured mirror. The program leaves existing files unchanged.
Compare the printed digests to see whether the texts are the same as in an earlier measurement.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGED = {
    "foldoc": ("dict-foldoc", "usr/share/dictd/foldoc.dict.dz"),
    "devil": ("dict-devil", "usr/share/dictd/devil.dict.dz"),
    "german": ("debian-faq-de", "usr/share/doc/debian/FAQ/debian-faq.de.txt.gz"),
}
"""Package of each text, and the compressed file in it."""
MODULES = (
    "argparse ast asyncio/base_events bdb calendar collections/__init__ configparser csv dataclasses datetime decimal difflib email/message"
)
MODULES += " fractions ftplib functools heapq http/client imaplib inspect ipaddress json/decoder locale logging/__init__ mailbox optparse"
MODULES += " pathlib pickle pstats random shutil smtplib socket statistics subprocess tarfile textwrap threading traceback turtle"
MODULES += " typing urllib/request uuid weakref zipfile"
"""Modules of the standard library that make up the text ``code``, in this order."""


def fetch(out: Path) -> None:
    """Write the missing texts into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    code = out / "code.txt"
    if not code.exists():
        library = Path(sysconfig.get_path("stdlib"))
        sources = [library / f"{name}.py" for name in MODULES.split()]
        code.write_text("".join(source.read_text(encoding="utf-8") for source in sources if source.exists()), encoding="utf-8")
    for kind, (package, inside) in PACKAGED.items():
        target = out / f"{kind}.txt"
        if not target.exists():
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
                (archive,) = Path(folder).glob("*.deb")
                subprocess.run(["dpkg", "-x", str(archive), f"{folder}/unpacked"], check=True)
                target.write_bytes(gzip.decompress(Path(folder, "unpacked", inside).read_bytes()))


def windows(tokenizer: Any, path: Path, half: int, count: int, length: int) -> Tensor:
    """Return windows of one half of a text as tokens ``[count, length]``.

    Each window begins at the start of a line.

    Each window is tokenized by itself, with the tokenizer's start and end tokens.

    Args:
        tokenizer: A tokenizer of transformers.
        path: File of the text.
        half: 0 for calibration, 1 for evaluation; windows of the two halves never overlap.
        count: Number of windows.
        length: Number of tokens in each window.

    Raises:
        ValueError: The text is too short for that many windows.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    size = len(text) // 2
    part = text[half * size : (half + 1) * size]
    rows = []
    for i in range(count):
        start = part.find("\n", i * size // count) + 1
        tokens = tokenizer(part[start : start + 12 * length], truncation=True, max_length=length, verbose=False)["input_ids"]
        if len(tokens) < length:
            raise ValueError(f"{path}: one half has too few tokens for {count} windows of {length}: give fewer or shorter windows")
        rows.append(torch.tensor(tokens))
    return torch.stack(rows)


def digest(path: Path) -> str:
    """Return the first twelve hexadecimal digits of the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    fetch(args.out)
    print(" ".join(f"{path.stem} {digest(path)}" for path in sorted(args.out.glob("*.txt"))))


if __name__ == "__main__":
    main()
