"""Compare mixed precision on a real model with single schemes and with a heuristic, at equal size.

    python -m benchmarks.mixed_precision MODEL TEXT_DIR
                                         [--sets fp8,mxfp6_e2m3,mxfp4/ptpc_fp8,uint4_wo_32,uint4_wo_64]
                                         [--bits 5,6] [--uniform nvfp4,mx6] [--sensitivities fisher,output]
                                         [--dtype bfloat16] [--windows 2] [--out FILE]

The selector chooses schemes for the checkpoint in the checkpoint's own dtype. It uses 8 sequences of 512
tokens from TEXT_DIR/foldoc.txt (from character 200,000 on). The program then converts the model to --dtype,
and rounds it to nearest in the chosen schemes. Static scales come from the same 8 sequences. The quantized
model is compared with the float model in --dtype on other sequences of 512 tokens. --windows is the number of
sequences from foldoc.txt (from character 3,500,000 on), and from devil.txt (from character 20,000 on).

For each set of candidates and each size of --bits, the program measures one choice for each sensitivity, and
the choices of the heuristic ``ends``. ``ends`` starts at the first and the last block and goes inwards: it
gives each group the largest candidate that the budget still allows. It chooses once from all candidates, then
without the largest candidate, and so on. The program also measures every scheme of a set and of --uniform
alone. It prints a line of JSON for each row, then ratios. ``--out`` writes the rows to a file, which the
documentation shows. If the file has a row already, the program keeps it, so you can restart a measurement.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import sequences
from benchmarks.results import Measurement
from quark.base.version import VERSION
from quark.errors import ConfigError
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import ModelQuantizer
from quark_workbench.evaluate import compare
from quark_workbench.mixed_precision import Budget, Selection, SelectionProblem, SelectionResult, select_schemes
from quark_workbench.mixed_precision.by_sensitivity import MixedPrecision
from quark_workbench.mixed_precision.by_sensitivity.selector import Losses, losses_of

SETS = "fp8,mxfp6_e2m3,mxfp4_mxfp6_e2m3/fp8,mxfp6_e2m3,mxfp4/ptpc_fp8,uint4_wo_32,uint4_wo_64/bf16,uint4_wo_32,uint4_wo_64"
BITS = "4.5,5,5.125,5.5,6,6.25,7"
UNIFORM = "mxfp4_weight_only,nvfp4,int4_wo_64,int4_wo_32,mx6,mxfp6_e3m2"
UNIFORM_CHOICE, ENDS = "uniform", "ends"


class Uniform:
    """Selector that chooses the same candidate for every group."""

    def __init__(self, name: str) -> None:
        self._name = name

    def select(self, problem: SelectionProblem) -> Selection:
        return Selection(dict.fromkeys(problem.sizes, self._name))


class Ends:
    """Selector that gives larger candidates to the groups nearest to the first and the last block.

    The selector goes inwards, and gives each group the largest candidate with which the model still fits the
    size.
    """

    def select(self, problem: SelectionProblem) -> Selection:
        last = max(_block(group.name) for group in problem.groups)
        order = sorted(problem.groups, key=lambda group: min(_block(group.name), last - _block(group.name)))
        choices = {name: min(sizes, key=lambda one: sizes[one]) for name, sizes in problem.sizes.items()}
        for group in order:
            larger = [
                one for one in problem.sizes[group.name] if problem.bytes_of({**choices, group.name: one}) <= (problem.most_bytes or 0)
            ]
            choices[group.name] = max(larger, key=lambda one: problem.sizes[group.name][one])
        return Selection(choices)


class Predicting:
    """The selector `MixedPrecision`, which here predicts the losses of a set of candidates only once."""

    def __init__(self, sensitivity: str) -> None:
        self._own = MixedPrecision(sensitivity=sensitivity, measured=0, points=2)
        self._losses: dict[tuple[str, ...], Losses] = {}

    def select(self, problem: SelectionProblem) -> Selection:
        names = tuple(problem.candidates)
        if names not in self._losses:
            self._losses[names] = losses_of(problem, self._own.sensitivity, self._own.tokens)
        return self._own.select_by(problem, self._losses[names])


def _block(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return 0 if found is None else int(found[1])


class Remembered(torch.nn.Module):
    """A model that computes the logits of a batch of tokens once, and stores them for later calls."""

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
    """Quantizes the model, and compares the quantized model with the float model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.dtype = args.model, args.dtype
        tokenizer = load_tokenizer(args.model)
        self.calib = list(sequences(tokenizer, args.text / "foldoc.txt", 200_000, 8, 512).split(1))
        places = (("foldoc.txt", 3_500_000), ("devil.txt", 20_000))
        self.evaluation = list(torch.cat([sequences(tokenizer, args.text / f, at, args.windows, 512) for f, at in places]).split(1))
        self.reference = Remembered(load_model(args.model, args.dtype))

    def choose(self, candidates: Sequence[str], bits: float, selector: Any) -> SelectionResult:
        return select_schemes(self.model, candidates, Budget(bits=bits), self.calib, selector=selector)

    def row(self, row: Mapping[str, Any], result: SelectionResult) -> dict[str, Any]:
        """Quantize in the chosen schemes; print and return the row with the size and the divergence."""
        model = load_model(self.model, self.dtype)
        ModelQuantizer(result.config).quantize_model(model, self.calib)
        found = compare(model, self.reference, self.evaluation)
        counts = Counter(result.selection.choices.values())
        figures = {"bits": round(result.bits, 3), "megabytes": round(result.total_bytes / 1e6, 2), "kl": round(found.mean_kl, 4)}
        figures |= {"kl_error": round(found.mean_kl_error, 4), "perplexity": round(found.perplexity, 2)}
        loss = None if result.loss is None else round(result.loss, 4)
        print(json.dumps(row := {**row, **figures, "groups": dict(counts), "predicted": loss}), flush=True)
        return row


def wanted_rows(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Sequence[str], float, Any]]:
    """Yield the key, the candidates, the size in bits and the selector of each row.

    The rows of single schemes come first, then the rows of the sets of candidates.
    """
    sets = [names.split(",") for names in args.sets.split("/")]
    named = [name for names in sets for name in names] + list(filter(None, args.uniform.split(",")))
    for name in dict.fromkeys(name for name in named if name != "bf16"):
        # With the float candidate, every size can be reached.
        yield {"choice": UNIFORM_CHOICE, "candidates": [name], "target": 0.0, "from": [name]}, [name, "bf16"], 16.0, Uniform(name)
    predicting = {name: Predicting(name) for name in args.sensitivities.split(",")}
    for names in sets:
        for bits in map(float, args.bits.split(",")):
            row = {"candidates": names, "target": round(bits, 3)}
            for some in (names[i:] for i in range(len(names) - 1)):
                yield {"choice": ENDS, **row, "from": some}, some, bits, Ends()
            for name, selector in predicting.items():
                yield {"choice": name, **row, "from": names}, names, bits, selector


def measured_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `wanted_rows` with their figures.

    Rows that the file has already are not measured again.
    """
    measured = Measured(args)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out and args.out.exists() else []
    for row, names, bits, selector in wanted_rows(args):
        if not any(row.items() <= one.items() for one in rows):
            try:
                rows.append(measured.row(row, measured.choose(names, bits, selector)))
            except ConfigError as error:
                print(f"{row}: {error}", flush=True)  # a size that these candidates do not reach
            if args.out:
                write(args, rows)
    return rows


def write(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows to the file of ``--out``, with a description of the measurement."""
    data = {"command": "python -m benchmarks.mixed_precision SMOLLM2_135M TEXT_DIR --out docs/data/mixed_precision.json"}
    data |= {"model": f"SmolLM2-135M, {args.dtype}", "quark": VERSION, "torch": str(torch.__version__)}
    args.out.write_text(json.dumps({**data, "predictions": 2 * args.windows * 511, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def best_alone(rows: Sequence[dict[str, Any]], bits: float) -> dict[str, Any] | None:
    """Among the single schemes of at most ``bits`` bits, return the row with the smallest divergence.

    Return None if every scheme is larger.
    """
    fitting = [row for row in rows if row["choice"] == UNIFORM_CHOICE and row["bits"] <= bits]
    return min(fitting, key=lambda row: row["kl"], default=None)


def is_heuristic(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Return whether ``row`` is a choice of ``ends`` for the candidates and the size of ``chosen``."""
    return (row["choice"], row["candidates"], row["target"]) == (ENDS, chosen["candidates"], chosen["target"])


def measurements(rows: Sequence[dict[str, Any]]) -> list[Measurement]:
    """Return two figures for each choice: the choice's KL divergence ÷ the divergences of two rivals.

    The rivals are the best single scheme and the best choice of ``ends``, both of the same size.
    """
    found = []
    for row in (row for row in rows if row["choice"] not in (UNIFORM_CHOICE, ENDS)):
        alone = best_alone(rows, row["target"])
        ends = min((r for r in rows if is_heuristic(r, row)), key=lambda r: r["kl"])
        case = f"{', '.join(row['candidates'])}, {row['target']:g} bits, by {row['choice']}"
        if alone is not None:
            found.append(Measurement("mixed precision: divergence", case, row["kl"] / alone["kl"], "×", "best one scheme of that size", 1))
        found.append(Measurement("mixed precision: heuristic", case, row["kl"] / ends["kl"], "×", "first and last blocks larger", 1))
    return found


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--sets", default=SETS, help="candidates, the largest first; write / between sets")
    parser.add_argument("--bits", default=BITS)
    parser.add_argument("--sensitivities", default="fisher", help="any of fisher, output, kl")
    parser.add_argument("--uniform", default=UNIFORM, help="further single schemes to compare with")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model that is quantized and compared")
    parser.add_argument("--windows", type=int, default=2, help="number of sequences of 512 tokens from each of the two evaluation texts")
    parser.add_argument("--out", type=Path, help="file for the rows")
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    start = time.perf_counter()
    rows = measured_rows(args)
    for one in measurements(rows):
        print(f"{one.value:5.2f}× the divergence of the {one.floor}: {one.case}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return measurements(rows)


if __name__ == "__main__":
    main()
