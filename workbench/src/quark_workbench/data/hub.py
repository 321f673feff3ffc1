"""Sources of samples that load data sets with the package `datasets`.

One source loads any data set by its name or from a directory that `save_to_disk` wrote. The other sources
load data sets on which papers calibrate.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from quark.base.shortages import refuse_failed_import
from quark.errors import CalibrationError
from quark_workbench.data.extras import extra
from quark_workbench.data.samples import Sample, samples_of, value_of

__all__ = ["cnn_dailymail", "huggingface", "pileval", "ultrachat", "wikitext"]


def huggingface(name: str, config: str | None = None, split: str = "train", column: str | None = None) -> Iterator[Sample]:
    """Yield one sample for each row of a data set.

    Args:
        name: A name on the Hugging Face Hub or a local directory, as for `datasets.load_dataset`, or a
            directory that `save_to_disk` wrote.
        config: Configuration of the data set; None if it has only one.
        split: Name of the split.
        column: Column that holds the text or the messages; by default "text", or else "messages".

    Raises:
        CalibrationError: There is no such data set, it cannot be downloaded, or a row is not a sample.
        MissingPluginError: The package `datasets` is not installed.
    """
    yield from samples_of(((f"the data set '{name}'", row) for row in _rows(name, config, split)), column)


def pileval(split: str = "validation") -> Iterator[Sample]:
    """Yield texts of the Pile's validation data, on which AWQ calibrates.

    Args:
        split: Name of the split.
    """
    yield from huggingface("mit-han-lab/pile-val-backup", split=split)


def wikitext(split: str = "train", config: str = "wikitext-2-raw-v1", rows: int | None = None) -> Iterator[Sample]:
    """Yield the text of WikiText as one sample. The rows are joined as in GPTQ's code.

    Args:
        split: Name of the split.
        config: Name of the configuration, which selects a version of WikiText.
        rows: Number of rows to use, from the start of the split; None for all rows.
    """
    where = "the data set 'wikitext'"
    yield "\n\n".join(str(value_of(row, "text", where)) for row in islice(_rows("Salesforce/wikitext", config, split), rows))


def cnn_dailymail(split: str = "train", config: str = "3.0.0") -> Iterator[Sample]:
    """Yield articles of CNN and the Daily Mail.

    Args:
        split: Name of the split.
        config: Name of the configuration, which selects a version of the data set.
    """
    yield from huggingface("abisee/cnn_dailymail", config, split, "article")


def ultrachat(split: str = "train_sft") -> Iterator[Sample]:
    """Yield chats of UltraChat 200k.

    Args:
        split: Name of the split.
    """
    yield from huggingface("HuggingFaceH4/ultrachat_200k", split=split, column="messages")


def _rows(name: str, config: str | None, split: str) -> Any:
    """Return the rows of one split of a data set."""
    datasets = extra("datasets", "data sets of the Hugging Face Hub")
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(name)
            rows = saved[split] if isinstance(saved, dict) else saved
        else:
            rows = datasets.load_dataset(name, config, split=split)
        for column, feature in (getattr(rows, "features", None) or {}).items():
            if isinstance(feature, datasets.Image | datasets.Audio):  # keep files encoded: quark decodes them
                rows = rows.cast_column(column, type(feature)(decode=False))
        return rows
    except Exception as error:  # errors of any class: the network, the cache, a missing split
        refuse_failed_import(error, f"the data set '{name}' (split '{split}') cannot be loaded")
        raise CalibrationError(
            f"the data set '{name}' (split '{split}') cannot be loaded: {type(error).__name__}: {error}. Check its name and the network, "
            "or use local files"
        ) from error
