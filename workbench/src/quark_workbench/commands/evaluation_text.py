"""The text of an evaluation's result: sentences for people, of the same figures as the JSON form."""

from __future__ import annotations

from typing import Any

__all__ = ["result_lines", "task_lines"]

_PERCENTILES = (("median", "median_kl"), ("90 %", "p90_kl"), ("99 %", "p99_kl"), ("99.9 %", "p999_kl"), ("largest", "max_kl"))


def result_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines for the result of ``quark evaluate``."""
    counted = f"{result['tokens']:,} tokens in {result['windows']} window(s) of {result['seq_len']}, protocol {result['protocol']['name']}"
    name = "perplexity" if result["unit"] == "token" else "perplexity per word"
    lines = [f"{result['model']}: {name} {_measured(result, 'perplexity', '.3f')} over {counted}, {result['seconds']:.1f} s"]
    if "reference" in result:
        kl = ", ".join(f"{label} {result[key]:.5f}" for label, key in _PERCENTILES)
        lines += [
            f"{result['reference']}: {name} {_measured(result, 'reference_perplexity', '.3f')}; ratio "
            f"{_measured(result, 'perplexity_ratio', '.4f')}",
            f"KL divergence from the reference in nats per token: mean {_measured(result, 'mean_kl', '.5f')}, {kl}",
            f"top-1 agreement: {_measured(result, 'top1_agreement', '.2%')}",
            f"probability of the right token: {_measured(result, 'probability_shift', '+.3%')}, root mean square "
            f"{result['probability_shift_rms']:.3%}",
        ]
    for name, metric in result["metrics"].items():
        error = "" if metric["error"] is None else f" ± {metric['error']:.5f}"
        lines.append(f"{name}: {metric['value']:.5f}{error}")
    return lines


def task_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines for the result of ``quark evaluate --tasks``: one for each metric of each task."""
    lines = [f"{result['model']}: {len(result['tasks'])} task(s) of lm-evaluation-harness, {result['seconds']:.1f} s"]
    for name, task in result["tasks"].items():
        counted = "" if task["samples"] is None else f" ({task['samples']} questions)"
        for metric, value in task["metrics"].items():
            error = task["errors"].get(metric)
            lines.append(f"{name}{counted}, {metric.removesuffix(',none')}: {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return lines


def _measured(result: dict[str, Any], key: str, form: str) -> str:
    """Return a mean with its standard error, where that is known."""
    error = result[f"{key}_error"]
    return f"{result[key]:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")
