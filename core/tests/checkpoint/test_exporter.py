"""Exporter: one that writes only whole models, and errors for exporters that break a promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quark.checkpoint import BlockStream, CheckpointContent, Exporter, ExportOptions
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark_tiny_model import tiny_model


class Whole(Exporter):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "a.bin").write_bytes(b"a")


class Written(BlockStream):
    def write(self, block: object) -> None:
        """Write nothing."""

    def finish(self, content: CheckpointContent) -> None:
        """End."""


def test_content_has_the_blocks_in_the_order_of_a_stream() -> None:
    for model, names in ((tiny_model(), [f"model.layers.{i}" for i in range(3)]), (nn.Sequential(nn.Linear(2, 2)), [""])):
        config = QConfig(QLayerConfig())
        content = CheckpointContent(model, config, make_plan(model, config, architecture_of(model)))
        assert [block.name for block in content.blocks] == names


ARGUMENTS: Any = (None, nn.Linear(2, 2), Path("out"), ExportOptions())


def test_an_exporter_of_whole_models_holds_all_and_neither_streams_nor_announces() -> None:
    exporter, (content, skeleton, _, options) = Whole(), ARGUMENTS
    assert (exporter.streams, exporter.resumes, exporter.shares) == (False, False, False)
    exporter.check(content, skeleton, options)
    assert exporter.announced(content, skeleton, options) is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Whole().stream(*ARGUMENTS), "Whole has no method 'stream', which an exporter with streams=True needs"),
        (lambda: Written().when_stored(lambda _: None), "Written has no method 'when_stored', which an exporter with resumes=True needs"),
        (lambda: Written().written(), "Written has no method 'written', which an exporter with shares=True needs"),
    ],
)
def test_a_method_that_is_promised_and_missing_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(says)):
        call()


def test_a_stream_of_few_words_encodes_nothing_and_writes_float_tensors_with_the_others() -> None:
    stream = Written()
    stream.write_float()
    assert not stream.encodes
