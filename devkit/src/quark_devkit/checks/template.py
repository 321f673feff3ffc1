"""Checks of templates: the facts are true of a tiny model, algorithms run or state a reason, and exports can
be loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.export import export_with
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.templates.algorithms import derived_config, refusal
from quark.errors import QuarkError
from quark.models.hf.internals import input_embeddings, output_embeddings
from quark.models.layers import counts_as, linear_weight
from quark.models.plan.family import text_config
from quark.plugins import algorithms
from quark.runs import ModelQuantizer
from quark.runs.run import plan_run
from quark_devkit.check import NotApplicableError, assume, check, complaining, require
from quark_devkit.example_models import (
    batches_of,
    blocks_of,
    coarse_config,
    example_of,
    facts_of,
    float_logits,
    inputs_of,
    logits_of,
    named_by,
    of_experts,
    readers_of_norms,
    rows_of,
    separated,
)
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import distance
from quark_devkit.whole_runs import readable_layout

TOLERANCE = 1e-9
"""Far above float64 rounding in two or three blocks, far below the effect of a scale."""
EFFECT = 1e-6
"""Least effect of a scale that is not undone, relative to the largest logit."""

_OF_ATTENTION = ("attention_inputs", "attention_inner", "attention_output", "attention_norm", "attention_value", "attention_output_norm")
_OF_MIXERS = ("query_projections", "key_projections", "value_projections", "mixer", "mixer_context")
_OF_MLP = ("mlp_inputs", "mlp_output", "mlp_norm", "mlp_value", "mlp_output_norm")
_OF_EXPERTS = ("experts", "experts_norm", "router", "shared_experts", "shared_expert_value", "shared_expert_gate")
_IN_A_BLOCK = (*_OF_ATTENTION, *_OF_MIXERS, *_OF_MLP, *_OF_EXPERTS)
"""Facts of an architecture that name modules of a block."""


def _linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if counts_as(part) is nn.Linear]


def _query_patterns(facts: Architecture) -> tuple[str, ...]:
    return (facts.q_layer_name,) if isinstance(facts.q_layer_name, str) else tuple(facts.q_layer_name or ())


def _in_a_block(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield pairs of a fact that names modules of a block and one of the names.

    For modules in experts, the name is a pattern with a star.
    """
    facts = facts_of(subject)
    for fact in _IN_A_BLOCK:
        names: str | tuple[str, ...] | None = getattr(facts, fact)
        yield from ((fact, name) for name in ((names,) if isinstance(names, str) else names or ()))
    for norm, readers in facts.attention_inner_norms:
        yield from (("attention_inner_norms", name) for name in (norm, *readers))
    experts = (("expert_inputs", facts.expert_inputs), ("expert_output", (facts.expert_output,)))
    yield from ((fact, pattern) for fact, names in experts for pattern in of_experts(facts, *names))
    if facts.expert_value:
        yield from (("expert_value", pattern) for pattern in of_experts(facts, facts.expert_value))


@check("template")
def is_named_as_its_model_type(subject: Subject) -> None:
    """The record's name equals ``model_type`` of the template's facts and of the family's configuration."""
    stated = facts_of(subject).model_type
    require(stated == subject.name, f"states facts of the model type '{stated}' under the name '{subject.name}'")
    seen = example_of(subject).config.model_type
    require(seen == subject.name, f"has an example of the model type '{seen}' under the name '{subject.name}'")


@check("template")
def names_the_decoder_blocks(subject: Subject) -> None:
    """``decoder_blocks`` names the list of all decoder blocks. A forward pass calls the blocks of
    ``encoder_blocks`` before these, and the blocks of each list in the list's order.
    """
    facts, model = facts_of(subject), example_of(subject)
    assume(facts.decoder_blocks is not None, "it states no decoder blocks: the whole model is one block")
    blocks = blocks_of(model, facts)
    own = [block for name, block in model.named_modules() if name.rpartition(".")[0] == facts.decoder_blocks]
    wanted = getattr(text_config(model), "num_hidden_layers", len(own))
    named = f"names {len(own)} modules in '{facts.decoder_blocks}' as decoder blocks"
    require(len(own) == wanted, f"{named}, but the model has {wanted}")
    entered: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, *_: entered.append(module))
    logits_of(model)
    require(entered, f"names modules in '{facts.decoder_blocks}' as decoder blocks, but the model calls none of them")
    if facts.encoder_blocks:
        lists = ", ".join(map(repr, facts.block_lists))
        require(entered == blocks, f"names {lists} as lists of blocks, but a forward does not call each once, in this order")


@check("template")
def names_embeddings_and_head(subject: Subject) -> None:
    """``embeddings`` and ``head`` are the model's input and output embeddings."""
    facts, model = facts_of(subject), example_of(subject)
    for names, wanted in ((facts.embeddings, input_embeddings(model)), ((facts.head,), output_embeddings(model))):
        for name in filter(None, names):
            module = dict(model.named_modules()).get(name)
            require(module is not None, f"names the module '{name}', which its model does not have")
            require(wanted is None or module is wanted, f"names '{name}', but the model has another module for that role")


@check("template")
def names_modules_that_there_are(subject: Subject) -> None:
    """Every module that a fact names is in the model, or in at least one of its blocks."""
    facts, model = facts_of(subject), separated(subject)
    modules = dict(model.named_modules())
    for fact in ("final_norm", "embedding_norm", "position_embeddings"):
        name = getattr(facts, fact)
        require(name is None or name in modules, f"states {fact}='{name}', which its model does not have")
    inserted = [pattern for pattern in facts.inserted_embeddings if not any(fnmatchcase(name, pattern) for name in modules)]
    require(not inserted, f"states inserted_embeddings='{inserted[0] if inserted else ''}', which its model does not have")
    blocks = blocks_of(model, facts)
    for fact, name in _in_a_block(subject):
        require(any(named_by(block, name) for block in blocks), f"states {fact}='{name}', which none of its model's blocks has")


@check("template")
def names_every_projection(subject: Subject) -> None:
    """A fact names each linear layer of a block, or the layer is excluded from quantization."""
    facts, model = facts_of(subject), separated(subject)
    patterns = [name for _, name in _in_a_block(subject)]
    excluded = facts.with_modules(facts.exclude_layers_name)
    blocks = {name: module for name, module in model.named_modules() if any(module is block for block in blocks_of(model, facts))}
    for prefix, block in blocks.items():
        for name in _linears(block):
            full = f"{prefix}.{name}" if prefix else name
            known = any(fnmatchcase(name, pattern) for pattern in patterns) or any(fnmatchcase(full, pattern) for pattern in excluded)
            require(known, f"does not mention the layer '{name}' of its blocks, so algorithms would skip it")


@check("template")
def patterns_match_layers(subject: Subject) -> None:
    """Each pattern of ``kv_layers_name`` and ``q_layer_name``, or its pair in ``module_patterns``, matches a
    layer of a decoder block."""
    facts, model = facts_of(subject), separated(subject)
    inside = f"{facts.decoder_blocks}." if facts.decoder_blocks else ""
    names = [name for name in _linears(model) if name.startswith(inside)]
    for fact, patterns in (("kv_layers_name", facts.kv_layers_name or ()), ("q_layer_name", _query_patterns(facts))):
        for pattern in patterns:
            spellings = facts.with_modules([pattern])
            found = any(fnmatchcase(name, each) for name in names for each in spellings)
            require(found, f"states the pattern '{pattern}' in {fact}, which matches no linear layer of a block of its model")


@check("template")
def caches_no_queries(subject: Subject) -> None:
    """A layer that both ``kv_layers_name`` and ``q_layer_name`` match is fused: it has more outputs than the
    attention's output projection has inputs.
    """
    facts, model = facts_of(subject), separated(subject)
    both = [facts.with_modules(patterns) for patterns in (facts.kv_layers_name or (), _query_patterns(facts))]
    if not facts.attention_output or not all(both):
        raise NotApplicableError("it does not state the patterns of the KV cache and of queries, or the output projection of attention")
    for block in blocks_of(model, facts):
        outputs = [block.get_submodule(name) for name in named_by(block, facts.attention_output)]
        read = min((linear_weight(layer).shape[1] for layer in outputs), default=0)
        for name in _linears(block):
            if outputs and all(any(fnmatchcase(f".{name}", pattern) for pattern in patterns) for patterns in both):
                rows = linear_weight(block.get_submodule(name)).shape[0]
                require(rows > read, f"takes '{name}' for keys and values, but its {rows} outputs are queries")


@check("template")
def excludes_head_and_routers(subject: Subject) -> None:
    """The output head, routers and gates of shared experts match ``exclude_layers_name``, since quantizing
    these layers costs the most accuracy.
    """
    facts, model = facts_of(subject), separated(subject)
    patterns = facts.with_modules(facts.exclude_layers_name)
    own = {facts.head, *(f"{facts.decoder_blocks}.*.{name}" for name in (facts.router, facts.shared_expert_gate) if name)}
    for name in _linears(model):
        if any(each and fnmatchcase(name, each) for each in own):
            require(any(fnmatchcase(name, each) for each in patterns), f"excludes {', '.join(patterns)}, but not '{name}'")


@check("template")
def input_groups_read_one_tensor(subject: Subject) -> None:
    """Layers of an input group (``attention_inputs``, ``mlp_inputs``, ``expert_inputs`` of each expert)
    receive the same tensor."""
    facts, model = facts_of(subject), separated(subject)
    groups: list[list[nn.Module]] = []
    for block in blocks_of(model, facts):
        for names in (facts.attention_inputs, facts.mlp_inputs):
            if names and all(named_by(block, name) for name in names):
                groups.append([block.get_submodule(name) for name in names])
        by_expert = zip(*(named_by(block, pattern) for pattern in of_experts(facts, *facts.expert_inputs)), strict=False)
        groups += [[block.get_submodule(name) for name in names] for names in by_expert]
    received: dict[nn.Module, Tensor] = {}
    for module in (module for group in groups for module in group):
        module.register_forward_pre_hook(lambda layer, args: received.__setitem__(layer, args[0]))
    float_logits(model)
    names_of = {module: name for name, module in model.named_modules()}
    for group in groups:
        same = all(received.get(module) is received.get(group[0]) for module in group)
        require(same, f"puts '{names_of[group[0]]}' into one input group with layers that read a different tensor")


@check("template")
def norms_feed_what_is_said(subject: Subject) -> None:
    """If a scale moves from a norm into the layers that the facts name as the norm's readers, the logits stay
    the same. If only the norm is scaled, the logits change.

    Scales are powers of two. This shows that no other layer reads the norm, that ``norm_has_unit_offset`` is
    right, and that the norm has a weight if the facts say so.
    """
    facts, model = facts_of(subject), separated(subject)
    expected = float_logits(model)
    for norm, patterns in readers_of_norms(facts):
        places = [
            (block.get_submodule(norm), readers)
            for block in blocks_of(model, facts)
            if named_by(block, norm) and (readers := [block.get_submodule(n) for p in patterns for n in named_by(block, p)])
        ]
        places = [(module, readers) for module, readers in places if getattr(module, "weight", None) is not None]
        if not facts.norm_has_weight:
            require(not places, f"says that norms have no weight, but '{norm}' has one")
            continue
        require(places, f"says that '{norm}' feeds {', '.join(patterns)}, but no block has these layers, or the norm has no weight")
        factors = [_powers(len(module.weight), i) for i, (module, _) in enumerate(places)]  # type: ignore[arg-type]
        for (module, _), factor in zip(places, factors, strict=True):
            _scale_rows(module, torch.arange(len(factor)), 1 / factor, float(facts.norm_has_unit_offset))
        require(distance(float_logits(model), expected) > EFFECT, f"says that '{norm}' feeds layers, but no layer reads it")
        for (_, readers), factor in zip(places, factors, strict=True):
            for reader in readers:
                with torch.no_grad():
                    rows_of(reader).mul_(factor)
        error = distance(float_logits(model), expected)
        also = "another layer reads the norm too, one of these layers does not, or norm_has_unit_offset is wrong"
        stated = f"says that '{norm}' feeds {', '.join(patterns)}"
        require(error < TOLERANCE, f"{stated}, but a scale moved there changes the logits by {error:.2g}: {also}")


@check("template")
def values_pass_linearly(subject: Subject) -> None:
    """If the rows of ``attention_value``, ``mlp_value`` or a similar projection are scaled, the logits are
    restored by the inverse scale in the projection that reads the output.
    """
    facts, model = facts_of(subject), separated(subject)
    expected, heads = float_logits(model), int(getattr(text_config(model), "num_attention_heads", 1))
    pairs = [
        (facts.attention_value, facts.attention_output, facts.attention_value_rows),
        (facts.mlp_value, facts.mlp_output, facts.mlp_value_rows),
        (facts.shared_expert_value, next(iter(facts.shared_experts[-1:]), None), facts.shared_expert_value_rows),
    ]
    if facts.expert_value:
        pairs += [(of, to, "all") for of in of_experts(facts, facts.expert_value) for to in of_experts(facts, facts.expert_output)]
    pairs = [pair for pair in pairs if pair[0] and pair[1]]
    assume(pairs, "it states no projection whose output reaches another projection linearly")
    for value, output, rows in pairs:
        for block in blocks_of(model, facts):
            for source, target in zip(named_by(block, str(value)), named_by(block, str(output)), strict=False):
                _move_value(block.get_submodule(source), block.get_submodule(target), rows, heads, of_heads=value == facts.attention_value)
        error = distance(float_logits(model), expected)
        stated = f"says that '{value}' (rows: {rows}) reaches '{output}' linearly"
        require(error < TOLERANCE, f"{stated}, but a scale moved there changes the logits by {error:.2g}")


def _move_value(source: nn.Module, target: nn.Module, rows: str, heads: int, *, of_heads: bool) -> None:
    """Divide the value rows of ``source`` by powers of two, and multiply the input channels of ``target``
    that read these rows."""
    outputs, columns = rows_of(source).shape[0], rows_of(target).shape[1]
    repeats = 1
    if rows == "last_of_each_head":
        of_each, values = outputs // heads, columns // heads
        which = torch.arange(outputs).view(heads, of_each)[:, of_each - values :].flatten()
    elif of_heads:
        count = outputs if rows == "all" else (outputs - columns) // 2  # the rows before are queries, as many as columns, and keys
        which, repeats = torch.arange(outputs - count, outputs), columns // count
    else:
        which = torch.arange(0 if rows == "all" else outputs - columns, outputs)
    factor = _powers(len(which), outputs)
    _scale_rows(source, which, 1 / factor)
    spread = factor.view(-1, columns // heads).repeat_interleave(repeats, 0).flatten() if repeats > 1 else factor
    with torch.no_grad():
        rows_of(target).mul_(spread)


def _powers(count: int, seed: int) -> Tensor:
    return 2.0 ** torch.randint(-1, 2, (count,), generator=torch.Generator().manual_seed(seed)).double()


def _scale_rows(module: nn.Module, rows: Tensor, by: Tensor, offset: float = 0.0) -> None:
    """Multiply output channels of a module. ``offset`` is 1 for norms that multiply by ``1 + weight``."""
    with torch.no_grad():
        weight = rows_of(module)
        factor = by if weight.ndim == 1 else by[:, None]
        weight[rows] = (weight[rows] + offset) * factor - offset
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is not None:
            bias[rows] *= by


@check("template")
def every_algorithm_fits_or_says_why_not(subject: Subject) -> None:
    """Each registered algorithm has settings that can be planned and that name existing layers, or the
    algorithm refuses the family with a reason.
    """
    facts = facts_of(subject)
    for record in algorithms():
        reason = refusal(record.name, facts)
        require(reason is None or reason.strip(), f"refuses the algorithm '{record.name}' without a reason")
    for name, settings in _fitting(facts):
        _planned(subject, name, settings)


def _fitting(facts: Architecture) -> Iterator[tuple[str, AlgoConfig]]:
    """Yield each algorithm that does not refuse the family, with its settings.

    Tunings are left out, since they do not depend on the family.
    """
    for record in algorithms():
        if record.processor is not None and record.kind != "block_tuning" and refusal(record.name, facts) is None:
            settings = derived_config(record.name, facts)
            if settings is not None:
                yield record.name, settings


def _planned(subject: Subject, name: str, settings: AlgoConfig) -> None:
    model, config = example_of(subject), coarse_config(subject)
    config.algo_config = [settings]
    with complaining(f"cannot be planned with the algorithm '{name}', but unsupported states no reason", QuarkError):
        run = plan_run(model, config)
    told = [line for line in run.plan.warnings if f"'{name}' name layers" in line]
    require(not told, f"leads to settings that name missing layers: {told[0] if told else ''}")


@check("template")
def every_algorithm_runs(subject: Subject) -> None:
    """With each fitting algorithm, the quantized model has finite logits. One run has one algorithm of each
    role."""
    for together in _runs_of_all(subject):
        model, config = example_of(subject), coarse_config(subject)
        config.algo_config = together
        model = ModelQuantizer(config).quantize_model(model, batches_of(model))
        finite = logits_of(model).isfinite().all()
        require(finite, f"gives logits that are not finite with {' and '.join(repr(settings.name) for settings in together)}")


@check("template")
def quantizes_and_reloads(subject: Subject) -> None:
    """A model that is quantized with a fitting transform of each role and with a rounding has the same logits
    after export and loading."""
    facts, layout = facts_of(subject), readable_layout()
    model, config = example_of(subject), coarse_config(subject)
    before = logits_of(model)
    config.algo_config = next(iter(_runs_of_all(subject)), None)
    model = ModelQuantizer(config).quantize_model(model, batches_of(model))
    expected = logits_of(model)
    require(bool(expected.isfinite().all()), "gives logits that are not finite after quantization")
    require(not torch.equal(expected, before), f"excludes every layer: {', '.join(facts.exclude_layers_name)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        export_with(layout, model, Path(directory) / "out")
        again: Any = import_model_from_safetensors(None, Path(directory) / "out", device="cpu")
        again.example_inputs = inputs_of(model)
        require(torch.equal(logits_of(again), expected), "gives different logits after its export is read back")


def _runs_of_all(subject: Subject) -> list[list[AlgoConfig]]:
    """Return the settings of all fitting algorithms, divided into as few runs as possible: one list for each
    run."""
    by_role: dict[object, list[AlgoConfig]] = {}
    for name, settings in _fitting(facts_of(subject)):
        record = algorithms().get(name)
        role = name if record.kind == "transform" and record.role is None else record.role
        by_role.setdefault((record.kind, role), []).append(settings)
    return [[settings for settings in together if settings is not None] for together in zip_longest(*by_role.values())]
