"""``quark evaluate --tasks``: its options, and the scores of a checkpoint in tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from quark.errors import ConfigError

if TYPE_CHECKING:
    from quark_workbench.evaluate.tasks import TaskOptions

__all__ = ["Backend", "BackendOptions", "BatchSize", "ChatTemplate", "NumFewshot", "TaskPath", "Tasks", "task_options", "task_scores"]

Tasks = Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas, in place of a text.")]
TaskPath = Annotated[Path | None, typer.Option(help="Directory of task files of your own.")]
NumFewshot = Annotated[int | None, typer.Option(help="Examples in the context of each question; the default is each task's.")]
BatchSize = Annotated[str, typer.Option(help="Questions at a time, or auto.")]
ChatTemplate = Annotated[bool, typer.Option("--apply-chat-template", help="Put questions as chats.")]
Backend = Annotated[str, typer.Option(help="What runs the model in tasks: transformers, or vllm where it is installed.")]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option("--backend-option", help="KEY=VALUE for the engine of vllm, such as max_model_len=4096 or enforce_eager=true."),
]


def task_options(tasks: str, task_path: Path | None, fewshot: int | None, limit: int | None, batch: str, chat: bool) -> TaskOptions:
    """Return the options of tasks from those of the command line.

    Raises:
        ConfigError: The batch size is neither a number nor "auto", or a number is out of its range.
    """
    from quark_workbench.evaluate.tasks import TaskOptions

    if not (batch.isdecimal() and int(batch) > 0) and batch.partition(":")[0] != "auto":
        raise ConfigError(f"--batch-size {batch!r} is neither a number from 1 on nor auto")
    if (limit is not None and limit < 1) or (fewshot is not None and fewshot < 0):
        raise ConfigError("--limit is at least 1, and --num-fewshot at least 0")
    return TaskOptions(
        tasks=[name.strip() for name in tasks.split(",") if name.strip()],
        task_path=task_path,
        num_fewshot=fewshot,
        limit=limit,
        batch_size=int(batch) if batch.isdecimal() else batch,
        apply_chat_template=chat,
    )


def task_scores(
    model: Path, options: TaskOptions, backend: str, backend_options: Mapping[str, Any], device: str, dtype: str
) -> dict[str, Any]:
    """Return the scores of a checkpoint, float or quantized, as plain data.

    Raises:
        ConfigError: There are options for a backend that takes none, or the checkpoint has no tokenizer.
    """
    from quark.checkpoint.transformers_loading import register_layouts
    from quark.models.hf.loading import load_model
    from quark.models.hf.model_config import model_config
    from quark.models.hf.tokenizer import load_tokenizer
    from quark_workbench.evaluate.tasks import evaluate_tasks, prepare_tasks

    if backend_options and backend != "vllm":
        raise ConfigError("--backend-option is for the engine of --backend vllm: leave it out, or name that backend")
    model_config(model)
    manager = prepare_tasks(options, backend)
    if backend == "vllm":
        scores = evaluate_tasks(model, None, options, manager, **{"dtype": dtype, **backend_options})
    else:
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise ConfigError(f"'{model}' has no tokenizer, so no question can be put: copy tokenizer.json into it")
        register_layouts()
        scores = evaluate_tasks(load_model(model, dtype, device), tokenizer, options, manager)
    return {"model": str(model), "backend": backend, "tasks": {name: attrs.asdict(score) for name, score in scores.items()}}
