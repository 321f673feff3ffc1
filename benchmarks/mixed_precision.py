"""Automatic mixed precision on a real model: divergence and perplexity at equal size, beside uniform schemes and a heuristic.

    python -m benchmarks.mixed_precision MODEL TEXT_DIR [--pairs fp8,mxfp4/int8,int4_wo_64,bf16] [--bits 5,6] [--dtype float32]
                                         [--sensitivities fisher,output] [--uniform mxfp6_e2m3,int4_wo_32] [--windows 4]

Choices are made from the checkpoint in its own dtype, on 8 sequences of 512 tokens from TEXT_DIR/foldoc.txt, character 200,000 on. The
model is then quantized in --dtype, with the same text for static scales, and compared with the float model of that dtype on other
sequences of 512 tokens: --windows from foldoc.txt (character 3,500,000 on) and as many from devil.txt (character 20,000 on).

A choice is also made from each set of candidates at the size that each scheme of --uniform takes alone: those rows compare at equal size.

``ends`` is the heuristic: the larger candidates from the first and the last block inwards, as many groups as the budget allows. One JSON
line for each row, then a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import sequences
from quark.evaluate import compare
from quark.hf.loading import load_model
from quark.hf.tokenizer import load_tokenizer
from quark.selection import FLOAT, Budget, Selection, SelectionProblem, SelectionResult, select_schemes
from quark.torch import ModelQuantizer


class Uniform:
    """One candidate for every group."""

    def __init__(self, name: str) -> None:
        self._name = name

    def select(self, problem: SelectionProblem) -> Selection:
        return Selection(dict.fromkeys(problem.sizes, self._name))


class Ends:
    """Larger candidates for the first and the last blocks: groups in the order of their distance from an end, as large as they may be."""

    def select(self, problem: SelectionProblem) -> Selection:
        last = max(_block(group.name) for group in problem.groups)
        order = sorted(problem.groups, key=lambda group: min(_block(group.name), last - _block(group.name)))
        choices = {name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()}
        for group in order:
            larger = [
                one for one in problem.sizes[group.name] if problem.bytes_of({**choices, group.name: one}) <= (problem.most_bytes or 0)
            ]
            fitting = [one for one in larger if one != FLOAT or len(problem.candidates) == 2]
            choices[group.name] = max(fitting, key=lambda one: problem.sizes[group.name][one])
        return Selection(choices)


def _block(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return 0 if found is None else int(found[1])


class Remembered(torch.nn.Module):
    """A model that computes the logits of each batch of tokens once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        key = tuple(tokens.flatten().tolist())
        if key not in self._logits:
            self._logits[key] = self.model(tokens).logits
        return self._logits[key]


class Measured:
    """Quantizes by a configuration and compares, once for each configuration."""

    def __init__(self, model: Path, text: Path, dtype: str, windows: int) -> None:
        self.model, self.dtype = model, dtype
        tokenizer = load_tokenizer(model)
        self.calib = list(sequences(tokenizer, text / "foldoc.txt", 200_000, 8, 512).split(1))
        rows = [sequences(tokenizer, text / f, at, windows, 512) for f, at in (("foldoc.txt", 3_500_000), ("devil.txt", 20_000))]
        self.evaluation = list(torch.cat(rows).split(1))
        self.reference = Remembered(load_model(model, dtype))

    def choose(self, candidates: Sequence[str], bits: float, selector: Any, **options: Any) -> SelectionResult:
        return select_schemes(self.model, candidates, Budget(bits=bits), self.calib, selector=selector, selector_options=options)

    def row(self, what: str, candidates: Sequence[str], target: float, result: SelectionResult) -> dict[str, Any]:
        model = load_model(self.model, self.dtype)
        ModelQuantizer(result.config).quantize_model(model, self.calib)
        found = compare(model, self.reference, self.evaluation)
        counts = {name: sum(1 for one in result.selection.choices.values() if one == name) for name in result.problem.candidates}
        row = {"candidates": ",".join(candidates), "target": target, "choice": what, "bits": round(result.bits, 3)}
        row |= {"megabytes": round(result.total_bytes / 1e6, 2), "kl": round(found.mean_kl, 4), "kl_error": found.mean_kl_error}
        row |= {"perplexity": round(found.perplexity, 3), "groups": counts, "seconds": round(result.seconds, 1)}
        row |= {"predicted": result.loss, "notes": list(result.selection.notes)}
        print(json.dumps(row), flush=True)
        return row


def rows_of(measured: Measured, pair: Sequence[str], bits: Sequence[float], sensitivities: Sequence[str]) -> Iterator[dict[str, Any]]:
    for scheme in (name for name in pair if name != "bf16"):
        # The budget of a uniform choice is what it takes: a float candidate makes every size reachable.
        result = measured.choose([scheme, "bf16"], 16.0, Uniform(scheme))
        yield measured.row(f"uniform {scheme}", pair, round(result.bits, 2), result)
    for target in bits:
        yield measured.row("ends", pair, round(target, 3), measured.choose(pair, target, Ends()))
        for sensitivity in sensitivities:
            result = measured.choose(pair, target, "mixed_precision", sensitivity=sensitivity)
            yield measured.row(sensitivity, pair, round(target, 3), result)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--pairs", default="fp8,mxfp4/int8,int4_wo_64,bf16", help="candidates, sets of them parted by /")
    parser.add_argument("--bits", default="5,6")
    parser.add_argument("--sensitivities", default="fisher,output", help="of fisher, output, kl")
    parser.add_argument("--uniform", default="", help="further schemes, each alone, to compare with")
    parser.add_argument("--dtype", default="float32", help="of the model that is quantized and compared")
    parser.add_argument("--windows", type=int, default=4, help="sequences of 512 tokens from each of two texts to compare on")
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    start = time.perf_counter()
    measured, rows = Measured(args.model, args.text, args.dtype, args.windows), []
    bits = [float(b) for b in filter(None, args.bits.split(","))]
    for scheme in filter(None, args.uniform.split(",")):
        result = measured.choose([scheme, "bf16"], 16.0, Uniform(scheme))
        rows.append(measured.row(f"uniform {scheme}", [scheme], round(result.bits, 2), result))
        bits.append(result.bits)
    for pair in args.pairs.split("/"):
        rows += rows_of(measured, pair.split(","), bits, args.sensitivities.split(","))
    titles = ("candidates", "target bits", "choice", "bits", "MB", "KL", "±", "perplexity", "seconds to choose")
    print("", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", sep="\n")
    for r in rows:
        error = f"{r['kl_error']:.4f}"
        cells = [r["candidates"], r["target"], r["choice"], r["bits"], r["megabytes"], r["kl"], error, r["perplexity"], r["seconds"]]
        print("|", " | ".join(map(str, cells)), "|")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
