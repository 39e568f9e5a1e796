"""A stack of decoder layers of Qwen3-30B-A3B's shape in transformers, with each experts implementation.

The cases are forward without gradients, and forward + backward, of the whole stack and of its MoE part (router and
experts of one layer), uncompiled and under ``torch.compile(fullgraph=True)``. All implementations share random weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.bench.timing import Timer

IMPLEMENTATIONS = ("fusedmoe", "grouped_mm", "eager")
LAYERS = 12  # fits into 80 GB with gradients in every implementation
BATCH, LENGTH = 4, 2048
DECODE = (1, 16, 128, 1024)  # tokens per batch during text generation
# limits of the relative difference to eager experts, in bf16; in a stack, rounding may change the chosen experts
WRONG = {"stack": 0.1, "MoE part": 0.02}


@dataclass(frozen=True)
class Measured:
    """One implementation's time.

    Attributes
    ----------
    part : str
        ``"stack"`` or ``"MoE part"``.
    case : str
        ``"forward"`` or ``"forward + backward"``.
    kept_gib : float
        Memory that a forward pass keeps for backward; None without gradients.
    difference : float
        Relative difference of the output to that with eager experts, in norm.
    note : str
        The reason for a missing time.
    """

    part: str
    case: str
    implementation: str
    compiled: bool
    ms: float | None
    host_us: float | None = None
    kept_gib: float | None = None
    difference: float | None = None
    note: str = ""


def config(layers: int) -> Any:
    """Return the configuration of Qwen3-30B-A3B with fewer layers and a small vocabulary."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=64, max_position_embeddings=4096, use_cache=False, output_router_logits=False,
    )  # fmt: skip


def measure(timer: Timer, device: torch.device, layers: int = LAYERS) -> Iterator[Measured]:
    """Time all implementations, interleaved within each case."""
    from transformers import Qwen3MoeModel

    from fusedmoe.integrations.transformers import register

    register()
    torch.manual_seed(0)
    with device:
        model = Qwen3MoeModel._from_config(config(layers), dtype=torch.bfloat16, experts_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    x = (torch.randn(BATCH, LENGTH, 2048, device=device) * 0.2).bfloat16()
    yield from _part("stack", model, lambda m, x: m(inputs_embeds=x).last_hidden_state, x, model, timer)
    block = model.layers[0].mlp
    yield from _part("MoE part", block, _first_of, x, model, timer)
    for tokens in DECODE:
        few = x.view(1, -1, 2048)[:, :tokens]
        yield from _part(f"MoE part, {_counted(tokens)}", block, _first_of, few, model, timer, few=True)


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _first_of(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def _part(
    part: str,
    module: nn.Module,
    call: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    model: Any,
    timer: Timer,
    few: bool = False,
) -> Iterator[Measured]:
    """Time a part; with ``few`` tokens, as in text generation, only uncompiled forward."""
    grad = (torch.randn_like(x) * 0.2).requires_grad_(False)
    with torch.no_grad():
        want = call(module, x).float()
    variants = [(i, False) for i in IMPLEMENTATIONS]
    variants += [(i, True) for i in IMPLEMENTATIONS if i != "eager" and not few]
    ready: dict[tuple[str, bool], nn.Module] = {}
    notes: dict[tuple[str, bool], str] = {("eager", True): "does not compile: it reads the routing on the host"}
    for implementation, compiled in variants:
        torch.compiler.reset()
        model.set_experts_implementation(implementation)
        ready[implementation, compiled] = torch.compile(module, fullgraph=True) if compiled else module
    for case in ("forward",) if few else ("forward", "forward + backward"):
        calls: dict[str, Callable[[], object]] = {}
        told: dict[str, dict[str, Any]] = {}
        for (implementation, compiled), ran in ready.items():
            name = f"{implementation}, compiled" if compiled else implementation
            run = _run(case, implementation, ran, call, x, grad, model)
            try:
                y = run()
                told[name] = {"difference": float((y.float() - want).norm() / want.norm())}
                del y
                if case != "forward":
                    told[name]["kept_gib"] = _kept_gib(implementation, ran, call, x, model)
            except torch.cuda.OutOfMemoryError:
                notes[implementation, compiled] = "out of memory"
                continue
            if told[name]["difference"] > (WRONG["stack"] if part == "stack" else WRONG["MoE part"]):
                raise AssertionError(f"{part}, {name}: differs from eager by {told[name]['difference']:.3f}")
            calls[name] = run
        times = timer.measure(calls)
        for implementation in IMPLEMENTATIONS:
            for compiled in (False,) if few else (False, True):
                name = f"{implementation}, compiled" if compiled else implementation
                if name in times:
                    t = times[name]
                    yield Measured(part, case, implementation, compiled, t.median_ms, t.host_idle_us, **told[name])
                else:
                    note = notes.get((implementation, compiled), "")
                    yield Measured(part, case, implementation, compiled, None, note=note)
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def _run(
    case: str,
    implementation: str,
    module: nn.Module,
    call: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    grad: Tensor,
    model: Any,
) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        model.config._experts_implementation_internal = implementation
        with torch.no_grad():
            return call(module, x)

    def step() -> Tensor:
        model.config._experts_implementation_internal = implementation
        model.zero_grad(set_to_none=True)
        y = call(module, x.detach().requires_grad_())
        y.backward(grad)
        return y.detach()

    return forward if case == "forward" else step


def _kept_gib(
    implementation: str, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor, model: Any
) -> float:
    """Return the memory that forward keeps for backward, without the output."""
    model.config._experts_implementation_internal = implementation
    model.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_()
    before = torch.cuda.memory_allocated()
    y = call(module, leaf)
    return (torch.cuda.memory_allocated() - before - y.nbytes) / 2**30


def results(found: list[Measured], layers: int, reps: int) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        "reps": reps,
        "layers": layers,
        "tokens": BATCH * LENGTH,
        "batch": BATCH,
        "measured": [asdict(m) for m in found],
    }


def lines(m: Measured) -> str:
    """Return a row of the printed table."""
    name = f"{m.implementation}, compiled" if m.compiled else m.implementation
    time = f"{m.ms:9.2f} ms" if m.ms is not None else f"{'-':>9}   "
    kept = "" if m.kept_gib is None else f"  kept {m.kept_gib:6.2f} GiB"
    more = f"  differs by {m.difference:.4f}" if m.ms is not None else f"  {m.note}"
    return f"{m.part:22}{m.case:20}{name:22}{time}{more}{kept}"
