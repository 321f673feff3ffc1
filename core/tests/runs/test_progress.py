"""What plugins hear of a run, in which order, and with what metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from quark.plugins import Catalog, Event, Source, hookimpl, using
from quark.testing import tiny
from quark.torch import LLMTemplate, ModelQuantizer

IDS = [torch.arange(3, 19)[None], torch.arange(30, 46)[None]]


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Mapping[str, Any]]] = []

    @hookimpl
    def quark_on_event(self, event: Event) -> None:
        self.heard.append((event.name, dict(event.payload)))


@pytest.mark.parametrize(("scheme", "samples"), [("int4_wo_64", 0), ("fp8", len(IDS))])
def test_a_run_says_when_it_begins_counts_its_finished_blocks_and_says_when_it_ends(scheme: str, samples: int) -> None:
    listener, model = Listener(), tiny.tiny_model()
    depth = len(model.model.layers)
    with using(Catalog.installed()) as plugins:
        plugins.add(listener, Source("listening", "1.0"))
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(model, IDS)
    assert listener.heard == [
        ("run_started", {"samples": samples}),
        *[("block_finished", {"done": i + 1, "total": depth, "name": f"model.layers.{i}"}) for i in range(depth)],
        ("run_finished", {}),
    ]
