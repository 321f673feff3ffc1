"""Train the bundled tiny Llama from text files: tokenizer, weights, held-out text and provenance.

    python tools/train_tiny_model.py kjv.txt devils_dictionary.txt --out tiny_model/src/quark_tiny_model/llama

Everything is seeded, so the same texts, torch build and number of threads give the same files. The script
prints the held-out perplexity of the model, and of a unigram model over the same tokens. The script keeps the
model only if its perplexity is below a third of the perplexity of the unigram model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
BLOCK = 6000  # characters of a block; a whole block is training text or held out
HELD_OUT_EVERY = 48  # one block in every HELD_OUT_EVERY is held out
MAX_BYTES = 4_000_000  # limit of the directory without the held-out text


@attrs.frozen
class Recipe:
    """Settings of the model and of the training. Widths are multiples of 128, so that groups of 128 fit every
    layer."""

    vocabulary: int = 1024
    hidden: int = 256
    intermediate: int = 384
    blocks: int = 3
    heads: int = 4
    kv_heads: int = 2
    steps: int = 2300
    batch: int = 8
    length: int = 256
    peak_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.05
    seed: int = 20240229


def split(texts: Sequence[str]) -> tuple[str, str]:
    """Return the training text and the held-out text. Texts are cut into blocks of whole lines, and one block
    in every `HELD_OUT_EVERY` is held out."""
    kept: list[str] = []
    held_out: list[str] = []
    count = 0
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", min(start + BLOCK, len(text) - 1)) + 1 or len(text)
            (held_out if count % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 else kept).append(text[start:end])
            start, count = end, count + 1
    return "".join(kept), "".join(held_out)


def make_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of ``size`` tokens. Token 0 marks the end of a text. Encoding a text
    adds no special tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False, model_max_length=1024
    )


def sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the configuration fields that all models share. The head is tied, and every special token is
    token 0."""
    return {
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.blocks,
        "num_attention_heads": recipe.heads,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """Return a randomly initialised Llama with tied embeddings."""
    own = {"intermediate_size": recipe.intermediate, "num_key_value_heads": recipe.kv_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes(recipe), **own, max_position_embeddings=1024, initializer_range=0.04))


def batches(tokens: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Yield batches of shape ``[batch, length + 1]`` without end. Each pass over the text has another offset
    and another order."""
    generator = torch.Generator().manual_seed(recipe.seed)
    span = recipe.length + 1
    while True:
        offset = int(torch.randint(span, (), generator=generator))
        windows = tokens[offset:].unfold(0, span, span)
        for rows in torch.randperm(len(windows), generator=generator).split(recipe.batch):
            if len(rows) == recipe.batch:
                yield windows[rows]


def rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate. It rises linearly during the warm-up, and then falls to 0 along half a
    cosine."""
    if step < recipe.warmup:
        return recipe.peak_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.peak_rate * 0.5 * (1 + math.cos(math.pi * done))


def train(model: PreTrainedModel, tokens: Tensor, recipe: Recipe) -> None:
    """Train the model in place with AdamW, and print the loss. Only matrices have weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=recipe.peak_rate)
    model.train()
    start, loss_sum = time.perf_counter(), 0.0
    for step, windows in zip(range(recipe.steps), batches(tokens, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, recipe)
        output = model(input_ids=windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), windows[:, 1:].flatten())
        if getattr(output, "aux_loss", None) is not None:  # mixtures add a loss for uneven use of experts
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_sum += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss_sum / 100:.3f}  {time.perf_counter() - start:6.0f} s", flush=True)
            loss_sum = 0.0
    model.eval()


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokens: Tensor, length: int) -> float:
    """Return the perplexity over non-overlapping windows of ``tokens``. A shorter window at the end is left
    out."""
    windows = tokens.unfold(0, length, length)
    total = sum(
        float(torch.nn.functional.cross_entropy(model(input_ids=w[None]).logits[0, :-1].float(), w[1:], reduction="sum")) for w in windows
    )
    return math.exp(total / (len(windows) * (length - 1)))


def unigram_perplexity(train_tokens: Tensor, tokens: Tensor, size: int) -> float:
    """Return the perplexity of a unigram model, whose probabilities come from the token counts of the
    training text plus one."""
    counts = torch.bincount(train_tokens, minlength=size).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[tokens].mean()))


def provenance(sources: Sequence[Path], recipe: Recipe, measured: tuple[float, float]) -> str:
    """Return the text of PROVENANCE.md."""
    rows = "\n".join(f"| `{s.name}` | {s.stat().st_size} | `{hashlib.sha256(s.read_bytes()).hexdigest()}` |" for s in sources)
    settings = "\n".join(f"| {key} | {value} |" for key, value in attrs.asdict(recipe).items())
    return f"""# Where this model comes from

A Llama small enough to lie in a package, so that demonstrations and tests have real weights without a network. Made by
`tools/train_tiny_model.py` with torch {torch.__version__}, from texts in the public domain: the King James Version of the Bible
(1611; as in Debian's `bible-kjv-text`; in the United Kingdom the Crown licenses its printing) and Ambrose Bierce's *The Devil's Dictionary*
(1911; as in Debian's `dict-devil`, after the Internet Wiretap edition). The weights, the tokenizer and the held-out text are under the
licence of this repository as far as any right exists in them.

| source | bytes | SHA-256 |
|---|---|---|
{rows}

`held_out.txt` is one block of {BLOCK} characters in every {HELD_OUT_EVERY} of the sources, from both; the model has seen none of it.
Perplexity over its tokens, in windows of {recipe.length}: {measured[0]:.2f}; of a unigram model over the same tokens: {measured[1]:.1f}.

| recipe | |
|---|---|
{settings}
"""


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: str) -> None:
    """Write the checkpoint in bfloat16, the tokenizer and the held-out text."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False, max_new_tokens=64)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The name in both transformers 4 and 5.
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described = {key: value for key, value in described.items() if key != "backend"} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "held_out.txt").write_text(held_out, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="+", type=Path, help="plain-text files in the public domain")
    parser.add_argument("--out", type=Path, required=True, help="output directory; replaced only if the model is good enough")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="training steps")
    options = parser.parse_args(arguments)
    recipe = Recipe(steps=options.steps)
    torch.manual_seed(recipe.seed)
    training, held_out = split([path.read_text(encoding="utf-8") for path in options.text])
    tokenizer = make_tokenizer(training, recipe.vocabulary)
    tokens, held_tokens = (torch.tensor(tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]) for t in (training, held_out))
    model = make_model(recipe)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} tokens to train on, {len(held_tokens):,} held out")
    train(model, tokens, recipe)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "tiny"
        save(made, model, tokenizer, held_out)
        measured = perplexity(model.float(), held_tokens, recipe.length), unigram_perplexity(tokens, held_tokens, recipe.vocabulary)
        (made / "PROVENANCE.md").write_text(provenance(options.text, recipe, measured), encoding="utf-8")
        size = sum(f.stat().st_size for f in made.iterdir() if f.name != "held_out.txt")
        print(f"held-out perplexity {measured[0]:.2f}, unigram {measured[1]:.1f}, {size:,} bytes")
        if measured[0] * 3 >= measured[1] or size > MAX_BYTES:
            print("the model is not good enough: nothing is kept", file=sys.stderr)
            return 1
        shutil.copytree(made, options.out, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
