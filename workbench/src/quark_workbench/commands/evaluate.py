"""``quark evaluate`` measures a checkpoint: perplexity, KL divergence from a reference, or task scores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.base.lazy import LazyRef
from quark.errors import CheckpointError, ConfigError, MissingPluginError
from quark_workbench.commands.evaluation_lines import result_lines, task_lines
from quark_workbench.commands.event_lines import print_result
from quark_workbench.commands.given_options import command, given_options
from quark_workbench.commands.run_options import TrustRemoteCode

if TYPE_CHECKING:
    from quark_workbench.data import Sample
    from quark_workbench.evaluate import Protocol, Windows

__all__ = ["evaluate"]

_TEXTS = 256
"""Default number of texts for a model that takes whole texts, such as an embedder."""
_TOKENS_AT_A_TIME = 2048  # in a batch: enough for good utilization; the logits of a large vocabulary still fit


@attrs.frozen(kw_only=True)
class TextChoices:
    """Command-line options for the evaluation text and the protocol."""

    text: Annotated[
        str | None,
        typer.Option(
            help="Text to evaluate on: a file or directory of text, JSON lines or Parquet (also with images or sounds), or a source by its "
            "name; `quark datasets` lists them. The default is a short bundled text."
        ),
    ] = None
    text_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the source of the text; `quark datasets NAME` shows its options.")
    ] = None
    protocol: Annotated[
        str,
        typer.Option(
            help="How to cut and score the text: quark, wikitext (windows of 2048 tokens, as in papers), llama.cpp "
            "(only the second half of each window is scored), or lm-eval (rolling windows, perplexity per word)."
        ),
    ] = "quark"
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a window, at least 2; the protocol sets the default.")] = None
    stride: Annotated[
        int | None, typer.Option(help="Tokens from the start of a window to the start of the next; each token is scored once.")
    ] = None
    bos: Annotated[
        str | None, typer.Option(help="Windows that begin with a BOS token: auto, each, first or none; the protocol sets the default.")
    ] = None
    score_from: Annotated[
        float | None, typer.Option(help="Where scoring begins in a window: a share of the window below 1, or a number of tokens.")
    ] = None

    def samples(self, model: Path, limit: int) -> list[Sample]:
        """Return the first ``limit`` samples if at least one of these samples has an image or a sound.

        Return ``[]`` if no sample has one, or if the checkpoint has no processor for images or sounds.
        """
        from itertools import islice

        from quark_workbench.data import read_samples
        from quark_workbench.data.media_rows import has_media
        from quark_workbench.data.processor import has_processor

        if self.text is None or not has_processor(model):
            return []
        first = list(islice(read_samples(self.text, given_options("--text-option", self.text_option)), limit))
        return first if any(map(has_media, first)) else []

    def opened(self, model: Path, trust_remote_code: bool) -> tuple[Any, Any, Any]:
        """Return the class, the config and the tokenizer of a checkpoint whose model takes text.

        Raises:
            QuarkError: The model takes other inputs than text, or the checkpoint has no tokenizer. No weight
                is read before this error.
        """
        from quark.calibration.batches import refuse_text
        from quark.models.hf.model_class import model_class
        from quark.models.hf.model_config import model_config
        from quark.models.hf.tokenizer import load_tokenizer

        config = model_config(model, trust_remote_code=trust_remote_code)
        kind = model_class(config, model / "config.json", trust_remote_code=trust_remote_code).type
        refuse_text(kind, "give --text rows with images or sounds, or run the model and its reference in Python")
        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise ConfigError(f"'{model}' has no tokenizer, so text cannot be turned into tokens: copy tokenizer.json into that directory")
        return kind, config, tokenizer

    def texts(self, tokenizer: Any, limit: int) -> list[str]:
        """Return at most ``limit`` texts: the samples, or the paragraphs of a single sample."""
        from quark_workbench.commands.evaluation import texts_of
        from quark_workbench.data import read_samples

        options = given_options("--text-option", self.text_option)
        samples = iter([_bundled_text()] if self.text is None else read_samples(self.text, options))
        return texts_of(tokenizer, samples, limit)

    def windows(self, model: Path, config: Any, tokenizer: Any, limit: int | None) -> tuple[Protocol, Windows]:
        """Return the evaluation protocol and the windows of tokens.

        If the user sets no window length and the default exceeds the model's context length, the windows have
        the context length.

        Raises:
            QuarkError: An argument cannot be used. No weight is read before this error.
        """
        from quark_workbench.data import read_samples, text_of
        from quark_workbench.evaluate import protocol_of, scored_windows

        protocol = protocol_of(self.protocol, seq_len=self.seq_len, stride=self.stride, bos=self.bos, score_from=self.score_from)
        config = config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if isinstance(context, int) and protocol.seq_len > context:
            if self.seq_len is not None:
                raise ConfigError(
                    f"windows of {protocol.seq_len} tokens exceed the context length of '{model}' ({context}): use --seq-len {context} or "
                    f"less"
                )
            protocol = attrs.evolve(protocol, seq_len=context)
        options = given_options("--text-option", self.text_option)
        words = _bundled_text() if self.text is None else text_of(tokenizer, read_samples(self.text, options))
        windows = scored_windows(tokenizer, words, protocol, limit)
        _refuse_larger_vocabulary(model, config, int(windows.tokens.max()))
        return protocol, windows


def _refuse_larger_vocabulary(model: Path, config: Any, largest: int) -> None:
    """Raise CheckpointError if the largest token id, ``largest``, is not in the model's vocabulary."""
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer in '{model}' returns the token id {largest:,}, but the vocabulary in its config.json has "
            f"{vocabulary:,} tokens: copy the right tokenizer into that directory"
        )


@attrs.frozen(kw_only=True)
class TaskChoices:
    """Command-line options for evaluation tasks and the backend."""

    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas, instead of a text.")] = None
    task_path: Annotated[Path | None, typer.Option(help="Directory of task files of your own.")] = None
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples in the context of each question; by default, each task sets the number.")
    ] = None
    batch_size: Annotated[str, typer.Option(help="Number of questions in a batch, or auto.")] = "1"
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask questions as chats, with the chat template of the tokenizer.")
    ] = False
    backend: Annotated[str, typer.Option(help="Program that runs the model in tasks: transformers, or vllm if it is installed.")] = (
        "transformers"
    )
    backend_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for vLLM's engine, such as max_model_len=4096 or enforce_eager=true.")
    ] = None

    def scores(self, model: Path, limit: int | None, device: str, dtype: str, packed: bool) -> dict[str, Any]:
        """Return the scores of a checkpoint, float or quantized, as plain data.

        Raises:
            ConfigError: The batch size is invalid, a number is out of its range, the backend takes no
                options, or the checkpoint has no tokenizer.
        """
        from quark.checkpoint.transformers_loading import load_checkpoint
        from quark.models.hf.model_config import model_config
        from quark.models.hf.tokenizer import load_tokenizer
        from quark_workbench.evaluate.tasks import TaskOptions, evaluate_tasks, prepare_tasks

        batch = self.batch_size
        if not (batch.isdecimal() and int(batch) > 0) and batch.partition(":")[0] != "auto":
            raise ConfigError(f"--batch-size {batch!r} is neither a positive number nor auto: give one of these")
        if (limit is not None and limit < 1) or (self.num_fewshot is not None and self.num_fewshot < 0):
            raise ConfigError("--limit must be at least 1, and --num-fewshot at least 0")
        options = TaskOptions(
            tasks=[name.strip() for name in (self.tasks or "").split(",") if name.strip()],
            task_path=self.task_path,
            num_fewshot=self.num_fewshot,
            limit=limit,
            batch_size=int(batch) if batch.isdecimal() else batch,
            apply_chat_template=self.apply_chat_template,
        )
        backend_options = given_options("--backend-option", self.backend_option)
        if backend_options and self.backend != "vllm":
            raise ConfigError("--backend-option needs --backend vllm: add --backend vllm, or leave out --backend-option")
        model_config(model)
        manager = prepare_tasks(options, self.backend)
        if self.backend == "vllm":
            scores = evaluate_tasks(model, None, options, manager, **{"dtype": dtype, **backend_options})
        else:
            tokenizer = load_tokenizer(model)
            if tokenizer is None:
                raise ConfigError(f"'{model}' has no tokenizer, so it cannot read questions: copy tokenizer.json into that directory")
            scores = evaluate_tasks(load_checkpoint(model, dtype, device, packed=packed), tokenizer, options, manager)
        return {"model": str(model), "backend": self.backend, "tasks": {name: attrs.asdict(score) for name, score in scores.items()}}


@command("evaluate", text=TextChoices, tasks=TaskChoices)
def evaluate(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint in Hugging Face form, float or quantized.")],
    *,
    reference: Annotated[Path | None, typer.Option(help="Directory of the float checkpoint to compare with.")] = None,
    text: TextChoices,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Largest number of windows (from the start of the text), of whole texts, of samples, or of questions of each task."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to measure as well; `quark metrics` lists them. May be repeated.")
    ] = None,
    by_block: Annotated[
        bool,
        typer.Option("--by-block", help="Read the checkpoints block by block, for models larger than memory; the results are the same."),
    ] = False,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed", help="Keep the weights packed and unpack them in each forward pass. This takes less memory, but is slower."
        ),
    ] = False,
    tasks: TaskChoices,
    device: Annotated[str, typer.Option(help="Torch device to work on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the dtype of the checkpoint).")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: the events of the run, and the result on the last line.")
    ] = False,
) -> None:
    """Print the perplexity of MODEL, its KL divergence from a reference, or its scores in tasks.

    For embedders, rerankers, reward models and classifiers, --reference compares vectors, ranks or classes.
    For speech models, the word error rate is printed too.
    """
    # Torch and transformers are imported in functions, not above: `quark --help` does without them.
    started = time.perf_counter()
    if tasks.tasks is not None:
        result = tasks.scores(model, limit, device, dtype, packed)
    elif samples := text.samples(model, limit or _TEXTS):
        from quark_workbench.commands.evaluation import evaluate_samples

        where = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "packed": packed}
        result = {"model": str(model)} | evaluate_samples((model, reference), samples, metric or [], where, by_block)
    else:
        from quark_workbench.commands.evaluation import compare_texts, evaluate_windows
        from quark_workbench.evaluate.whole_texts import text_kind

        kind, config, tokenizer = text.opened(model, trust_remote_code)
        where = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code, "packed": packed}
        whole = text_kind(model, kind, config, tokenizer, text.seq_len)
        if whole is not None and reference is not None and not metric:
            result = {"model": str(model)} | compare_texts(
                whole, (model, reference), text.texts(tokenizer, limit or _TEXTS), where, by_block
            )
        else:
            protocol, windows = text.windows(model, config, tokenizer, limit)
            result = {"model": str(model), "protocol": attrs.asdict(protocol), "windows": len(windows), "seq_len": protocol.seq_len}
            batches = windows.split(max(1, _TOKENS_AT_A_TIME // windows.tokens.shape[1]))
            result |= evaluate_windows((model, reference), list(batches), metric or [], where, by_block)
    result["seconds"] = round(time.perf_counter() - started, 3)
    lines = result_lines if tasks.tasks is None else task_lines
    print_result(result) if as_json else typer.echo("\n".join(lines(result)))


def _bundled_text() -> str:
    """Return the text that comes with the distribution quark-tiny-model.

    Raises:
        MissingPluginError: The distribution quark-tiny-model is not installed.
    """
    try:
        text: str = LazyRef("quark_tiny_model:held_out_text").load()()
    except ModuleNotFoundError as error:
        if error.name != "quark_tiny_model":
            raise
        raise MissingPluginError(
            "the default text needs the package quark-tiny-model, which is not installed: pip install quark-tiny-model, or give a text "
            "with --text"
        ) from None
    return text
