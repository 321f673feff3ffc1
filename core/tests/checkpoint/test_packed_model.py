"""A model that is prepared for a checkpoint's tensors has the plan from which the checkpoint was made."""

from __future__ import annotations

from quark.checkpoint.packed_model import pack_model
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark_devkit.small_models import run_config, small_model, with_cache


def test_pack_model_returns_the_plan_of_the_float_model_with_its_attention() -> None:
    model = small_model()
    config = with_cache(run_config("int4_wo_32"))
    wanted = make_plan(model, config, architecture_of(model))
    assert wanted.attentions
    found = pack_model(model, config)
    assert (found.rows, found.attentions) == (wanted.rows, wanted.attentions)
