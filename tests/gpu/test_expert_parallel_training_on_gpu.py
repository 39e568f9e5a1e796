"""DDP and FSDP2 over NCCL train a model with experts on two GPUs as plain PyTorch does on one GPU with all tokens.

Each rank has a GPU: NCCL does not take two ranks on one.
"""

import warnings
from functools import cache

import pytest
import torch
from kit.hopper import needs_gpu
from kit.two_ranks import Ranks
from torch import distributed as dist
from torch import nn

import fusedmoe as fm
from fusedmoe import expert_parallel as ep_of
from fusedmoe.expert_parallel.copies import LAG

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 512, 256, 16, 4
TOKENS = 2500, 1733  # of each rank: enough for the rules that overlap exchanges
SIZE, STEPS, LEARNING_RATE, MOST_NORM = 2, 3, 2.0, 0.5


class Model(nn.Module):
    def __init__(self, ep):
        super().__init__()
        sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": CHOSEN}
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = fm.MoE(**sizes, shared_intermediate=INTERMEDIATE, expert_parallel=ep)
        self.third = fm.MoE(**sizes, expert_parallel=ep)

    def forward(self, x):
        return self.third(x + self.second(self.first(x)))


def make(ep=None):
    """The model, drawn on the CPU: there, ranks draw the experts of one process."""
    torch.manual_seed(0)
    return Model(ep).to("cuda")


def batch(rank, step):
    generator = torch.Generator("cuda").manual_seed(10 * step + rank)
    tokens = TOKENS[(rank + step) % SIZE]
    return torch.randn(tokens, HIDDEN, device="cuda", generator=generator)


def loss_of(model, batches):
    """The mean over the batches of each one's mean."""
    with torch.autocast("cuda", torch.bfloat16):
        y = model(torch.cat(batches))
    y = y.float().split([*map(len, batches)])
    return sum((a - b.roll(1, -1)).square().sum(-1).mean() for a, b in zip(y, batches, strict=True)) / len(batches)


def train(model, inner, ranks, clip):
    """The norm of the gradients in each step."""
    experts = ep_of.shards(inner)
    others = [p for name, p in inner.named_parameters() if name not in experts]
    groups = [{"params": [*experts.values()]}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.5)  # sees the scale, unlike Adam
    norms = []
    for step in range(STEPS):
        loss_of(model, [batch(rank, step) for rank in ranks]).backward()
        norms.append(float(clip(model, MOST_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


# ---- the ranks ------------------------------------------------------------------------------------------------------


@cache
def meshes(rank):
    """That of all ranks, and one whose experts have a replica on each rank."""
    torch.cuda.set_device(rank)
    return (
        dist.init_device_mesh("cuda", (SIZE,)),
        dist.init_device_mesh("cuda", (SIZE, 1), mesh_dim_names=("replicas", "ep")),
    )


def ddp(model, every, replicas):
    ep_of.average_gradients(model)
    return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])


def fsdp(model, every, replicas):
    from torch.distributed.fsdp import fully_shard

    ignored = set()
    if replicas is None:
        ep_of.average_gradients(model)
        ignored = set(ep_of.shards(model).values())
    for layer in (model.second, model.third):
        if replicas is not None:
            fully_shard(layer.experts, mesh=replicas)
            layer.experts.set_gradient_divide_factor(SIZE)
        fully_shard(layer, mesh=every, ignored_params=ignored)
    return fully_shard(model, mesh=every, ignored_params=ignored)


def trained(rank, wrap, engine, replicated, folder):
    every, mesh = meshes(rank)
    ep = fm.ExpertParallel(mesh["ep"] if replicated else every, engine=engine, max_tokens=max(TOKENS))
    inner = make(ep)
    with torch.autocast("cuda", torch.bfloat16):
        used = {step.rule for step in inner.third.explain(batch(rank, 0)).steps}
    model = wrap(inner, every, mesh["replicas"] if replicated else None)
    norms = train(model, inner, [rank], ep_of.clip_grad_norm_)
    state = ep_of.state_dict(inner)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    parameters = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in state["model"].items()}
    return norms, {name: p.cpu() for name, p in parameters.items()}, used


def by_default(rank):
    every, _ = meshes(rank)
    return fm.ExpertParallel(every, max_tokens=max(TOKENS)).settings()


def copied(rank):
    """No host waits for the comparison in the first call: a later call raises."""
    every, _ = meshes(rank)
    layer = make(fm.ExpertParallel(every, engine="allgather", max_tokens=max(TOKENS))).third
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    x = batch(rank, 1)
    with torch.autocast("cuda", torch.bfloat16):  # unfused experts in fp32 wait for the rows per expert
        layer(batch(rank, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(LAG - 1):
                layer(x)
            with pytest.raises(fm.InputError, match=r"weight: expected each rank to have experts of its own"):
                layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"), SIZE, backend="cpu:gloo,cuda:nccl")
    yield started
    started.stop()


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_one_process():
    model = make()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with fm.disabled("*"):
        norms = train(model, model, range(SIZE), lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most))
    return norms, {name: p - before[name] for name, p in model.state_dict().items()}, before


@pytest.mark.parametrize(
    ("wrap", "engine", "replicated"),
    [
        pytest.param(ddp, "allgather", False, id="ddp"),
        pytest.param(ddp, "symmetric", False, id="ddp-symmetric"),
        pytest.param(ddp, "allgather", True, id="ddp-replicas"),
        pytest.param(fsdp, "allgather", False, id="fsdp"),
        pytest.param(fsdp, "symmetric", False, id="fsdp-symmetric"),
        pytest.param(fsdp, "allgather", True, id="fsdp-replicas"),
    ],
)
def test_two_gpus_train_as_one(two, in_one_process, wrap, engine, replicated, tmp_path):
    norms, changes, before = in_one_process
    (got, parameters, used), (others, elsewhere, _) = two.run(trained, wrap, engine, replicated, tmp_path)
    assert "sm90.grouped_gemm" in used or "sm90.gemm_of_leaving_rows" in used
    assert got == others, "another norm on another rank"
    assert got == pytest.approx(norms, rel=0.03)
    assert min(norms) > MOST_NORM, "nothing was clipped"
    assert parameters.keys() == changes.keys()
    for name, change in changes.items():
        assert torch.equal(parameters[name], elsewhere[name]), f"{name}: another value on another rank"
        assert change.norm() > 1e-4 * before[name].norm(), f"{name}: too small a change"
        error = (parameters[name].cuda() - before[name] - change).norm() / change.norm()
        assert error < 0.1, name

    alone = make()
    state = ep_of.state_dict(alone)
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path)
    ep_of.load_state_dict(alone, None, state)
    for name, p in alone.state_dict().items():
        assert torch.equal(p.cpu(), parameters[name]), f"{name}: the checkpoint has another value"


def test_auto_takes_symmetric(two):
    for settings in two.run(by_default):
        assert settings.startswith(f"engine 'symmetric', {SIZE} ranks")


def test_copies_of_the_experts_of_one_rank_raise(two):
    two.run(copied)
