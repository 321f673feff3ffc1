"""Sources of samples.

Files by their endings, names of the registry, and what is said if there is nothing to read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quark.errors import AmbiguousNameError, CalibrationError, ConfigError, MissingPluginError, PluginError
from quark.plugins import Catalog, DatasetRecord, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_tiny_model import tiny_tokenizer
from quark_workbench.data import read_samples, sample_of, text_of
from quark_workbench.data.extras import extra
from quark_workbench.data.media_rows import MediaRow

CHAT = [{"role": "user", "content": "Hello."}]


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_a_text_file_is_one_sample_and_a_separator_parts_it(tmp_path: Path) -> None:
    file = written(tmp_path / "a.txt", "one\n---\ntwo\n---\n")
    assert list(read_samples(file)) == ["one\n---\ntwo\n---\n"]
    assert list(read_samples(str(file), {"separator": "---\n"})) == ["one\n", "two\n"]


def test_a_file_of_another_ending_is_text(tmp_path: Path) -> None:
    assert list(read_samples(written(tmp_path / "corpus.raw", "some text"))) == ["some text"]


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "one"}\n\n{"text": "two"}\n',
        '"one"\n"two"\n',
        '[{"text": "one"}, "two"]',
        '[\n  {"text": "one"},\n  {"text": "two"}\n]',
    ],
)
def test_json_is_one_value_a_line_or_one_list(tmp_path: Path, content: str) -> None:
    assert list(read_samples(written(tmp_path / "a.jsonl", content))) == ["one", "two"]


def test_json_lines_hold_chats_and_other_columns(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", json.dumps({"messages": CHAT, "body": "text"}) + "\n")
    assert list(read_samples(file)) == [CHAT]
    assert list(read_samples(file, {"column": "body"})) == ["text"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "one"}\n{"text": }\n', "line 2 of .* is not JSON"),
        ('{"body": "one"}\n', "neither a column 'text' nor 'messages': it has body; name one with the option column=NAME"),
        ('{"text": 3}\n', "is a int, which is not a sample"),
        ("nothing of the kind", "is neither JSON lines nor one JSON list"),
        ('{\n"text": "one"\n}', "write one object a line, or a list"),
        ("\n\n", "holds no text"),
        ('{"text": "  "}\n', "holds no text"),
    ],
)
def test_damaged_json_lines_are_refused_with_their_place(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        list(read_samples(written(tmp_path / "a.jsonl", content)))


def test_parquet_files_are_read_row_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", " ", "two"], "chat": [CHAT] * 3}), tmp_path / "a.parquet")
    assert list(read_samples(tmp_path / "a.parquet")) == ["one", "two"]
    assert list(read_samples(tmp_path / "a.parquet", {"column": "chat"})) == [CHAT] * 3
    with pytest.raises(CalibrationError, match="cannot be read as Parquet"):
        list(read_samples(written(tmp_path / "b.parquet", "no table")))


def test_rows_of_all_batches_of_a_parquet_file_are_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParquetFile:
        """Stands in for ``ParquetFile`` of pyarrow, with two batches of rows."""

        def __init__(self, path: Path) -> None:
            assert path == tmp_path / "a.parquet"

        def iter_batches(self) -> Iterator[Any]:
            for rows in ([{"text": "one", "chat": CHAT}, {"text": " ", "chat": CHAT}], [{"text": "two", "chat": 3}]):
                yield SimpleNamespace(to_pylist=lambda rows=rows: rows)

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(ArrowException=OSError))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=ParquetFile))
    written(tmp_path / "a.parquet", "")
    assert list(read_samples(tmp_path / "a.parquet")) == ["one", "two"]
    with pytest.raises(CalibrationError, match=r"a\.parquet' is a int, which is not a sample"):
        list(read_samples(tmp_path / "a.parquet", {"column": "chat"}))


def test_a_directory_is_its_files_in_order_of_name(tmp_path: Path) -> None:
    for name in "ba":
        written(tmp_path / f"{name}.txt", name)
    written(tmp_path / "image.png", "")
    assert list(read_samples(tmp_path)) == ["a", "b"]
    assert text_of(tiny_tokenizer(), read_samples(tmp_path)) == "a\n\nb"
    written(tmp_path / "c.jsonl", '"c"')
    with pytest.raises(CalibrationError, match=r"files of several kinds, \.jsonl, \.txt"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    ("spec", "options", "error", "says"),
    [
        ("nowhere.txt", {}, CalibrationError, "is not a file, a directory or a data source.*pileval"),
        ("text", {}, CalibrationError, "reads files"),
        ("text", {"path": "nowhere"}, CalibrationError, "there is no file 'nowhere'"),
        ("pileval", {"spit": "x"}, ConfigError, "no option 'spit'. Did you mean 'split'"),
        (".", {}, CalibrationError, "no file that a source can read: give files of the kinds .*jsonl"),
    ],
)
def test_what_cannot_be_read_is_refused_before_it_is_read(
    spec: str, options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        read_samples(spec, options)


def test_a_name_goes_before_a_directory_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "pileval", "a file")
    with pytest.raises(ConfigError, match="'pileval' has no option"):
        read_samples("pileval", {"x": 1})
    assert list(read_samples("./pileval")) == ["a file"]
    assert list(read_samples(Path("pileval"))) == ["a file"]
    assert list(read_samples("json_lines", {"path": str(written(tmp_path / "odd", '"one"'))})) == ["one"]


def tickets(closed: bool = True) -> Iterator[Any]:
    yield "The printer is on fire."
    yield [{"role": "user", "content": "closed" if closed else "open"}]


def broken() -> Iterator[Any]:
    yield "one"
    raise KeyError("two")


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    catalog = Catalog(discover())

    def add(*records: DatasetRecord) -> None:
        class Plugin:
            @hookimpl
            def quark_register_datasets(self) -> list[DatasetRecord]:
                return list(records)

        catalog.add(Plugin(), Source("acme-quant", "0.1", entry_point="acme"))

    with using(catalog):
        yield add


def test_a_third_party_brings_a_source(registered: Callable[..., None]) -> None:
    registered(DatasetRecord(name="acme_tickets", samples=f"{__name__}:tickets"))
    assert list(read_samples("acme_tickets", {"closed": False}))[1] == [{"role": "user", "content": "open"}]


def test_errors_of_a_source_name_its_plugin(registered: Callable[..., None]) -> None:
    registered(DatasetRecord(name="acme_broken", samples=f"{__name__}:broken"))
    with pytest.raises(PluginError, match=r"acme_broken.*acme-quant"):
        list(read_samples("acme_broken"))


def test_two_sources_of_one_ending_are_an_error_that_names_both(registered: Callable[..., None], tmp_path: Path) -> None:
    registered(DatasetRecord(name="acme_lines", samples="quark_workbench.data.files:json_lines", suffixes=(".jsonl",)))
    file = written(tmp_path / "a.jsonl", '"one"')
    with pytest.raises(AmbiguousNameError, match="acme_lines and json_lines both read"):
        read_samples(file)
    assert list(read_samples("acme_lines", {"path": str(file)})) == ["one"]


@pytest.mark.parametrize("value", [3, None, b"bytes", [], [{"role": "user"}], {"text": "x"}])
def test_other_values_are_no_samples(value: object) -> None:
    with pytest.raises(CalibrationError, match="is not a sample"):
        sample_of(value, "a source")


def test_a_missing_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPluginError, match=r"pip install 'quark-core\[data\]'"):
        extra("datasets", "data sets of the Hugging Face Hub")
    with pytest.raises(MissingPluginError, match=r"pip install 'quark-core\[data\]'"):
        next(read_samples("pileval"))


def test_data_sets_are_loaded_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        if split == "absent":
            raise ValueError("Unknown split")
        return [{"text": "one", "messages": CHAT, "article": "news"}, {"text": "two", "messages": CHAT, "article": "more"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_samples("pileval")) == ["one", "two"]
    assert list(read_samples("wikitext", {"split": "test", "rows": 1})) == ["one"]
    assert list(read_samples("wikitext")) == ["one\n\ntwo"]
    assert list(read_samples("cnn_dailymail")) == ["news", "more"]
    assert list(read_samples("ultrachat")) == [CHAT, CHAT]
    assert list(read_samples("huggingface", {"name": "acme/data", "column": "text"})) == ["one", "two"]
    assert asked[1] == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    with pytest.raises(CalibrationError, match=r"'acme/data' \(split 'absent'\) cannot be loaded: ValueError: Unknown split"):
        list(read_samples("huggingface", {"name": "acme/data", "split": "absent"}))


def test_what_the_package_has_saved_is_loaded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is an extra")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    assert list(read_samples("huggingface", {"name": str(tmp_path / "saved")})) == ["one", "two"]


def test_images_and_sounds_of_data_sets_and_tables_are_read_as_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is an extra")
    (tmp_path / "a.png").write_bytes(b"an image")
    rows = {"image": [str(tmp_path / "a.png")], "audio": [{"bytes": b"a sound", "path": None}], "text": ["one"]}
    pytest.importorskip("PIL", reason="datasets of images need it")
    saved = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    saved.save_to_disk(tmp_path / "saved")
    (sample,) = read_samples("huggingface", {"name": str(tmp_path / "saved")})
    assert isinstance(sample, MediaRow)
    assert sample.text == "one"
    assert sample.sounds[0]["bytes"] == b"a sound"
    image = sample.images[0]
    assert (image["bytes"] or Path(image["path"]).read_bytes()) == b"an image"
    saved.cast_column("image", datasets.Image(decode=False)).to_parquet(tmp_path / "a.parquet")
    (sample,) = read_samples(tmp_path / "a.parquet")
    assert isinstance(sample, MediaRow)
    assert sample.images[0] == tmp_path / "a.png" or sample.images[0]["bytes"] == b"an image"
