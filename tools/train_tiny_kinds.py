"""Train the other bundled tiny models: a mixture of experts, and a model with LayerNorms and biases.

    python -m tools.train_tiny_kinds mixture kjv.txt devil.txt --out tiny_model/src/quark_tiny_model/mixture

The texts must be those of the tiny Llama, whose folder must be beside the output. The script uses the split
and the tokenizer of the tiny Llama. Everything is seeded, so the same texts, torch build and number of
threads give the same files. The script keeps a model only if its held-out perplexity is below a third of a
unigram model's perplexity.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from tools.train_tiny_model import Recipe, perplexity, save, sizes, split, train, unigram_perplexity

MAX_BYTES = 1_600_000
"""Limit for a directory."""
TOP, EXPERTS = 2, 8
BALANCE = 2e-3
"""Weight of the load-balancing loss: the router uses every expert, but not equally often."""
LEAST_TOKENS = 16
"""Least number of held-out tokens of an expert; fewer tokens mean that the expert was hardly trained."""


@attrs.frozen
class KindRecipe(Recipe):
    """The settings of a smaller model and of its training. Widths are multiples of 64, so that groups of 64
    fit every layer."""

    hidden: int = 128
    intermediate: int = 64
    blocks: int = 2
    kv_heads: int = 1
    steps: int = 2400
    peak_rate: float = 4e-3


def make_mixture(recipe: KindRecipe) -> Qwen2MoeForCausalLM:
    """Return a mixture of eight experts and a shared expert. A router chooses two of the eight experts for
    each token."""
    config = Qwen2MoeConfig(
        **sizes(recipe),
        intermediate_size=recipe.intermediate,
        moe_intermediate_size=recipe.intermediate,
        shared_expert_intermediate_size=recipe.intermediate,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        norm_topk_prob=True,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=1024,
        initializer_range=0.04,
        router_aux_loss_coef=BALANCE,
        output_router_logits=True,
    )
    return Qwen2MoeForCausalLM(config)


def make_layernorm(recipe: KindRecipe) -> OPTForCausalLM:
    """Return a model like OPT, with LayerNorms, biases, learned positions and a tied head."""
    config = OPTConfig(
        **sizes(recipe),
        word_embed_proj_dim=recipe.hidden,
        ffn_dim=4 * recipe.hidden,
        max_position_embeddings=512,
        dropout=0.0,
        init_std=0.04,
    )
    return OPTForCausalLM(config)


KINDS: dict[str, Callable[[KindRecipe], PreTrainedModel]] = {"mixture": make_mixture, "layernorm": make_layernorm}


def tokens_of_experts(model: Any, tokens: Tensor, length: int) -> Iterator[tuple[str, list[int]]]:
    """For each block of a mixture, yield the name of the block and the number of tokens that each expert
    gets."""
    routers = {name: module for name, module in model.named_modules() if hasattr(module, "top_k")}
    counts = {name: torch.zeros(EXPERTS, dtype=torch.int64) for name in routers}
    hooks = [module.register_forward_hook(_counting(counts[name])) for name, module in routers.items()]
    perplexity(model, tokens, length)
    for hook in hooks:
        hook.remove()
    yield from ((name, count.tolist()) for name, count in counts.items())


def _counting(counts: Tensor) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        counts.add_(torch.bincount(output[-1].flatten(), minlength=EXPERTS))

    return hook


def provenance(kind: str, sources: Sequence[Path], recipe: Recipe, measured: tuple[float, float], more: Sequence[str]) -> str:
    """Return the text of PROVENANCE.md."""
    rows = "\n".join(f"| `{s.name}` | {s.stat().st_size} | `{hashlib.sha256(s.read_bytes()).hexdigest()}` |" for s in sources)
    settings = "\n".join(f"| {key} | {value} |" for key, value in attrs.asdict(recipe).items())
    return f"""# Where this model comes from

Made by `tools/train_tiny_kinds.py {kind}` with torch {torch.__version__}, from the texts, by the split and
with the tokenizer of the [tiny Llama](../llama/PROVENANCE.md), whose `held_out.txt` it has not seen either.

| source | bytes | SHA-256 |
|---|---|---|
{rows}

Perplexity over the tokens of `held_out.txt`, in windows of {recipe.length}: {measured[0]:.2f}; of a unigram
model over the same tokens: {measured[1]:.1f}.

| recipe | |
|---|---|
{settings}
{"".join(f"{chr(10)}{line}" for line in more)}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("text", nargs="+", type=Path, help="the texts of the tiny Llama, in the same order")
    parser.add_argument("--out", type=Path, required=True, help="output directory; replaced only if the model is good enough")
    parser.add_argument("--steps", type=int, default=KindRecipe().steps, help="training steps")
    options = parser.parse_args(arguments)
    recipe = KindRecipe(steps=options.steps)
    torch.manual_seed(recipe.seed)
    training, held_out = split([path.read_text(encoding="utf-8") for path in options.text])
    llama = options.out.parent / "llama"
    if (llama / "held_out.txt").read_text(encoding="utf-8") != held_out:
        sys.exit(f"{llama / 'held_out.txt'} does not match these texts: give the texts that its PROVENANCE.md lists")
    tokenizer = AutoTokenizer.from_pretrained(llama, local_files_only=True)
    tokens, held_tokens = (torch.tensor(tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]) for t in (training, held_out))
    model: Any = KINDS[options.kind](recipe)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} tokens to train on", flush=True)
    train(model, tokens, recipe)
    if options.kind == "mixture":
        model.config.output_router_logits = False
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "tiny"
        save(made, model, tokenizer, held_out)
        (made / "held_out.txt").unlink()  # the Llama's folder has it
        model.float()
        measured = perplexity(model, held_tokens, recipe.length), unigram_perplexity(tokens, held_tokens, recipe.vocabulary)
        routed = dict(tokens_of_experts(model, held_tokens, recipe.length))
        more = [f"Tokens of the held-out text for each expert of `{name}`: {', '.join(map(str, n))}.\n" for name, n in routed.items()]
        (made / "PROVENANCE.md").write_text(provenance(options.kind, options.text, recipe, measured, more), encoding="utf-8")
        size = sum(f.stat().st_size for f in made.iterdir())
        print(f"held-out perplexity {measured[0]:.2f}, unigram {measured[1]:.1f}, {size:,} bytes", *more, sep="\n")
        is_starved = any(n < LEAST_TOKENS for counts in routed.values() for n in counts)
        if measured[0] * 3 >= measured[1] or size > MAX_BYTES or is_starved:
            print("the model is not good enough: nothing is kept", file=sys.stderr)
            return 1
        shutil.copytree(made, options.out, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
