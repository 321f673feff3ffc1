"""Functions that load the tokenizer of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quark.errors import CheckpointError
from quark.models.hf.custom_code import refuse_code
from quark.models.hf.json_files import bounded_bytes, read_json, reading, refuse_link_out

# This matches a token id of eight digits or more. A tokenizer allocates memory for all ids up to the largest
# one, so such an id would need too much time and memory.
_FAR_ID = re.compile(rb'":(?<!length":)\s*(\d{8,18})\s*[,}]')

_NECESSARY = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
TOKENIZER_FILES = (
    *_NECESSARY,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Names of files from which a tokenizer is loaded. At least one file of `_NECESSARY` must exist."""


_FILES_OF = {
    "tokenizer_file": ("tokenizer.json",),
    "vocab_file": ("tokenizer.model", "vocab.json", "vocab.txt"),
    "merges_file": ("merges.txt",),
}
"""Dictionary from an entry of tokenizer_config.json to the files of a checkpoint that the entry may mean."""


def _own_files(path: Path) -> dict[str, str | None]:
    """Return a dictionary from each key of tokenizer_config.json that names a file to the path of this file
    in the checkpoint.

    The value is None if the checkpoint has no such file. Many checkpoints name a file on the machine on which
    they were made, and some releases of transformers would read such a file if it existed. The caller passes
    the result to transformers, so that only files of the checkpoint are read.
    """
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    own: dict[str, str | None] = {}
    for key, named in ((key, value) for key, value in config.items() if key.endswith("_file") and isinstance(value, str)):
        names = _FILES_OF.get(key, (Path(named).name,))
        own[key] = next((str(path / name) for name in names if (path / name).is_file()), None)
    return own


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a checkpoint, or None if the checkpoint has no tokenizer.

    Args:
        path: Directory of the checkpoint.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.

    Raises:
        CheckpointError: The tokenizer is damaged, or one of its files is a link to a file outside the
            checkpoint.
        UnsupportedError: The tokenizer needs code from the checkpoint, and this code is not allowed to run.
    """
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _NECESSARY):
        return None
    for file in (*path.iterdir(), *path.glob("additional_chat_templates/*")):
        # No tokenizer reads a README, a LICENSE or another folder.
        if file.name == "additional_chat_templates" or (file.suffix not in ("", ".md") and not file.is_dir()):
            refuse_link_out(file, path)
    for file in (path / name for name in TOKENIZER_FILES if (path / name).is_file()):
        if far := _FAR_ID.search(bounded_bytes(file)):
            raise CheckpointError(f"'{file}' has the token id {int(far[1]):,}, but no vocabulary is so large. Fetch the file again")
    try:
        with reading(path, "its tokenizer is damaged; fetch tokenizer.json and tokenizer_config.json again"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True, **_own_files(path))
            tokenizer("some text")  # a tokenizer checks some settings only when it is called
    except CheckpointError:
        if not trust_remote_code:
            refuse_code(path / "tokenizer_config.json")
        raise
    return tokenizer
