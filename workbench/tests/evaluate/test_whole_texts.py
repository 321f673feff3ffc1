"""Models that embed, rank or classify whole texts are compared by the metric that fits each kind."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.evaluate.whole_texts import Classifier, Embedder, Reranker, RewardModel, TextKind, kendall_tau, text_kind

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
TEXTS = [part for part in held_out_text().split("\n\n") if len(part) > 40][:12]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_model_dir())


def model_of(name: str, labels: int = 2) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SMALL, num_labels=labels, max_position_embeddings=128)).eval()


def kind_of(model: Any, tokenizer: Any, path: Path) -> TextKind | None:
    return text_kind(path, type(model), model.config, tokenizer)


@torch.no_grad()
def disturbed(model: Any, by: float) -> Any:
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return other


KINDS = {
    ("BertModel", 2): Embedder,
    ("LlamaModel", 2): Embedder,
    ("BertForSequenceClassification", 1): Reranker,
    ("LlamaForSequenceClassification", 1): RewardModel,
    ("BertForSequenceClassification", 3): Classifier,
    ("LlamaForTokenClassification", 3): Classifier,
}


@pytest.mark.parametrize(("name", "labels"), KINDS)
def test_the_kind_follows_from_the_class_and_its_labels_and_equal_models_agree(
    name: str, labels: int, tokenizer: Any, tmp_path: Path
) -> None:
    model = model_of(name, labels)
    kind = kind_of(model, tokenizer, tmp_path)
    assert type(kind) is KINDS[name, labels]
    same = kind.compare(model, model, TEXTS)
    assert same.value == pytest.approx(1.0)
    assert (same.kind, same.metric, same.texts) == (kind.name, kind.metric, len(TEXTS))
    far, near = (kind.compare(disturbed(model, by), model, TEXTS) for by in (0.3, 0.003))
    assert far.value < near.value <= 1.0 + 1e-9


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_models_that_predict_tokens_are_of_no_such_kind(name: str, tokenizer: Any, tmp_path: Path) -> None:
    assert kind_of(model_of(name), tokenizer, tmp_path) is None


def sentence_checkpoint(path: Path, pooling: dict[str, Any], length: int = 64) -> Path:
    (path / "1_Pooling").mkdir(parents=True)
    parts = [{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (path / "modules.json").write_text(json.dumps(parts))
    (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return path


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
    ],
)
def test_a_checkpoint_of_sentence_transformers_is_pooled_as_it_says(
    pooling: dict[str, Any], name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = model_of("LlamaForCausalLM")
    kind = kind_of(model, tokenizer, sentence_checkpoint(tmp_path, pooling))
    assert isinstance(kind, Embedder)
    assert (kind.pooling, kind.length) == (name, 64)
    (embedding,) = kind.judged(model, TEXTS[:1])
    states = model.model(**tokenizer(TEXTS[0], truncation=True, max_length=64, return_tensors="pt")).last_hidden_state[0].double()
    wanted = {"cls": states[0], "last": states[-1], "max": states.amax(0), "mean": states.mean(0)}[name]
    torch.testing.assert_close(embedding, wanted.detach())


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sentence_bert_config.json", "{"),
        ("1_Pooling/config.json", "[]"),
        ("modules.json", json.dumps([{"path": "../other", "type": "sentence_transformers.models.Pooling"}])),
    ],
)
def test_a_damaged_file_of_sentence_transformers_is_named(file: str, text: str, tokenizer: Any, tmp_path: Path) -> None:
    path = sentence_checkpoint(tmp_path, {"pooling_mode_cls_token": True})
    (path / file).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(file.rpartition("/")[2])):
        kind_of(model_of("BertModel"), tokenizer, path)


def test_another_pooling_is_refused_by_its_name(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pools by pooling_mode_weightedmean_tokens"):
        kind_of(model_of("BertModel"), tokenizer, sentence_checkpoint(tmp_path, {"pooling_mode_weightedmean_tokens": True}))


def test_tau_is_that_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(0, 6, (9,), generator=generator).double() for _ in range(2))
    agree = against = ties_of_one = ties_of_other = 0
    for i, j in itertools.combinations(range(9), 2):
        a, b = float(one[i] - one[j]), float(other[i] - other[j])
        agree, against = agree + (a * b > 0), against + (a * b < 0)
        ties_of_one, ties_of_other = ties_of_one + (a == 0), ties_of_other + (b == 0)
    wanted = (agree - against) / ((36 - ties_of_one) * (36 - ties_of_other)) ** 0.5
    assert kendall_tau(one, other) == pytest.approx(wanted)
    assert kendall_tau(one, -one) == pytest.approx(-1.0)
    assert kendall_tau(torch.ones(4), torch.arange(4.0)) == 0.0


def test_a_reranker_ranks_all_texts_for_each_of_some_queries(tokenizer: Any, tmp_path: Path) -> None:
    model = model_of("BertForSequenceClassification", 1)
    kind = kind_of(model, tokenizer, tmp_path)
    assert isinstance(kind, Reranker)
    with torch.no_grad():
        scores = kind.judged(model, TEXTS)
    assert [len(ranking) for ranking in scores] == [len(TEXTS)] * 8
    query = " ".join(TEXTS[1].split()[:8])
    with torch.no_grad():
        alone = model(**tokenizer(query, TEXTS[5], return_tensors="pt", truncation=True, max_length=128)).logits
    assert float(scores[1][5]) == pytest.approx(float(alone), rel=1e-5)


def test_too_few_texts_and_models_that_want_more_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = model_of("BertModel")
    kind = kind_of(model, tokenizer, tmp_path)
    assert kind is not None
    with pytest.raises(ConfigError, match=r"cannot be compared on 1 text\(s\)"):
        kind.compare(model, model, TEXTS[:1])

    class WantsMore(nn.Module):
        base_model_prefix = ""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Any, table: Any, **_: Any) -> None: ...

    with pytest.raises(UnsupportedError, match="needs more inputs than a text"):
        kind.compare(WantsMore(), WantsMore(), TEXTS)
