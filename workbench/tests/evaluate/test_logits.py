"""Logits are worked on in chunks that bound the memory."""

from __future__ import annotations

import pytest
import torch

from quark_workbench.evaluate import logits


@pytest.mark.parametrize(("elements", "rows"), [(10, [2, 2, 2, 1]), (14, [2, 2, 2, 1]), (15, [3, 3, 1]), (1, [1] * 7), (10**6, [7])])
def test_a_chunk_has_no_more_elements_than_allowed_and_whole_rows(elements: int, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "_CHUNK_ELEMENTS", elements)
    values, targets = torch.randn(7, 5), torch.arange(7)
    chunks = list(logits.in_chunks(values, targets))
    assert [len(part) for part, _ in chunks] == rows
    for whole, parts in zip((values, targets), zip(*chunks, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole)
