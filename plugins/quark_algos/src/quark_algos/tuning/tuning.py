"""Experimental."""
from __future__ import annotations
import math, time
import torch
from torch import Tensor
OPT = dict(epochs=8, batch=1, rounding=True, lr=0.05, update="sign", latent="float", scales=True, scale_lr=2e-3, norms=True, norm_lr=2e-3, wants_float=True, dtype=torch.bfloat16, loss="relative", all_tokens=False, momentum=0.0, margin=0.0)
LOG=[]

class Layer:
    def __init__(self, name, block):
        self.name=name
        self.weights = block.weights(name)
        w = block.float_weights[name].float().t().contiguous()
        self.grid = g = self.weights.rounded_grid()
        q0 = self.weights.wt
        q1 = g.neighbours(q0, w)
        d = q1-q0
        self.q0=q0; self.q1=q1
        self.dt = d.t().contiguous()
        if OPT["latent"]=="float":
            u = torch.where(d!=0, (w-q0)/torch.where(d!=0,d,1), 0).clamp(0, 0.5-OPT["margin"])
        else:
            u = torch.zeros_like(d)
        # u latent in [N,K]
        self.dsign = torch.sign(self.dt)
        dt=OPT["dtype"]
        self.u = u.t().contiguous()
        self.w0 = q0.t().contiguous().to(dt); self.w1=q1.t().contiguous().to(dt)
        self.can_scale = g.can_be_rescaled and OPT["scales"]
        G = g.current.scale.shape[0]
        self.G=G
        self.a = torch.zeros(q0.shape[1], G) # log factor [N,G]
        self.m=torch.zeros_like(self.a); self.v=torch.zeros_like(self.a)
        self.mu = torch.zeros_like(self.u) if OPT["momentum"] else None
        if OPT["update"]=="adam": self.um=torch.zeros_like(self.u); self.uv=torch.zeros_like(self.u)
        self.best=None
    def weight(self):
        w = torch.where(self.u>=0.5, self.w1, self.w0) if OPT["rounding"] else self.w0
        if self.can_scale:
            self.base = w
            w = (w.view(w.shape[0], self.G, -1) * (1+self.a).unsqueeze(-1).to(w.dtype)).view_as(w)
        self.leaf = w.detach().requires_grad_()
        return self.leaf
    def step(self, t, lr, slr):
        g = self.leaf.grad
        if self.can_scale:
            ga = (g*self.base).view(g.shape[0], self.G, -1).sum(-1, dtype=torch.float32)
            adam(self.a, ga, self.m, self.v, t, slr)
        if OPT["rounding"]:
            if OPT["update"]=="sign":
                gs = torch.sign(g).float()*self.dsign
                if self.mu is not None:
                    self.mu.mul_(OPT["momentum"]).add_(gs, alpha=1-OPT["momentum"]); gs=self.mu
                self.u.add_(gs, alpha=-lr).clamp_(0,1)
            elif OPT["update"]=="adam":
                gd = g.float()*self.dt
                adam(self.u, gd, self.um, self.uv, t, lr); self.u.clamp_(0,1)
            else:
                gd = g.float()*self.dt
                r = gd.square().mean().sqrt()
                self.u.add_((gd/r).clamp_(-3,3), alpha=-lr).clamp_(0,1)
        self.leaf=None
    def state(self): return (self.u>=0.5).clone(), self.a.clone()
    def write(self, state):
        mask,a = state
        g=self.grid
        scales=g.current
        q = torch.where(mask.t(), self.q1, self.q0)
        if self.can_scale:
            scales = g.rescaled((1+a).t().contiguous())
            size=q.shape[0]//scales.scale.shape[0]
            q = q * (scales.scale/g.current.scale).repeat_interleave(size,0)
            q = g.round_(q.contiguous(), scales)
        elif g.has_subscales:
            pass
        self.weights.keep(g, q, scales)

def adam(p, g, m, v, t, lr, b1=0.9, b2=0.95):
    m.mul_(b1).add_(g, alpha=1-b1); v.mul_(b2).addcmul_(g,g,value=1-b2)
    p.add_((m/(1-b1**t))/((v/(1-b2**t)).sqrt()+1e-12), alpha=-lr)

class BlockTuner:
    def __init__(self, settings):
        self.wants_float=OPT["wants_float"]
    def tune(self, block):
        c0=time.process_time()
        with torch.no_grad():
            layers=[Layer(n, block) for n in block.layers]
        setup=time.process_time()-c0
        norms={n:p.detach().clone().float() for n,p in block.parameters.items()} if OPT["norms"] else {}
        na={n:torch.zeros_like(p) for n,p in norms.items()}; nm={n:torch.zeros_like(p) for n,p in norms.items()}; nv={n:torch.zeros_like(p) for n,p in norms.items()}
        train=[s for s in block.samples if OPT["all_tokens"] or bool((~s.is_held_out).any())]
        held=[s for s in block.samples if bool(s.is_held_out.any())]
        inv={s.number: (1/s.target.float().square().sum(-1).clamp(min=1e-20)) for s in block.samples}
        if OPT["loss"]=="mse":
            inv={n: torch.full_like(v, 1/ float(torch.cat([1/x for x in inv.values()]).mean())) for n,v in inv.items()}
        elif OPT["loss"]=="clip":
            allv=torch.cat([1/x for x in inv.values()]); med=float(allv.median())
            inv={n: 1/((1/v).clamp(min=med)) for n,v in inv.items()}
        dt=OPT["dtype"] if OPT["dtype"]!=torch.float32 else None
        def subst():
            d={f"{l.name}.weight": l.weight() for l in layers}
            nl={n: (p*(1+na[n])).requires_grad_() for n,p in norms.items()}
            return d, nl
        steps=OPT["epochs"]*len(train)//OPT["batch"]
        gen=torch.Generator().manual_seed(0)
        order=[]
        while len(order)<steps*OPT["batch"]: order+=torch.randperm(len(train),generator=gen).tolist()
        losses=[]
        for t in range(steps):
            f=1-t/steps
            with torch.no_grad(): d,nl=subst()
            with torch.enable_grad(), block.substituted({**d,**nl}):
                for i in order[t*OPT["batch"]:(t+1)*OPT["batch"]]:
                    s=train[i]
                    out=block.output(s, dt)
                    e=(out.float()-s.target.float()).square().sum(-1)*inv[s.number]
                    if not OPT["all_tokens"]: e=e[~s.is_held_out]
                    loss=e.mean(); loss.backward(); losses.append(loss.item())
            with torch.no_grad():
                for l in layers: l.step(t+1, OPT["lr"]*f, OPT["scale_lr"]*f)
                for n,leaf in nl.items():
                    if leaf.grad is None: continue
                    adam(na[n], leaf.grad.float()*norms[n], nm[n], nv[n], t+1, OPT["norm_lr"]*f)
        flips=[]
        with torch.no_grad():
            for l in layers:
                st=l.state(); flips.append(float(st[0].float().mean())); l.write(st)
            for n,p in norms.items(): block.parameters[n].copy_((p*(1+na[n])).to(block.parameters[n].dtype))
        k=len(train)
        LOG.append(dict(block=block.name, cpu=time.process_time()-c0, setup=setup, steps=steps, first=sum(losses[:k])/k, last=sum(losses[-k:])/k, flips=sum(flips)/len(flips)))
        return {"": {"loss_first": LOG[-1]["first"], "loss_last": LOG[-1]["last"], "steps": steps}}
