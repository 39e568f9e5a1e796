"""A stack of decoder layers of Qwen3-30B-A3B's shape in transformers, with each experts implementation.

The cases are forward without gradients, and forward + backward, of the whole stack and of its MoE part (router and
experts of one layer), uncompiled and under ``torch.compile(fullgraph=True)``. All implementations share random weights.

``fusedmoe + router`` is the model after `patch_routers`. The router of Qwen3-MoE computes its logits in bf16, and
patched in fp32. The router in the MoE part of GLM-4.5-Air computes them in fp32 in both cases.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.commands.timing import Timer

ROUTED = "fusedmoe + router"
IMPLEMENTATIONS = ("fusedmoe", ROUTED, "grouped_mm", "eager")
PARTS = ("stack", "moe", "glm", "few")
LAYERS = 12  # fits into 80 GB with gradients in every implementation
BATCH, LENGTH = 4, 2048
DECODE = (1, 16, 128, 1024)  # tokens per batch during text generation
# limits of the relative difference to eager experts, in bf16; in a stack, and with logits in fp32, rounding may change
# the chosen experts
WRONG = {"stack": 0.1, ROUTED: 0.1}
WRONG_ELSEWHERE = 0.02


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


def config(layers: int, **sizes: Any) -> Any:
    """Return the configuration of Qwen3-30B-A3B with fewer layers and a small vocabulary."""
    from transformers import Qwen3MoeConfig

    chosen = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128} | sizes
    return Qwen3MoeConfig(
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=64, max_position_embeddings=4096, use_cache=False,
        output_router_logits=False, **chosen,
    )  # fmt: skip


def glm_config(**sizes: Any) -> Any:
    """Return the configuration of one layer with experts of GLM-4.5-Air, with a small vocabulary."""
    from transformers import Glm4MoeConfig

    chosen = {"hidden_size": 4096, "moe_intermediate_size": 1408, "num_experts": 128} | sizes
    return Glm4MoeConfig(
        num_hidden_layers=1, first_k_dense_replace=0, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts_per_tok=8, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.0, vocab_size=64,
        n_routed_experts=chosen.pop("num_experts"), use_cache=False, **chosen,
    )  # fmt: skip


def measure(
    timer: Timer,
    device: torch.device,
    layers: int = LAYERS,
    parts: tuple[str, ...] = PARTS,
    compiled: bool = True,
    rows: tuple[int, int] = (BATCH, LENGTH),
    **sizes: int,
) -> Iterator[Measured]:
    """Time all implementations, interleaved within each case.

    Parameters
    ----------
    parts
        Some of `PARTS`: the stack, the MoE part of one of its layers, that of GLM-4.5-Air, and of few tokens.
    compiled
        Whether to compile the first two as well.
    rows
        Batch and length.
    sizes
        ``hidden_size``, ``moe_intermediate_size`` and ``num_experts`` of both models.
    """
    from transformers import Glm4MoeModel, Qwen3MoeModel

    from fusedmoe.integrations.transformers import register

    register()
    torch.manual_seed(0)
    if set(parts) - {"glm"}:
        model = _built(Qwen3MoeModel, config(layers if "stack" in parts else 1, **sizes), device)
        x = (torch.randn(*rows, model.config.hidden_size, device=device) * 0.2).bfloat16()
        block = model.layers[0].mlp
        if "stack" in parts:
            yield from _part("stack", model, _hidden_states_of, x, model, timer, compiled=compiled)
        if "moe" in parts:
            yield from _part("MoE part", block, _first_of, x, model, timer, compiled=compiled)
        for tokens in DECODE if "few" in parts else ():
            few = x.view(1, -1, x.shape[-1])[:, :tokens]
            yield from _part(f"MoE part, {_counted(tokens)}", block, _first_of, few, model, timer, few=True)
        del model, block
    if "glm" in parts:
        model = _built(Glm4MoeModel, glm_config(**sizes), device)
        x = (torch.randn(*rows, model.config.hidden_size, device=device) * 0.2).bfloat16()
        yield from _part("GLM-4.5-Air's MoE part", model.layers[0].mlp, _first_of, x, model, timer, exact=True)


def _built(model_class: Any, configuration: Any, device: torch.device) -> Any:
    """Return a model with random weights."""
    with device:
        model = model_class._from_config(configuration, dtype=torch.bfloat16, experts_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def _with_router(module: nn.Module, model: Any) -> nn.Module:
    """Return a copy with patched routers that shares the parameters, buffers and the configuration."""
    from fusedmoe.integrations.transformers import patch_routers

    shared = [model.config, *module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(one): one for one in shared})
    patch_routers(copied, fp32_logits=True)
    return copied


def _hidden_states_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(inputs_embeds=x).last_hidden_state  # type: ignore[no-any-return]


def _experts(implementation: str) -> str:
    """Return transformers' name of an experts implementation."""
    return "fusedmoe" if implementation == ROUTED else implementation


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
    compiled: bool = False,
    exact: bool = False,
) -> Iterator[Measured]:
    """Time a part; with ``few`` tokens, as in text generation, only uncompiled forward. ``exact``: a patched router
    makes the same choice as the model's own.
    """
    grad = (torch.randn_like(x) * 0.2).requires_grad_(False)
    with torch.no_grad():
        want = call(module, x).float()
    variants = [(i, False) for i in IMPLEMENTATIONS]
    variants += [(i, True) for i in IMPLEMENTATIONS if i != "eager" and compiled]
    ready: dict[tuple[str, bool], nn.Module] = {}
    notes: dict[tuple[str, bool], str] = {("eager", True): "does not compile: it reads the routing on the host"}
    routed = _with_router(module, model)
    for implementation, compiles in variants:
        torch.compiler.reset()
        model.set_experts_implementation(_experts(implementation))
        called = routed if implementation == ROUTED else module
        ready[implementation, compiles] = torch.compile(called, fullgraph=True) if compiles else called
    for case in ("forward",) if few else ("forward", "forward + backward"):
        calls: dict[str, Callable[[], object]] = {}
        told: dict[str, dict[str, Any]] = {}
        for (implementation, compiles), ran in ready.items():
            name = f"{implementation}, compiled" if compiles else implementation
            run = _run(case, implementation, ran, call, x, grad, model)
            try:
                y = run()
                told[name] = {"difference": float((y.float() - want).norm() / want.norm())}
                del y
                if case != "forward":
                    told[name]["kept_gib"] = _kept_gib(implementation, ran, call, x, model)
            except torch.cuda.OutOfMemoryError:
                notes[implementation, compiles] = "out of memory"
                continue
            limit = WRONG.get(part, WRONG_ELSEWHERE if exact else WRONG.get(implementation, WRONG_ELSEWHERE))
            if told[name]["difference"] > limit:
                raise AssertionError(f"{part}, {name}: differs from eager by {told[name]['difference']:.3f}")
            calls[name] = run
        times = timer.measure(calls)
        for implementation in IMPLEMENTATIONS:
            for compiles in (False, True) if compiled else (False,):
                name = f"{implementation}, compiled" if compiles else implementation
                if name in times:
                    t = times[name]
                    yield Measured(part, case, implementation, compiles, t.median_ms, t.host_idle_us, **told[name])
                else:
                    note = notes.get((implementation, compiles), "")
                    yield Measured(part, case, implementation, compiles, None, note=note)
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
        model.config._experts_implementation_internal = _experts(implementation)
        with torch.no_grad():
            return call(module, x)

    def step() -> Tensor:
        model.config._experts_implementation_internal = _experts(implementation)
        model.zero_grad(set_to_none=True)
        y = call(module, x.detach().requires_grad_())
        y.backward(grad)
        return y.detach()

    return forward if case == "forward" else step


def _kept_gib(
    implementation: str, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor, model: Any
) -> float:
    """Return the memory that forward keeps for backward, without the output."""
    model.config._experts_implementation_internal = _experts(implementation)
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
    return f"{m.part:24}{m.case:20}{name:28}{time}{more}{kept}"
