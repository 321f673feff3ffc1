"""Compare settings of algorithms on each combination of model, seed, text and scheme.

    python -m benchmarks.defaults TEXT_DIR MODEL… --setting now=gptq --setting mse=gptq:scale_search=mse
                                  [--schemes int4_wo_64,mxfp4] [--seeds 0,1] [--calibrate foldoc]
                                  [--evaluate foldoc,devil,code,german] [--windows 4] [--length 512]
                                  [--calibration-windows 8] [--dtype float32] [--device cpu]
                                  [--blocks 6] [--out docs/data/defaults.json]

A MODEL is a directory, or ``NAME=DIRECTORY``; ``tiny-llama``, ``tiny-mixture`` and ``tiny-layernorm`` are the
bundled ones. A model is a language model, a sentence embedder or a speech recognizer; each kind has its own
measures (`benchmarks.model_kinds`). ``--seeds`` makes variants of a language model: each seed rescales the
channels by factors that cancel (`benchmarks.rescaled`), and seed 0 leaves the weights unchanged. The texts
come from `benchmarks.texts`. Calibration uses the first half of a text. Evaluation uses the second half of
each text of ``--evaluate``. For a quick look, use ``--windows 2 --length 128``. If whole models take too
long, ``--blocks`` quantizes only the first decoder blocks.

A setting is ``NAME=ALGORITHMS[:OPTION=VALUE,…]``: algorithms joined by ``+``, or ``none`` for
round-to-nearest. An option is a field of the algorithms' settings: ``damp_percent`` sets the field in every
algorithm that has it, and ``gptq.damp_percent`` only in GPTQ. An option may also be the full name of a
constant or function, such as ``quark_algos.gptq.config.BEST_DAMPING``. A constant is replaced by the value,
and a function by one that returns the value. Values are JSON. The option ``calibration`` replaces the texts
of ``--calibrate``: ``code+german`` takes half of the sequences from each text, and ``code+code+german`` takes
two thirds from ``code``. The option ``calibration_windows`` is the number of sequences, and
``calibration_length`` the number of tokens in each. All settings are compared with the first one.

A cell is a combination of model, seed, scheme, calibration text and evaluation text. For each cell, the
program prints KL divergence from the float model and perplexity, or 1 − cosine for a sentence embedder. It
also prints the difference with its standard error, both from pairs of values for the same sequence, and a
verdict (`benchmarks.paired`). The verdict says whether the setting is better than the first one, worse or
equal. The last line has the verdict over all cells. ``cost`` is CPU seconds of quantization ÷ CPU seconds of
a float forward pass over the calibration tokens. Other work on the machine raises both times. With
``--device``, ``cost`` counts the CPU seconds of the host, which may wait for the device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch import nn

import quark_tiny_model
from benchmarks.model_kinds import Batch, LanguageModel, kind_of
from benchmarks.paired import Difference, counts, overall
from benchmarks.pooling import measures_of, pooled, row_of
from benchmarks.rescaled import rescale
from benchmarks.texts import digest
from quark.base.log import silenced
from quark.base.version import VERSION
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer

BUNDLED = Path(quark_tiny_model.__file__).parent


@attrs.frozen
class Setting:
    """Algorithms, and options that differ from the defaults.

    Attributes:
        name: Name of the setting in the table.
        algorithms: Names of algorithms, in any order; empty for round-to-nearest.
        options: Maps fields of the algorithms' settings to their values.
        replaced: Maps full names of constants or functions to the values that replace them.
        calibration: Names of calibration texts, joined by ``+``; empty for the texts of ``--calibrate``.
        sequences: Number of calibration sequences; None for the number of ``--calibration-windows``.
        length: Number of tokens in each calibration sequence; None for the number of ``--length``.
    """

    name: str
    algorithms: tuple[str, ...]
    options: Mapping[str, Any] = attrs.field(factory=dict)
    replaced: Mapping[str, Any] = attrs.field(factory=dict)
    calibration: str = ""
    sequences: int | None = None
    length: int | None = None

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Return the setting that ``NAME=ALGORITHMS[:OPTION=VALUE,…]`` describes.

        Raises:
            ValueError: The text does not have this form.
        """
        name, _, rest = text.partition("=")
        algorithms, _, options = rest.partition(":")
        if not name or not algorithms:
            raise ValueError(f"{text!r} is not a setting: write NAME=ALGORITHMS[:OPTION=VALUE,…]")
        values = {}
        for option in filter(None, _options(options)):
            key, is_given, value = option.partition("=")
            if not is_given:
                raise ValueError(f"the option {option!r} of {name!r} has no value: write {option}=VALUE")
            values[key] = _value(value)
        of_calibration = values.pop("calibration", ""), values.pop("calibration_windows", None), values.pop("calibration_length", None)
        is_option = {key: key.count(".") <= 1 for key in values}
        return cls(
            name,
            () if algorithms == "none" else tuple(algorithms.split("+")),
            {key: value for key, value in values.items() if is_option[key]},
            {key: value for key, value in values.items() if not is_option[key]},
            *of_calibration,
        )

    def config(self, model_type: str, scheme: str) -> Any:
        """Return the configuration of this setting for a model type and a scheme.

        Raises:
            ValueError: The setting has an option that none of its algorithms has as a field.
        """
        config = LLMTemplate.get(model_type).get_config(scheme=scheme, algorithm=list(self.algorithms) or None)
        unused = set(self.options)
        for i, settings in enumerate(config.algo_config or []):
            own = {}
            for key, value in self.options.items():
                algorithm, _, field = key.rpartition(".")
                if algorithm in ("", settings.name) and hasattr(settings, field):
                    own[field] = value
                    unused.discard(key)
            config.algo_config[i] = attrs.evolve(settings, **own)
        if unused:
            raise ValueError(
                f"{self.name}: no algorithm ({', '.join(self.algorithms) or 'none given'}) has the option "
                f"{', '.join(sorted(unused))}: leave it out"
            )
        return config

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the constants and functions that ``replaced`` names, during the ``with`` body."""
        patches = [mock.patch.object(*_owner(name), _like(name, value)) for name, value in self.replaced.items()]
        try:
            for patch in patches:
                patch.start()
            yield
        finally:
            mock.patch.stopall()


def _options(text: str) -> list[str]:
    """Split a text at its commas, but not at commas in brackets."""
    depths = list(accumulate((character in "[{") - (character in "]}") for character in text))
    return "".join("\n" if character == "," and not depth else character for character, depth in zip(text, depths, strict=True)).split("\n")


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _owner(name: str) -> tuple[Any, str]:
    """Return the module or class in which a full name is defined, and the last part of the name.

    Raises:
        ValueError: No module defines this name.
    """
    *parts, last = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for part in parts[size:]:
            owner = getattr(owner, part, None)
        if hasattr(owner, last):
            return owner, last
        break
    raise ValueError(f"{name} does not exist: give the full name of a constant or function of a module")


def _like(name: str, value: Any) -> Any:
    """Return ``value``, or a function that returns ``value`` if the name is the name of a function."""
    owner, last = _owner(name)
    return (lambda *_, **__: value) if callable(getattr(owner, last)) else value


@attrs.frozen
class Place:
    """A combination of model, seed, scheme and calibration text on which settings are compared."""

    model: str
    seed: int
    scheme: str
    calibration: str


def measured(args: argparse.Namespace, name: str, path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the cells of one model and seed.

    A cell has the values that each setting gives for each sequence.

    Raises:
        ValueError: The model is not a language model, and ``--blocks`` or a seed other than 0 is given.
    """
    float_model = load_model(path, args.dtype)
    kind = kind_of(float_model)(float_model, path, load_tokenizer(path), args.text)
    if (seed or args.blocks) and type(kind) is not LanguageModel:
        raise ValueError(f"{name} is not a language model: give --seeds 0 and no --blocks, or leave the model out")
    rows = {text: kind.batches(text, 1, args.windows, args.length) for text in args.evaluate}
    _rescale(float_model, seed, rows)
    float_model.to(args.device)
    for calibration in args.calibrate:
        for scheme in args.schemes:
            place = Place(name, seed, scheme, calibration)
            models, costs = {}, {}
            for setting in args.setting:
                size = setting.sequences or args.calibration_windows, setting.length or args.length
                calib = kind.calibration(setting.calibration or calibration, *size)
                models[setting.name], costs[setting.name] = _quantized(args, setting, place, path, rows, calib)
            for text, batches in rows.items():
                yield attrs.asdict(place) | {"evaluation": text, "cost": costs, "values": kind.values(models, batches)}


def _rescale(model: nn.Module, seed: int, rows: Mapping[str, Sequence[Batch]]) -> None:
    if seed:
        rescale(model, seed, next(iter(rows.values()))[0]["input_ids"][:, :64])


def _quantized(
    args: argparse.Namespace, setting: Setting, place: Place, path: Path, rows: Mapping[str, Sequence[Batch]], calib: Sequence[Batch]
) -> tuple[nn.Module, float]:
    """Quantize a fresh copy of the model; return the copy and the cost in units of a float forward pass."""
    model = load_model(path, args.dtype)
    _rescale(model, place.seed, rows)
    model.to(args.device)
    data = [{name: tensor.to(args.device) for name, tensor in batch.items()} for batch in calib]
    forward = _forward_seconds(model, data[:2]) * len(data) / len(data[:2])
    config = setting.config(model.config.model_type, place.scheme)
    with first_blocks(model, args.blocks), setting.replacing():
        start = time.process_time()
        quantized = ModelQuantizer(config).quantize_model(model, data)
        cost = round((time.process_time() - start) / forward, 2)
    return quantized, cost


@torch.no_grad()
def _forward_seconds(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the CPU seconds of one float forward pass over some batches."""
    model(**batches[0])
    start = time.process_time()
    for batch in batches:
        model(**batch)
    return time.process_time() - start


@contextmanager
def first_blocks(model: Any, count: int | None) -> Iterator[None]:
    """Remove all but the first ``count`` decoder blocks of a Llama-like model during the ``with`` body.

    If ``count`` is None, the model keeps all blocks.
    """
    if count is None:
        yield
        return
    others, config = model.model.layers[count:], model.config.get_text_config()
    whole, model.model.layers = config.num_hidden_layers, model.model.layers[:count]
    config.num_hidden_layers = count
    yield
    model.model.layers.extend(others)
    config.num_hidden_layers = whole


def summary(cells: Sequence[Mapping[str, Any]], before: str, after: str) -> str:
    """Return a line about all cells: mean change, number of cells of each verdict, and overall verdict."""
    change, verdicts = pooled(cells, before, after), [row_of(cell, before, after).change.verdict for cell in cells]
    cells_of = ", ".join(f"{count} {name}" for name, count in counts(verdicts).items())
    error = "" if change.error is None else f" ± {100 * math.exp(change.mean) * change.error:.1f}"
    percent = f"{' and '.join(measures_of(cells))} {100 * math.expm1(change.mean):+.1f}{error} %"
    return f"{percent} over {change.units} sequences; cells: {cells_of}; verdict: {overall(verdicts)}"


def line(cell: Mapping[str, Any], before: str, after: str) -> str:
    """Return the line that describes one cell."""
    row = row_of(cell, before, after)
    where = f"{cell['model']} {cell['seed']} {cell['scheme']} {cell['calibration']}→{cell['evaluation']}"
    parts = [f"{row.measure} {row.mean:.4f} → {row.mean + row.change.mean:.4f} ({_signed(row.change)})"]
    if row.perplexity is not None:
        ppl, ratio = row.perplexity
        parts.append(f"ppl {ppl:.2f} → {ppl * math.exp(ratio.mean):.2f} (ln {_signed(ratio)})")
    return f"{where:44} {'  '.join(parts)}  cost {cell['cost'][before]} → {cell['cost'][after]}  {row.change.verdict}"


def _signed(change: Difference) -> str:
    return f"{change.mean:+.4f}" + ("" if change.error is None else f" ± {change.error:.4f}")


def add_comparison(path: Path, args: argparse.Namespace, cells: Sequence[Mapping[str, Any]]) -> None:
    """Add a comparison to a file of results, which is created if it is missing."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"comparisons": []}
    data["comparisons"].append(
        {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"quark": VERSION, "torch": str(torch.__version__)},
            "settings": {setting.name: text for setting, text in zip(args.setting, args.setting_texts, strict=True)},
            "windows": args.windows,
            "length": args.length,
            "calibration_windows": args.calibration_windows,
            "dtype": args.dtype,
            "device": args.device,
            **({"blocks": args.blocks} if args.blocks else {}),
            "texts": {kind: digest(args.text / f"{kind}.txt") for kind in _texts(args)},
            "cells": list(cells),
        }
    )
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace('{"model"', '\n{"model"') + "\n", encoding="utf-8")


def _texts(args: argparse.Namespace) -> set[str]:
    """Return the names of the texts that any argument uses."""
    given = (*args.calibrate, *args.evaluate, *(setting.calibration for setting in args.setting))
    return {kind for kinds in given for kind in kinds.split("+") if kind}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--setting", action="append", required=True, dest="setting_texts", metavar="NAME=ALGORITHMS[:OPTION=VALUE,…]")
    for name, default in (("schemes", "int4_wo_64"), ("calibrate", "foldoc"), ("evaluate", "foldoc,devil,code,german")):
        parser.add_argument(f"--{name}", default=default.split(","), type=lambda text: text.split(","))
    parser.add_argument("--seeds", default=[0], type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="device of the models")
    parser.add_argument("--blocks", type=int, help="number of decoder blocks to quantize; default: all")
    parser.add_argument("--out", type=Path, help="file of results; the comparison is added")
    return parser


def places(models: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of each model."""
    for text in models:
        name, _, directory = text.rpartition("=")
        if text.startswith("tiny-"):
            yield text, BUNDLED / text.removeprefix("tiny-")
        else:
            yield name or Path(directory).name, Path(directory)


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    args.setting = [Setting.parse(text) for text in args.setting_texts]
    if len(args.setting) < 2 or len({setting.name for setting in args.setting}) < len(args.setting):
        sys.exit("there is nothing to compare: give at least two settings, each with its own name")
    first, *others = (setting.name for setting in args.setting)
    cells = []
    for name, path in places(args.models):
        for seed in args.seeds:
            for cell in measured(args, name, path, seed):
                cells.append(cell)
                for other in others:
                    print(f"{other:12} {line(cell, first, other)}", flush=True)
    for other in others:
        print(f"{other} against {first}: {summary(cells, first, other)}")
    if args.out:
        add_comparison(args.out, args, cells)


if __name__ == "__main__":
    with silenced():
        main()
