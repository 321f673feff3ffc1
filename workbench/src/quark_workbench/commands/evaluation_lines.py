"""Functions that turn results of ``quark evaluate`` into lines of text and into figures of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["figures_of", "result_lines", "task_lines"]

_PERCENTILES = (("median", "median_kl"), ("90 %", "p90_kl"), ("99 %", "p99_kl"), ("99.9 %", "p999_kl"), ("largest", "max_kl"))


def result_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines for the result of ``quark evaluate``."""
    if "figures" in result:
        return _figure_lines(result, result["figures"])
    if "tokens" not in result:
        return _output_lines(result) + _word_error_lines(result)
    counted = f"{result['tokens']:,} tokens in {result['windows']} window(s) of {result['seq_len']}, protocol {result['protocol']['name']}"
    name = "perplexity" if result["unit"] == "token" else "perplexity per word"
    lines = [f"{result['model']}: {name} {_with_error(result, 'perplexity', '.3f')} over {counted}, {result['seconds']:.1f} s"]
    if "reference" in result:
        kl = ", ".join(f"{label} {result[key]:.5f}" for label, key in _PERCENTILES)
        lines += [
            f"{result['reference']}: {name} {_with_error(result, 'reference_perplexity', '.3f')}; ratio "
            f"{_with_error(result, 'perplexity_ratio', '.4f')}",
            f"KL divergence from the reference in nats per token: mean {_with_error(result, 'mean_kl', '.5f')}, {kl}",
            f"top-1 agreement: {_with_error(result, 'top1_agreement', '.2%')}",
            f"probability of the right token: {_with_error(result, 'probability_shift', '+.3%')}, root mean square "
            f"{result['probability_shift_rms']:.3%}",
        ]
    for name, metric in result["metrics"].items():
        error = "" if metric["error"] is None else f" ± {metric['error']:.5f}"
        lines.append(f"{name}: {metric['value']:.5f}{error}")
    return lines + _word_error_lines(result)


def _output_lines(result: dict[str, Any]) -> list[str]:
    beside = f" beside {result['reference']}" if "reference" in result else ""
    of_samples = result.get("protocol", {}).get("name") == "samples"
    counted = f"{result['windows']} " + ("sample(s)" if of_samples else f"window(s) of {result['seq_len']} tokens")
    return [f"{result['model']}{beside}, {counted}, {result['seconds']:.1f} s"] + [
        f"{name}: cosine {output['cosine']:.5f}, at least {output['lowest_cosine']:.5f}, relative error {output['relative_error']:.5f}"
        for name, output in result.get("outputs", {}).items()
    ]


def _word_error_lines(result: dict[str, Any]) -> list[str]:
    if "word_error_rate" not in result:
        return []
    beside = f", reference {_with_error(result, 'reference_word_error_rate', '.2%')}" if "reference" in result else ""
    difference = f", difference {_with_error(result, 'word_error_rate_difference', '+.2%')}" if beside else ""
    return [f"word error rate over {result['words']:,} words: {_with_error(result, 'word_error_rate', '.2%')}{beside}{difference}"]


def figures_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of a result in which a model was compared with a reference, for a report.

    Each metric is a dictionary. Its keys are ``name``, ``value``, ``error`` for the standard error of the
    value, and ``float`` for the value of the float model. A number is None if it is unknown or not finite.
    """
    rows: list[tuple[str, float | None, float | None, float | None]] = []
    if "word_error_rate" in result:
        rows.append(_row(result, "word error rate", "word_error_rate", "reference_word_error_rate"))
        rows.append(_row(result, "difference of word error rates", "word_error_rate_difference"))
    if "figures" in result:
        figures = result["figures"]
        rows.append((figures["metric"], figures["value"], figures["error"], None))
        rows += [(name, value, None, None) for name, value in figures["others"].items()]
    for name, output in result.get("outputs", {}).items():
        rows += [(f"cosine of {name}", output["cosine"], None, None), (f"relative error of {name}", output["relative_error"], None, None)]
    if "mean_kl" in result:
        rows.append(_row(result, "KL divergence in nats per token", "mean_kl"))
        rows.append(_row(result, "top-1 agreement", "top1_agreement"))
        rows.append(_row(result, "perplexity", "perplexity", "reference_perplexity"))
    rows += [(name, mean["value"], mean["error"], None) for name, mean in result.get("metrics", {}).items()]
    return [dict(zip(("name", "value", "error", "float"), (name, *map(_finite, numbers)), strict=True)) for name, *numbers in rows]


def _row(result: Mapping[str, Any], name: str, key: str, reference: str = "") -> tuple[str, float, float | None, float | None]:
    return name, result[key], result[f"{key}_error"], result.get(reference)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _figure_lines(result: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    compared = f"{result['model']} beside {result['reference']}, {figures['kind']}, {figures['texts']} texts"
    error = "" if figures["error"] is None else f" ± {figures['error']:.5f}"
    lowest = "" if figures["lowest"] is None else f", at least {figures['lowest']:.5f}"
    lines = [f"{compared} of up to {result['seq_len']} tokens, {result['seconds']:.1f} s"]
    return [*lines, f"{figures['metric']}: {figures['value']:.5f}{error}{lowest}", *(f"{n}: {v:.5f}" for n, v in figures["others"].items())]


def task_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines for the result of ``quark evaluate --tasks``: one for each metric of each task."""
    lines = [f"{result['model']}: {len(result['tasks'])} task(s) of lm-evaluation-harness, {result['seconds']:.1f} s"]
    for name, task in result["tasks"].items():
        counted = "" if task["samples"] is None else f" ({task['samples']} questions)"
        for metric, value in task["metrics"].items():
            error = task["errors"].get(metric)
            lines.append(f"{name}{counted}, {metric.removesuffix(',none')}: {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return lines


def _with_error(result: dict[str, Any], key: str, form: str) -> str:
    """Return the mean ``result[key]`` as text, with its standard error if the result has one."""
    error = result[f"{key}_error"]
    return f"{result[key]:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")
