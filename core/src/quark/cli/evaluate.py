"""``quark evaluate``: perplexity of a checkpoint, float or quantized, and its KL divergence from a reference."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.cli.quantize import TrustRemoteCode
from quark.errors import CheckpointError, ConfigError, NonFiniteError

if TYPE_CHECKING:
    from quark.evaluate import Protocol, Windows

__all__ = ["evaluate", "register"]

_TOKENS_AT_A_TIME = 2048  # tokens of a batch: enough for good utilization, few enough for the logits of a large vocabulary


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("evaluate")(evaluate)


def evaluate(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint in Hugging Face form, float or quantized.")],
    reference: Annotated[Path | None, typer.Option(help="Directory of the float checkpoint to compare with.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or directory of .txt files; the default is a short bundled text.")] = None,
    protocol: Annotated[
        str, typer.Option(help="quark, wikitext (2048, as in papers), llama.cpp (half windows), or lm-eval (rolling, per word).")
    ] = "quark",
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a window, at least 2; the default is the protocol's.")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens from a window to the next; what overlaps is scored once.")] = None,
    bos: Annotated[str | None, typer.Option(help="BOS tokens: auto, each, first, none; the default is the protocol's.")] = None,
    score_from: Annotated[float | None, typer.Option(help="Where scoring begins in a window: a share below 1, or tokens.")] = None,
    limit: Annotated[int | None, typer.Option(help="Largest number of windows, from the start of the text.")] = None,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the checkpoint says.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print the perplexity of MODEL on a text; with --reference also the KL divergence from it and the top-1 agreement."""
    # Torch and transformers are imported here, not above: `quark --help` and the listings do without them.
    from quark import evaluate as metrics
    from quark.checkpoint.transformers_loading import register_layouts
    from quark.hf.loading import load_model
    from quark.hf.model_config import model_config

    started = time.perf_counter()
    chosen = metrics.protocol_of(protocol, seq_len=seq_len, stride=stride, bos=bos, score_from=score_from)
    chosen = _within_context(chosen, model, trust_remote_code, is_default=seq_len is None)
    windows = _windows(model, text, chosen, limit, trust_remote_code)
    if reference is not None:
        model_config(reference, trust_remote_code=trust_remote_code)  # a missing directory is an error before the first model is loaded
    batches = windows.split(max(1, _TOKENS_AT_A_TIME // chosen.seq_len))
    register_layouts()
    loaded = load_model(model, dtype, device, trust_remote_code=trust_remote_code)
    unit = "token" if windows.words is None else "word"
    result: dict[str, Any] = {"model": str(model), "protocol": attrs.asdict(chosen), "windows": len(windows), "seq_len": chosen.seq_len}
    result["unit"] = unit
    try:
        if reference is None:
            likelihood = metrics.likelihood(loaded, batches)
            result |= {"tokens": likelihood.tokens, "perplexity": likelihood.perplexity.value}
            result |= {"perplexity_error": likelihood.perplexity.error, "bits_per_token": likelihood.bits_per_token}
        else:
            comparison = metrics.compare(loaded, load_model(reference, dtype, device, trust_remote_code=trust_remote_code), batches)
            result |= {"reference": str(reference)} | attrs.asdict(comparison)
    except NonFiniteError as error:
        checkpoints = f"'{model}'" if reference is None else f"'{model}' beside '{reference}'"
        raise NonFiniteError(f"{checkpoints}: {error}", tensor=error.tensor) from error
    result["seconds"] = round(time.perf_counter() - started, 3)
    typer.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _within_context(protocol: Protocol, model: Path, trust_remote_code: bool, *, is_default: bool) -> Protocol:
    """Return the protocol with windows that the model can read: a default length is cut to its context, a chosen one is refused."""
    from quark.hf.model_config import model_config

    context = getattr(model_config(model, trust_remote_code=trust_remote_code).get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int) or protocol.seq_len <= context:
        return protocol
    if is_default:
        return attrs.evolve(protocol, seq_len=context)
    raise ConfigError(f"windows of {protocol.seq_len} tokens exceed the context of '{model}', {context}: use --seq-len {context} or less")


def _windows(model: Path, text: Path | None, protocol: Protocol, limit: int | None, trust_remote_code: bool) -> Windows:
    """Return the windows to evaluate on; errors in the arguments are raised before a weight is read."""
    from quark.evaluate import scored_windows
    from quark.hf.calibration_text import read_text
    from quark.hf.model_config import model_config
    from quark.hf.tokenizer import load_tokenizer
    from quark.testing.tiny import held_out_text

    config = model_config(model, trust_remote_code=trust_remote_code).get_text_config()
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise ConfigError(f"'{model}' has no tokenizer, so text cannot be turned into tokens: copy tokenizer.json into it")
    windows = scored_windows(tokenizer, held_out_text() if text is None else read_text(text), protocol, limit)
    vocabulary, largest = getattr(config, "vocab_size", None), int(windows.tokens.max())
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer in '{model}' gives the token {largest:,}, and its config.json has a vocabulary of {vocabulary:,}: they do not "
            "match, copy the tokenizer again"
        )
    return windows


def _lines(result: dict[str, Any]) -> list[str]:
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
    return lines


_PERCENTILES = (("median", "median_kl"), ("90 %", "p90_kl"), ("99 %", "p99_kl"), ("99.9 %", "p999_kl"), ("largest", "max_kl"))


def _measured(result: dict[str, Any], key: str, form: str) -> str:
    """Return a mean with its standard error, where that is known."""
    error = result[f"{key}_error"]
    return f"{result[key]:{form}}" + ("" if error is None else f" ± {error:{form.lstrip('+')}}")
