"""The tiny model and its text; where its distribution is not installed, the error says how to install it."""

from __future__ import annotations

import sys

import pytest
import torch

import quark_tiny_model as tiny
from quark.errors import ConfigError
from quark_workbench.cli import main


def test_calibration_sequences_are_the_end_of_the_text():
    batches = tiny.calibration_batches(3, 32)
    assert [b.shape for b in batches] == [(1, 32)] * 3
    tail = tiny.tiny_tokenizer().decode(torch.cat(batches, dim=1)[0])
    assert tiny.held_out_text().endswith(tail)


@pytest.mark.parametrize(("count", "length"), [(0, 32), (1, 0), (1, 10**6)])
def test_more_calibration_tokens_than_there_are_is_an_error(count: int, length: int):
    with pytest.raises(ConfigError, match=f"{count} sequences of {length} tokens"):
        tiny.calibration_batches(count, length)


def test_without_its_distribution_an_evaluation_on_its_text_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "quark_tiny_model", None)
    monkeypatch.setattr(sys, "argv", ["quark", "evaluate", str(tiny.tiny_model_dir())])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "pip install quark-tiny-model" in " ".join(capsys.readouterr().err.split())
