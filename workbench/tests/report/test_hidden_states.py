"""Figures of hidden states: tokens count alike, however large they are."""

from __future__ import annotations

import pytest
import torch

from quark.algorithms import OutputError
from quark_workbench.report.hidden_states import depth_figures


def test_the_error_is_the_mean_of_those_of_the_tokens() -> None:
    reference = torch.tensor([[3.0, 4.0], [300.0, 400.0], [1.0, 0.0]])
    output = torch.tensor([[3.0, 4.5], [300.0, 450.0], [1.0, 0.0]])
    found = depth_figures([OutputError.of(output[:1], reference[:1]), OutputError.of(output[1:], reference[1:])])
    assert found == {
        "relative_error": pytest.approx(0.02 / 3),
        "snr_db": pytest.approx(-10 * torch.log10(torch.tensor(0.02 / 3)).item()),
        "tokens": 3,
    }


def test_without_tokens_there_is_none_and_without_an_error_no_ratio() -> None:
    assert depth_figures([]) == {}
    assert depth_figures([OutputError.of(torch.ones(2, 1), torch.ones(2, 1))]) == {"relative_error": 0.0, "snr_db": None, "tokens": 2}
