"""``quark evaluate``: perplexity of a checkpoint, float or quantized, and its KL divergence from a reference."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quark.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["evaluate", "register"]

_TOKENS_AT_A_TIME = 2048  # tokens of a batch: enough for good utilization, few enough for the logits of a large vocabulary


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("evaluate")(evaluate)


def evaluate(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint in Hugging Face form, float or quantized.")],
    reference: Annotated[Path | None, typer.Option(help="Directory of the float checkpoint to compare with.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or directory of .txt files; the default is a short bundled text.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window, at least 2.")] = 512,
    limit: Annotated[int | None, typer.Option(help="Largest number of windows, from the start of the text.")] = None,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint says.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print the perplexity of MODEL on a text; with --reference also the KL divergence from it and the top-1 agreement."""
    # Torch and transformers are imported here, not above: `quark --help` and the listings do without them.
    from quark import evaluate as metrics
    from quark.checkpoint.transformers_loading import register_layouts
    from quark.hf.loading import load_model
    from quark.hf.model_config import model_config

    started = time.perf_counter()
    windows = _windows(model, text, seq_len, limit)
    if reference is not None:
        model_config(reference)  # a missing directory is an error before the first model is loaded
    batches = windows.split(max(1, _TOKENS_AT_A_TIME // seq_len))
    register_layouts()
    loaded = load_model(model, dtype, device)
    result: dict[str, Any] = {"model": str(model), "windows": len(windows), "seq_len": seq_len}
    if reference is None:
        result |= {"tokens": len(windows) * (seq_len - 1), "perplexity": metrics.perplexity(loaded, batches)}
    else:
        import attrs

        comparison = metrics.compare(loaded, load_model(reference, dtype, device), batches)
        result |= {"reference": str(reference)} | attrs.asdict(comparison)
    result["seconds"] = round(time.perf_counter() - started, 3)
    typer.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _windows(model: Path, text: Path | None, seq_len: int, limit: int | None) -> Tensor:
    """Return the tokens to evaluate on, ``[N, seq_len]``; errors in the arguments are raised before a weight is read."""
    from quark.evaluate import token_windows
    from quark.hf.calibration_text import read_text
    from quark.hf.model_config import model_config
    from quark.hf.tokenizer import load_tokenizer
    from quark.testing.tiny import held_out_text

    config = model_config(model).get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and seq_len > context:
        raise ConfigError(f"windows of {seq_len} tokens exceed the context of '{model}', {context}: use --seq-len {context} or less")
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ConfigError(f"'{model}' has no tokenizer, so text cannot be turned into tokens: copy tokenizer.json into it")
    windows = token_windows(tokenizer, held_out_text() if text is None else read_text(text), seq_len, limit)
    vocabulary, largest = getattr(config, "vocab_size", None), int(windows.max())
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer in '{model}' gives the token {largest:,}, and its config.json has a vocabulary of {vocabulary:,}: they do not "
            "match, copy the tokenizer again"
        )
    return windows


def _lines(result: dict[str, Any]) -> list[str]:
    counted = f"{result['tokens']:,} tokens in {result['windows']} window(s) of {result['seq_len']}"
    lines = [f"{result['model']}: perplexity {result['perplexity']:.3f} over {counted}, {result['seconds']:.1f} s"]
    if "reference" in result:
        lines += [
            f"{result['reference']}: perplexity {result['reference_perplexity']:.3f}",
            f"KL divergence from the reference: mean {result['mean_kl']:.5f}, 99th percentile {result['p99_kl']:.5f} nats per token",
            f"top-1 agreement: {result['top1_agreement']:.2%}",
        ]
    return lines
