"""ad hoc"""
import pytest, torch
from quark_algos.rotate.folding import block, outside, r1_of, values
from quark_algos.rotate.hadamard import Rotation
from quark_algos.smooth.places import resolve
from quark_algos.sites import sites_of
from .whole_models import ALL, batch_for, blocks_of, distance, facts_of, heads_of, logits, whole_model
from .test_rotated_stream import CANNOT, WIDTH

@pytest.mark.parametrize("t", [x for x in ALL if x not in CANNOT])
def test_r1(t):
    model, facts = whole_model(t), facts_of(t)
    batch = batch_for(t, model); before = logits(model, batch)
    r = r1_of(WIDTH, facts, seed=1)
    outside(model, facts, r)
    for b in blocks_of(model, facts): block(b, facts, r)
    assert distance(logits(model, batch), before) < 1e-9

@pytest.mark.parametrize("t", ALL)
def test_r2(t):
    model, facts = whole_model(t), facts_of(t)
    batch = batch_for(t, model); before = logits(model, batch)
    heads = heads_of(model); why=[]
    for b in blocks_of(model, facts):
        site = next((s for s in sites_of(facts) if s.kind == "value"), None)
        m = resolve(site, b, facts, heads) if site else "no site"
        if isinstance(m, str): why.append(m); continue
        w = m[0].channels.columns // heads
        why.append(values(b, facts, Rotation.of(w, seed=2), heads))
    if any(why): print(t, why)
    assert distance(logits(model, batch), before) < 1e-9
