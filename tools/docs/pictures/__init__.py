"""The pictures of the documentation, drawn from the code: ``python -m tools.docs.pictures FOLDER``."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from tools.docs.pictures import accuracy, costs, formats, programs, run, tokens
from tools.docs.pictures.svg import Drawing

__all__ = ["PICTURES", "figure"]

PICTURES: dict[str, Callable[[], Drawing]] = {
    "number-lines": formats.number_lines,
    "dynamic-range": formats.dynamic_range,
    "bit-fields": formats.bit_fields,
    "bits-per-weight": formats.bits_per_weight,
    "block-pipeline": run.block_pipeline,
    "lock-step": run.lock_step,
    "cost-of-gptq": costs.cost_of_gptq,
    "cost-of-awq-gptq": costs.cost_of_awq_gptq,
    "accuracy": accuracy.accuracy_against_bits,
    "programs": programs.kl_against_time,
    "tokens": tokens.accuracy_against_tokens,
}


def figure(name: str, caption: str) -> str:
    """Return a picture with its caption, as HTML for a page in Markdown."""
    return f"<figure>{PICTURES[name]().svg(caption)}<figcaption>{escape(caption, quote=False)}</figcaption></figure>"
