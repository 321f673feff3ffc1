"""Results of clients that load exports, and the file that stores them. `tools.docs.client_results` makes tables from the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.errors import UnsupportedError
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import calibration_batches, held_out_text, tiny_model, tiny_tokenizer

__all__ = ["SHARE", "Results", "changed_by_rounding", "compared", "logits_of", "quantized_tiny_model", "text_ids", "why_not_exported"]

SHARE = 0.05
"""Largest difference of a client's logits ÷ the change of the logits by quantization, if the client uses the same codes and scales.

Summation in another order moves some values over the edge of a quantization step. If inputs are quantized, later layers amplify this."""
_NAMES = re.compile(r" \([^()]*\b(?:model\.|lm_head)[^()]*\)")
"""The names of layers in an error message."""


@attrs.frozen
class Results:
    """A file of results, to which a session adds its results.

    Attributes:
        path: The JSON file; None stores nothing.
    """

    path: Path | None

    def add(self, client: str, layout: str, scheme: str, versions: Mapping[str, str], **result: Any) -> None:
        """Store one result. If the client's versions differ from the stored ones, drop its earlier results.

        Args:
            client: Such as ``"llama.cpp"``.
            layout: Name of the exporter.
            scheme: Name of the scheme.
            versions: Version of each of the client's packages.
            **result: ``error`` and ``greedy`` from `compared`; or ``refused``, the reason of a refusal, and
                ``by``, who refuses.
        """
        if self.path is None:
            return
        clients = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        own = clients.get(client, {})
        if own.get("versions") != dict(versions):
            own = {"versions": dict(versions), "results": {}}
        own["results"].setdefault(layout, {})[scheme] = result
        self.path.write_text(json.dumps(clients | {client: own}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compared(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """Return ``error`` and ``greedy`` of logits ``[positions, vocabulary]`` against a reference, with two and three digits.

    ``error`` is ``‖a − b‖ / ‖b‖``. The mean over the vocabulary is subtracted from the logits first, since it
    changes no probability; so log-probabilities give the same error. ``greedy`` is the share of positions at
    which the most likely token is the same.
    """
    centred, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (logits, reference))
    error = float((centred - expected).norm() / expected.norm())
    greedy = float((logits.argmax(-1) == reference.argmax(-1)).double().mean())
    return {"error": float(f"{error:.2g}"), "greedy": float(f"{greedy:.3g}")}


def text_ids() -> list[int]:
    """Return the tokens of the text that every client reads: 128 of held-out text."""
    ids: list[int] = tiny_tokenizer()(held_out_text()[:400])["input_ids"]
    return ids[:128]


def logits_of(model: nn.Module, ids: list[int]) -> Tensor:
    """Return logits ``[positions, vocabulary]`` of a text, float32."""
    with torch.no_grad():
        result: Tensor = model(torch.tensor([ids])).logits[0].float()
    return result


def quantized_tiny_model(scheme: str, dtype: torch.dtype = torch.float32, kv_cache_scheme: str | None = None) -> nn.Module:
    """Return the tiny model in a scheme, rounded to nearest, calibrated on two samples."""
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=kv_cache_scheme)
    return ModelQuantizer(config).quantize_model(tiny_model(dtype), calibration_batches(2, 128))


def why_not_exported(layout: str, model: nn.Module, out: Path, options: ExportOptions | None = None) -> str | None:
    """Export a model; return None, or the reason why the layout cannot hold the model, without layer names."""
    try:
        export_with(layout, model, out, options)
    except UnsupportedError as error:
        text = _NAMES.sub("", str(error)).removeprefix(f"the layout '{layout}' cannot hold this model: ")
        return re.split(r"\. |; ", text)[0]
    return None


def changed_by_rounding(model: nn.Module, ids: list[int]) -> float:
    """Return the largest norm of the logits' change in four draws of relative errors of ``2 ** -20`` in the norms' outputs.

    This error is eight times the rounding error of float32. Summation of some hundred numbers in another
    order gives as much. It hardly matters if only weights are quantized. Quantized inputs near the edge of a
    step get another code, which changes all later layers.
    """
    expected, changes = logits_of(model, ids), []
    for seed in range(4):
        nudged, source = deepcopy(model), torch.Generator().manual_seed(seed)
        for name, parameter in nudged.named_parameters():
            if "norm" in name:
                parameter.data.mul_(1 + 2.0**-20 * torch.randn(parameter.shape, generator=source))
        changes.append(float((logits_of(nudged, ids) - expected).norm()))
    return max(changes)
