"""AMD Quark's evaluation functions return the same figures as `quark_workbench.evaluate`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quark.contrib.llm_eval import ppl_eval, ppl_eval_for_kv_cache, rouge_eval, task_eval
from quark.errors import ConfigError, UnsupportedError
from quark_tiny_model import held_out_text, tiny_model, tiny_tokenizer

TOKENS = torch.tensor(tiny_tokenizer()(held_out_text(), verbose=False)["input_ids"])


def test_perplexity_is_that_of_windows_of_2048_tokens() -> None:
    model, tokens = tiny_model(), TOKENS[: 2 * 2048 + 5]
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:]) for row in tokens[: 2 * 2048].view(2, 2048)]
    value = ppl_eval(model, SimpleNamespace(input_ids=tokens[None]), "cpu")
    # Sums of float32 logarithms in another order: 4094 terms, each rounded to 2^-24.
    assert value.item() == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than one window of 2048"):
        ppl_eval(tiny_model(), SimpleNamespace(input_ids=TOKENS[None, :100]))
    with pytest.raises(UnsupportedError, match="onnx_format"):
        ppl_eval(tiny_model(), SimpleNamespace(input_ids=TOKENS[None]), file_format="onnx_format")


def test_perplexity_of_a_cache_is_that_of_the_tokens_after_each_context() -> None:
    model, tokens = tiny_model(), TOKENS[:80]
    losses = []
    with torch.no_grad():
        for start in (0, 16):
            row = tokens[start : start + 48]
            losses.append(torch.nn.functional.cross_entropy(model(row[None]).logits[0, 31:-1], row[32:]))
    value = ppl_eval_for_kv_cache(model, SimpleNamespace(input_ids=tokens[None]), 32, 16, 2)
    assert value == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    with pytest.raises(ConfigError, match="are too few for a context of 100"):
        ppl_eval_for_kv_cache(model, SimpleNamespace(input_ids=tokens[None]), 100, 16)


def test_what_is_not_offered_says_what_to_use() -> None:
    with pytest.raises(UnsupportedError, match="rouge_eval is not supported: use tasks of lm-evaluation-harness"):
        rouge_eval(1, 2)
    with pytest.raises(UnsupportedError, match="task_eval does not support log_samples"):
        task_eval(tiny_model(), tiny_tokenizer(), tasks="a", log_samples=True)


def test_the_arguments_of_tasks_are_handed_on_and_results_printed_and_returned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from amd_quark_scripts import evaluation
    from quark_workbench.evaluate.tasks import TaskOptions, TaskResult

    asked: list[TaskOptions] = []
    results = {"piqa": TaskResult({"acc": 0.5, "other": 2.0}, {"acc": 0.25}, 4)}

    def evaluated(model: object, tokenizer: object, options: TaskOptions) -> dict[str, TaskResult]:
        asked.append(options)
        return results

    monkeypatch.setattr(evaluation, "evaluate_tasks", evaluated)
    model, tokenizer = torch.nn.Identity(), object()
    assert task_eval(model, tokenizer, tasks="piqa,boolq") is results
    assert capsys.readouterr().out.splitlines() == ["[INFO] piqa, acc: 0.5000 ± 0.2500", "[INFO] piqa, other: 2.0000"]
    task_eval(model, tokenizer, 64, "8", ["piqa"], 3, True)
    task_eval(model, tokenizer, batch_size="auto")
    assert asked == [
        TaskOptions(tasks=["piqa", "boolq"], batch_size=1),
        TaskOptions(tasks=["piqa"], num_fewshot=3, batch_size=8, max_batch_size=64, apply_chat_template=True),
        TaskOptions(tasks=[], batch_size="auto"),
    ]
    assert asked[0].apply_chat_template is False
