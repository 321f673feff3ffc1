"""The module ``quark.contrib.llm_eval``. It computes perplexity and runs tasks for AMD Quark's scripts."""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amd_quark_scripts.model_preparation import get_tokenizer
from quark.errors import ConfigError, UnsupportedError
from quark_amd.not_offered import not_offered
from quark_workbench.data import read_samples, text_of
from quark_workbench.evaluate import Windows, perplexity
from quark_workbench.evaluate.tasks import TaskOptions, TaskResult, evaluate_tasks

__all__ = [
    "eval_model",
    "meteor_eval",
    "mlperf_rouge_eval",
    "ppl_eval",
    "ppl_eval_for_kv_cache",
    "ppl_eval_with_synthetic_dataset",
    "rouge_eval",
    "rouge_meteor_generations",
    "task_eval",
]

_WINDOW = 2048
_TASKS = "use tasks of lm-evaluation-harness, as with quark evaluate --tasks"
meteor_eval = not_offered("meteor_eval", _TASKS)
mlperf_rouge_eval = not_offered("mlperf_rouge_eval", _TASKS)
ppl_eval_with_synthetic_dataset = not_offered("ppl_eval_with_synthetic_dataset", "use ppl_eval, or quark evaluate --text with your text")
rouge_eval = not_offered("rouge_eval", _TASKS)
rouge_meteor_generations = not_offered("rouge_meteor_generations", _TASKS)


def ppl_eval(model: nn.Module, testenc: Any, dev: str | torch.device | None = None, file_format: str = "hf_format") -> Tensor:
    """Return the perplexity as a scalar tensor.

    The text is cut into windows of 2048 tokens without overlap, as in GPTQ's protocol.

    Args:
        model: A model that returns logits.
        testenc: The tokenizer's result for the text. Its ``input_ids`` have the shape ``[1, tokens]``. An
            incomplete last window is dropped.
        dev: Ignored, because the tokens are moved to the model's device.
        file_format: It must be ``"hf_format"``.

    Raises:
        ConfigError: The text has fewer than 2048 tokens.
        UnsupportedError: ``file_format`` is another format.
        NonFiniteError: A logit is NaN or Inf.
    """
    if file_format != "hf_format":
        raise UnsupportedError(f"ppl_eval does not support file_format={file_format!r}. Use 'hf_format' with a transformers model")
    tokens: Tensor = testenc.input_ids.cpu()
    count = tokens.numel() // _WINDOW
    if count == 0:
        raise ConfigError(f"the text has {tokens.numel()} tokens, fewer than one window of {_WINDOW}: give more text")
    return torch.tensor(perplexity(model, tokens.flatten()[: count * _WINDOW].view(count, 1, _WINDOW)))


def ppl_eval_for_kv_cache(
    model: nn.Module, testenc: Any, context_size: int, sample_size: int, patch_size: int | None = None, dev: str | None = None
) -> float:
    """Print and return the perplexity of ``sample_size`` tokens after each ``context_size`` tokens.

    One forward pass processes a context and the tokens after it. It quantizes keys and values like the cache.

    Args:
        model: A model that returns logits.
        testenc: The tokenizer's result for the text, as in `ppl_eval`.
        context_size: Number of context tokens. They are not scored.
        sample_size: Number of scored tokens after the context.
        patch_size: Number of pieces of the text to score. If it is None, the whole text is scored.
        dev: Ignored, because the tokens are moved to the model's device.

    Raises:
        ConfigError: The text is too short, or a size is below 1.
    """
    tokens: Tensor = testenc.input_ids.cpu().flatten()
    if context_size < 1 or sample_size < 1 or tokens.numel() < context_size + sample_size:
        raise ConfigError(f"{tokens.numel()} tokens are too few for a context of {context_size} and {sample_size} tokens after it")
    pieces = tokens.unfold(0, context_size + sample_size, sample_size)[: patch_size or None]
    value = perplexity(model, Windows(pieces, torch.full((len(pieces),), context_size)).split(1))
    print(f"\n[INFO] Perplexity of {sample_size} tokens after contexts of {context_size}: {value}")
    return value


def task_eval(
    model: nn.Module,
    tokenizer: Any,
    max_batch_size: int | None = None,
    batch_size: int | str = 1,
    tasks: str | list[str] | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    multimodal: bool = False,
    **kwargs: Any,
) -> dict[str, TaskResult]:
    """Print and return the results of a model in tasks of lm-evaluation-harness.

    Args:
        model: A model in memory.
        tokenizer: The tokenizer of the model.
        max_batch_size: The largest batch size to try if ``batch_size`` is ``"auto"``.
        batch_size: Number of questions in a batch, or ``"auto"``.
        tasks: A list of task names, or a string of names separated by commas.
        num_fewshot: Number of examples before each question. If it is None, the task's default is used.
        apply_chat_template: Whether to format questions as chats.
        multimodal: Ignored, because tasks use text.
        kwargs: Other arguments of AMD Quark. They are not supported.

    Raises:
        UnsupportedError: An argument in ``kwargs`` is set.
        ConfigError, UnknownNameError, MissingPluginError: `quark_workbench.evaluate.tasks.prepare_tasks`
            raises this error.
    """
    if unknown := sorted(name for name, value in kwargs.items() if value):
        raise UnsupportedError(f"task_eval does not support {', '.join(unknown)}: run lm_eval on the exported checkpoint")
    names = tasks.split(",") if isinstance(tasks, str) else list(tasks or ())
    size = int(batch_size) if str(batch_size).isdecimal() else batch_size
    options = TaskOptions(
        tasks=names, num_fewshot=num_fewshot, batch_size=size, max_batch_size=max_batch_size, apply_chat_template=apply_chat_template
    )
    results = evaluate_tasks(model, tokenizer, options)
    for name, result in results.items():
        for metric, value in result.metrics.items():
            error = result.errors.get(metric, math.nan)
            print(f"[INFO] {name}, {metric}: {value:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}"))
    return results


def eval_model(
    args: argparse.Namespace,
    model: nn.Module,
    main_device: str | torch.device | None = None,
    save_metrics_to_csv: bool = False,
    output_dir: Path | str = "metrics_output_dir",
    multimodal: bool = False,
) -> None:
    """Print the perplexity of a model on WikiText-2, and the scores of the model in the tasks ``args.tasks``.

    Args:
        args: The arguments of AMD Quark's script `quantize_quark.py`.
        model: A model in memory.
        main_device: Ignored, because the tokens are moved to the model's device.
        save_metrics_to_csv: Whether to write the perplexity to ``evaluation_metrics.csv``.
        output_dir: Directory of ``evaluation_metrics.csv``.
        multimodal: Ignored.

    Raises:
        UnsupportedError: The evaluation data set or a metric is not supported.
        CalibrationError: WikiText cannot be read.
    """
    if args.evaluation_dataset != "wikitext" or args.use_mlperf_rouge:
        raise UnsupportedError(
            "this script evaluates only with --evaluation_dataset wikitext and without --use_mlperf_rouge. "
            "For other evaluations, use quark evaluate --tasks"
        )
    tokenizer = get_tokenizer(args.model_dir)
    if args.use_ppl_eval_for_kv_cache or args.use_ppl_eval_model:
        rows = None if args.num_eval_data == -1 else args.num_eval_data
        text = text_of(tokenizer, read_samples("wikitext", {"split": "test", "rows": rows}))
        testenc = tokenizer(text, return_tensors="pt", verbose=False)
        if args.use_ppl_eval_for_kv_cache:
            sizes = (args.ppl_eval_for_kv_cache_context_size, args.ppl_eval_for_kv_cache_sample_size, args.ppl_eval_for_kv_cache_patch_size)
            ppl_eval_for_kv_cache(model, testenc, *sizes)
        else:
            value = ppl_eval(model, testenc).item()
            print(f"\n[INFO] Perplexity: {value}")
            if save_metrics_to_csv:
                _write_metrics(Path(output_dir), value)
    if args.tasks is not None:
        task_eval(
            model,
            tokenizer,
            args.max_eval_batch_size,
            args.eval_batch_size,
            args.tasks,
            args.num_fewshot,
            args.apply_chat_template,
            multimodal,
        )


def _write_metrics(directory: Path, value: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "evaluation_metrics.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(["Perplexity", value])
    print(f"[INFO] Saved evaluation_metrics to {directory / 'evaluation_metrics.csv'}.")
