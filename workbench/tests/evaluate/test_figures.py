"""Perplexity and divergence against known values: closed forms, torch's own functions, laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quark.errors import ConfigError, NonFiniteError
from quark_workbench.evaluate import compare, logits, perplexity
from quark_workbench.evaluate.predictions import kl_divergence

VOCABULARY = 11
seeds = st.integers(0, 2**31)


class Table(nn.Module):
    """A model whose logits depend on the present token alone: row *i* of the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def table(seed: int, dtype: torch.dtype = torch.float32) -> Table:
    return Table(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 2)


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    assert perplexity(Table(torch.zeros(VOCABULARY, VOCABULARY)), [tokens(0, 3, 7)]) == pytest.approx(VOCABULARY, rel=1e-6)


def test_a_model_that_knows_the_next_token_has_perplexity_one():
    successor = torch.full((VOCABULARY, VOCABULARY), -math.inf)
    successor[torch.arange(VOCABULARY), (torch.arange(VOCABULARY) + 1) % VOCABULARY] = 0
    assert perplexity(Table(successor), [torch.arange(VOCABULARY)[None]]) == 1


def test_perplexity_is_exp_of_torchs_cross_entropy():
    model, ids = table(1, torch.float64), tokens(2, 4, 9)
    expected = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert perplexity(model, [ids]) == pytest.approx(expected.item(), rel=1e-12)


def test_divergence_equals_torchs_in_float64():
    model, reference, ids = table(3, torch.float64), table(4, torch.float64), tokens(5, 4, 9)
    log_q, log_p = (m(ids)[:, :-1].flatten(0, 1).log_softmax(-1) for m in (model, reference))
    each = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    found = compare(model, reference, [ids])
    assert found.mean_kl == pytest.approx(each.mean().item(), rel=1e-12)
    assert found.p99_kl == pytest.approx(each.max().item(), rel=1e-12)  # of 32 values, ⌈0.99 · 32⌉ = the 32nd
    assert found.top1_agreement == (log_q.argmax(-1) == log_p.argmax(-1)).double().mean().item()
    assert found.tokens == 32


def test_the_percentile_leaves_out_one_token_in_a_hundred():
    one_bad_row = torch.zeros(VOCABULARY, VOCABULARY)
    one_bad_row[3, 0] = 50.0
    ids = torch.zeros(1, 201, dtype=torch.int64)
    ids[0, 7] = 3  # one of 200 predictions
    found = compare(Table(one_bad_row), Table(torch.zeros(VOCABULARY, VOCABULARY)), [ids])
    assert found.p99_kl == 0 < found.mean_kl


def test_both_perplexities_are_those_of_each_model_alone():
    model, reference, batches = table(3), table(4), [tokens(5, 2, 9), tokens(6, 1, 9)]
    found = compare(model, reference, batches)
    assert (found.perplexity, found.reference_perplexity) == (perplexity(model, batches), perplexity(reference, batches))


@given(seeds)
def test_a_model_does_not_diverge_from_itself(seed: int):
    found = compare(table(seed), table(seed), [tokens(seed, 2, 5)])
    assert (found.mean_kl, found.p99_kl, found.top1_agreement) == (0, 0, 1)
    assert found.perplexity == found.reference_perplexity


@given(seeds, seeds)
def test_divergence_is_never_negative(first: int, second: int):
    log_p, log_q = (table(s).table.detach().log_softmax(-1) for s in (first, second))
    assert (kl_divergence(log_p, log_q) >= 0).all()


@given(seeds, st.floats(-5, 5))
def test_a_constant_added_to_all_logits_changes_nothing(seed: int, shift: float):
    model = table(seed, torch.float64)
    moved = Table(model.table.detach() + shift)
    assert compare(moved, model, [tokens(seed, 2, 5)]).mean_kl == pytest.approx(0, abs=1e-14)


@given(seeds, st.integers(1, 5))
def test_how_sequences_are_batched_changes_nothing(seed: int, size: int):
    ids = tokens(seed, 6, 5)
    whole, parts = (compare(table(1), table(2), batches) for batches in ([ids], ids.split(size)))
    last_bits = 2 * VOCABULARY * torch.finfo(torch.float32).eps  # logarithms of two sums over the vocabulary, in float32
    assert parts.p99_kl == pytest.approx(whole.p99_kl, rel=last_bits)
    assert parts.mean_kl == pytest.approx(whole.mean_kl, rel=last_bits)


def test_logits_are_worked_on_in_chunks_to_the_same_figures(monkeypatch: pytest.MonkeyPatch):
    whole = compare(table(1), table(2), [tokens(3, 4, 9)])
    monkeypatch.setattr(logits, "_CHUNK_ELEMENTS", 3 * VOCABULARY)
    parts = compare(table(1), table(2), [tokens(3, 4, 9)])
    assert parts.mean_kl == pytest.approx(whole.mean_kl, rel=1e-14)
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-14)


def test_half_precision_logits_are_evaluated_in_float32():
    model = table(1, torch.bfloat16)
    exact = Table(model.table.detach().float())
    assert perplexity(model, [tokens(2, 2, 5)]) == perplexity(exact, [tokens(2, 2, 5)])


def test_modes_and_gradients_are_given_back():
    model = nn.Sequential(Table(torch.zeros(VOCABULARY, VOCABULARY)), nn.Dropout(0.5)).train()
    model[1].eval()
    assert perplexity(model, [tokens(0, 3, 7)]) == pytest.approx(VOCABULARY, rel=1e-6)
    assert [m.training for m in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_a_reference_in_training_mode_is_compared_in_evaluation_mode_and_trains_on_afterwards():
    reference = nn.Sequential(table(4), nn.Dropout(0.5)).train()
    found, batches = {}, [tokens(5, 4, 9)]
    for name, other in (("training", reference), ("plain", table(4))):
        found[name] = compare(table(3), other, batches)
    assert found["training"] == found["plain"]
    assert all(m.training for m in reference.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named_instead_of_figures(value: float):
    bad = torch.zeros(VOCABULARY, VOCABULARY)
    bad[2, 3] = value
    with pytest.raises(NonFiniteError, match="logits of the model"):
        perplexity(Table(bad), [torch.tensor([[1, 2, 3]])])
    with pytest.raises(NonFiniteError, match="logits of the reference"):
        compare(table(1), Table(bad), [torch.tensor([[1, 2, 3]])])


@pytest.mark.parametrize("batch", [torch.zeros(5, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 5), [[1, 2]]])
def test_a_batch_that_is_no_matrix_of_tokens_is_refused(batch: object):
    with pytest.raises(ConfigError, match="a batch must be an integer tensor"):
        perplexity(table(1), [batch])  # type: ignore[list-item]


def test_no_batches_are_refused():
    with pytest.raises(ConfigError, match="the batches are empty"):
        perplexity(table(1), [])
    with pytest.raises(ConfigError, match="the batches are empty"):
        compare(table(1), table(1), [])


def test_models_of_different_vocabularies_are_not_compared():
    with pytest.raises(ConfigError, match="vocabulary has 11 tokens, the reference's 12"):
        compare(table(1), Table(torch.zeros(12, 12)), [tokens(2, 1, 5)])
