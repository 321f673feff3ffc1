"""Laws of experts taken apart.

Each form computes what the fused module does, shares its memory, and shows experts their own tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark.models.hf.fused_experts import expert_parts
from quark.models.layers.experts import ExpertParts, SeparateExperts, separated, showing_all
from quark_templates.fused_experts import SeparateSortedExperts, sorted_experts, stacked_experts

EXPERTS, HIDDEN, INNER, TOKENS = 3, 8, 5, 7
NAMES = {"sorted": ("gate_proj", "up_proj", "down_proj"), "stacked": ("w1", "v1", "w2")}


class Sorted(nn.Module):
    """Called with all tokens once for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN, dtype=torch.float64))
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = torch.bmm(tokens.view(EXPERTS, -1, HIDDEN), self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, HIDDEN)


class StackedMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(EXPERTS * INNER, HIDDEN, dtype=torch.float64)) for _ in range(3))
        self.activation_fn = nn.SiLU()


class Stacked(nn.Module):
    """Called with tokens, choices and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.mlp = StackedMatrices()

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        w1, v1, w2 = (p.view(EXPERTS, INNER, HIDDEN) for p in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        inner = self.mlp.activation_fn(torch.einsum("...h,eih->...ei", tokens, w1)) * torch.einsum("...h,eih->...ei", tokens, v1)
        every = torch.einsum("...ei,eih->...eh", inner, w2).flatten(0, -3)
        share = torch.zeros(len(every), EXPERTS, dtype=torch.float64).scatter_(1, chosen, weights)
        return torch.einsum("teh,te->th", every, share).view_as(tokens)


@pytest.fixture(params=["sorted", "stacked"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def taken_apart(module: nn.Module, form: str, names: str | None = None) -> ExpertParts | None:
    return (sorted_experts if form == "sorted" else stacked_experts)(module, NAMES[names or form])


def case(form: str) -> tuple[nn.Module, SeparateExperts, tuple[Tensor, ...], Tensor]:
    """A fused module, its separate form, their inputs, and the tokens of each expert."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    fused = Sorted() if form == "sorted" else Stacked()
    parts = taken_apart(fused, form)
    assert parts is not None
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    chosen = torch.stack([torch.tensor([0, 2]).roll(i) for i in range(TOKENS)])  # nothing goes to expert 1
    weights = torch.rand(TOKENS, 2, dtype=torch.float64, generator=generator) + 0.1
    share = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64).scatter_(1, chosen, weights)
    if form == "sorted":
        share[:3, 0] = 0  # not every token goes everywhere
        return fused, separated(parts), ((share.T[:, :, None] * tokens).reshape(-1, HIDDEN),), share.T > 0
    return fused, separated(parts), (tokens.view(1, TOKENS, HIDDEN), chosen, weights), share.T > 0


def test_separate_experts_compute_what_the_fused_module_does(form: str) -> None:
    fused, separate, args, _ = case(form)
    expected = fused(*args)
    assert separate(*args).shape == expected.shape
    assert (separate(*args) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_their_weights_are_those_of_the_fused_module_and_not_copies(form: str) -> None:
    fused, separate, args, _ = case(form)
    assert [name for name, _ in separate.get_submodule("1").named_children()] == list(NAMES[form])
    memory = {p.untyped_storage().data_ptr() for p in fused.parameters()}
    assert {p.untyped_storage().data_ptr() for p in separate.parameters()} == memory
    with torch.no_grad():
        separate.get_submodule(f"0.{NAMES[form][-1]}").weight.zero_()  # type: ignore[operator]
    assert (fused(*args) - separate(*args)).abs().max() < 1e-12 * fused(*args).abs().max()


def test_an_expert_sees_the_tokens_that_are_routed_to_it_and_all_of_them_where_that_is_wanted(form: str) -> None:
    fused, separate, args, routed = case(form)
    expected, seen = fused(*args), {}

    def watch(index: int) -> None:
        separate.get_submodule(f"{index}.{NAMES[form][0]}").register_forward_pre_hook(lambda _, x: seen.__setitem__(index, x[0]))

    for index in range(EXPERTS):
        watch(index)
    separate(*args)
    assert {index: len(x) for index, x in seen.items()} == {i: int(n) for i, n in enumerate(routed.sum(1)) if n}
    assert all(x.ne(0).any(-1).all() for x in seen.values())
    with showing_all(separate, True):
        assert (separate(*args) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert {index: len(x) for index, x in seen.items()} == dict.fromkeys(range(EXPERTS), TOKENS)
    assert all(x.ne(0).any(-1).all() for x in seen.values())
    separate(*args)
    assert len(seen[0]) == int(routed[0].sum()), "only while it is wanted"


def test_a_form_that_is_not_stated_is_not_guessed() -> None:
    assert expert_parts(Sorted(), Architecture(model_type="family")) is None
    assert taken_apart(Sorted(), "stacked") is None
    assert taken_apart(Stacked(), "sorted") is None
    assert taken_apart(Stacked(), "stacked", "sorted") is None, "it has matrices of other names"
    assert taken_apart(nn.Linear(2, 2), "sorted") is None


def test_the_function_that_a_family_names_takes_its_experts_apart() -> None:
    family = Architecture(model_type="family", expert_parts="quark_templates.fused_experts:sorted_experts")
    parts = expert_parts(Sorted(), family)
    assert parts is not None
    assert list(parts.weights) == list(NAMES["sorted"])


def test_only_what_sorted_tokens_go_through_is_called_with_them() -> None:
    assert isinstance(case("sorted")[1], SeparateSortedExperts)
    assert not isinstance(case("stacked")[1], SeparateSortedExperts)


def test_a_model_that_calls_its_experts_in_another_way_is_told_so() -> None:
    _, apart, (tokens, *_), _ = case("stacked")
    with pytest.raises(UnsupportedError, match="calls its experts with chosen_experts, but without the experts' indices"):
        apart(tokens, chosen_experts=tokens)
