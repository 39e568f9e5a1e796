"""Find the `Router` that is equivalent to a model's router, the module that chooses the experts of each token.

`recognise` looks up the module in a table of transformers' classes, and compares the op found there with the module
itself, on small random weights. The result is valid while `settings_of` returns the same values.

Two results are possible for a router of the table. It computes its logits in fp32 for tokens in any dtype; then the op
chooses the same experts. Or it computes them in the dtype of the tokens; then the op, which computes them in fp32,
chooses other experts for some tokens in bf16 or fp16.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import InputError
from fusedmoe.ops import Router

_TOKENS, _HIDDEN = 64, 32  # of the comparison
ARGUMENT = "an argument of the router's forward"


class Known(NamedTuple):
    """A class of routers: each setting is a number or a flag, or the name of the attribute that has it."""

    score: str
    renormalize: str | bool = True
    scale: str | float = 1.0
    groups: tuple[str, str] | None = None  # the names of the number of groups, and of the number that is chosen
    correction: str = ""  # the path of the correction of the choice, or `ARGUMENT`
    biased: bool = False  # the logits have a bias


_GROUPS = "num_group", "topk_group"
_DEEPSEEK_V3 = Known("sigmoid", "norm_topk_prob", "routed_scaling_factor", _GROUPS, "e_score_correction_bias")
_QWEN = Known("softmax", "norm_topk_prob")
_GRANITE = Known("topk_softmax")
# by name, in modules of transformers
ROUTERS = {
    **dict.fromkeys(
        (
            "AXK1TopkRouter", "AXK2TopkRouter", "BailingHybridTopkRouter", "DeepseekV32TopkRouter",
            "DeepseekV3TopkRouter", "Dots1TopkRouter", "Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter",
            "Glm4MoeLiteTopkRouter", "Glm4MoeTopkRouter", "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter",
            "GlmMoeDsaTopkRouter", "HYV4TopkRouter", "HYV4VLTopkRouter", "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter", "NemotronHTopkRouter", "SolarOpenTopkRouter",
        ),
        _DEEPSEEK_V3,
    ),
    "BeamTopKRouter": _DEEPSEEK_V3._replace(scale=1.0),
    **dict.fromkeys(
        ("HYV3TopKRouter", "Dots3NoteVisionTopKRouter"),
        Known("sigmoid", scale="router_scaling_factor", correction=ARGUMENT),
    ),
    "FlintTopKRouter": Known("sigmoid", "norm_topk_prob"),
    **dict.fromkeys(
        ("DeepseekV2TopkRouter", "DeepseekOcr2TextTopkRouter", "UnlimitedOcrTextTopkRouter"),
        Known("softmax", renormalize=False, scale="routed_scaling_factor", groups=_GROUPS),
    ),
    "MistralLarge4TextTopkRouter": Known("softmax", scale="routed_scaling_factor", groups=_GROUPS),
    **dict.fromkeys(
        ("Ernie4_5_MoeTopKRouter", "Ernie4_5_VLMoeMoeTopKRouter"),
        Known("softmax", correction="moe_statics.e_score_correction_bias"),
    ),
    # these compute their logits in the dtype of the tokens
    **dict.fromkeys(
        (
            "FlexOlmoTopKRouter", "MellumTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3OmniMoeTalkerTextTopKRouter",
            "Qwen3OmniMoeThinkerTextTopKRouter", "Qwen4ExpTextTopKRouter",
        ),
        _QWEN,
    ),
    **dict.fromkeys(
        ("MiniMaxTopKRouter", "MixtralTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3_5MoeTopKRouter"),
        Known("softmax"),
    ),
    "JambaTopKRouter": Known("softmax", renormalize=False),
    "Mistral4TopkRouter": Known("softmax", "norm_topk_prob", "routed_scaling_factor", _GROUPS),
    **dict.fromkeys(
        (
            "AriaTextTopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSWATopKRouter",
            "GraniteMoeSharedTopKRouter", "GraniteMoeTopKRouter",
        ),
        _GRANITE,
    ),
    "GptOssTopKRouter": Known("topk_softmax", biased=True),
    "MiniMaxM2TopKRouter": Known("sigmoid", correction=ARGUMENT),
    "MiniMaxM3VLTopKRouter": Known("sigmoid", correction="e_score_correction_bias"),
}  # fmt: skip
_SETTINGS = tuple(
    dict.fromkeys(
        ["top_k", "num_experts", "topk_method"]
        + [
            name
            for known in ROUTERS.values()
            for name in (known.renormalize, known.scale, *(known.groups or ()))
            if isinstance(name, str)
        ]
    )
)


_verdicts: dict[tuple[object, ...], bool | str] = {}  # of `_compare`, by class, settings and number of experts


class Recognised(NamedTuple):
    """The op that is equivalent to a router, and the attributes that it was made from."""

    op: Router  # without parameters
    known: Known
    fp32: bool  # the router computes its logits in fp32, whatever the dtype of the tokens
    names: tuple[str, ...]  # of the attributes in `settings`
    settings: tuple[object, ...]


def recognise(router: nn.Module) -> Recognised | str:
    """Return the op that is equivalent to a model's router, or the reason why there is none."""
    its_class = class_in_transformers(router)
    known = None if its_class is None else ROUTERS.get(its_class.__qualname__)
    if known is None:
        return "fm.Router is not known to compute the same"
    names = tuple([name for name in _SETTINGS if hasattr(router, name)])
    settings = settings_of(router, names)
    try:
        op = Router(**_arguments(router, known), device="meta")
    except InputError as error:
        return str(error)
    key = type(router), settings, op.num_experts
    if key not in _verdicts:
        with ThreadPoolExecutor(1) as thread:  # without the caller's grad mode, autocast and saved-tensor hooks
            _verdicts[key] = thread.submit(_compare, router, op, known).result()
    verdict = _verdicts[key]
    if isinstance(verdict, str):
        return verdict
    for parameter in op.parameter_names:
        setattr(op, parameter, None)
    return Recognised(op, known, verdict, names, settings)


def class_in_transformers(module: nn.Module) -> type | None:
    """Return the class of transformers that a module has, or that FSDP or a parametrization has derived from."""
    modules = ((c, c.__module__.partition(".")[0]) for c in type(module).__mro__)
    return next((c for c, package in modules if package == "transformers"), None)


def settings_of(router: nn.Module, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return these attributes, on which `torch.compile` has guards."""
    return tuple([getattr(router, name) for name in names])


def parameters_of(router: Any, known: Known, arguments: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """Return the parameters of the op: those of a router, and the correction among the arguments of its forward."""
    correction = None
    if known.correction == ARGUMENT:
        (correction,) = arguments
    elif known.correction:
        correction = attrgetter(known.correction)(router)
    if correction is not None:
        correction = correction.detach().reshape(-1).float()
    return {"weight": router.weight, "bias": router.bias if known.biased else None, "balance_bias": correction}


def _arguments(router: Any, known: Known) -> dict[str, Any]:
    """Return the arguments that construct the op."""
    experts, hidden = router.weight.shape
    groups = (1, 1)
    if known.groups is not None and getattr(router, "topk_method", "") != "greedy":
        number, chosen = (getattr(router, name) for name in known.groups)
        groups = (number, chosen) if number is not None else groups
    return {
        "hidden": hidden,
        "num_experts": experts,
        "top_k": router.top_k,
        "score": known.score,
        "renormalize": _value(router, known.renormalize),
        "scale": _value(router, known.scale),
        "bias": known.biased,
        "balance_bias": bool(known.correction),
        "num_groups": groups[0],
        "top_groups": groups[1],
    }


def _value(router: nn.Module, setting: Any) -> Any:
    return getattr(router, setting) if isinstance(setting, str) else setting


# ---- the comparison -----------------------------------------------------------------------------------------------


def _compare(router: nn.Module, op: Router, known: Known) -> bool | str:
    """Return whether a router computes its logits in fp32 for tokens in bf16; the reason, if it differs from the op."""
    try:
        with torch.device("cpu"):
            if not _agree(router, op, known, torch.float32):
                return "on small numbers it differs from fm.Router"
            return _agree(router, op, known, torch.bfloat16)
    except Exception as error:  # noqa: BLE001  (foreign code)
        return f"called on a CPU, it raises {error!r}"


def _agree(router: nn.Module, op: Router, known: Known, dtype: torch.dtype) -> bool:
    """Whether router and op have the same logits, in fp32, choices, weights and, for tokens in fp32, derivatives."""
    generator = torch.Generator().manual_seed(0)
    small = _small(router, op.num_experts, dtype, generator)
    x = _normal((_TOKENS, _HIDDEN), generator).to(dtype).requires_grad_()
    given = (_correction((op.num_experts,), generator),) if known.correction == ARGUMENT else ()
    its_logits, its_weights, its_index = type(router).forward(small, x, *given)
    index, weights, logits = op.compute(x, **parameters_of(small, known, given))  # type: ignore[arg-type]
    if its_logits.dtype is not torch.float32:
        return False
    # a router may round its weights to the dtype of the tokens after the last operation
    rtol = 2 * torch.finfo(its_weights.dtype).eps if dtype is not torch.float32 else 1e-5
    leaves = [x, *[p for name, p in small.named_parameters() if name in ("weight", "bias")]]
    leaves = leaves if dtype is torch.float32 else []
    its, ours = _by_expert(its_logits, its_weights, its_index, leaves), _by_expert(logits, weights, index, leaves)
    return all(torch.allclose(a, b, rtol=rtol, atol=1e-5) for a, b in zip(its, ours, strict=True))


def _by_expert(logits: Tensor, weights: Tensor, index: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the choices in the order of the experts, their weights, the logits, and the derivatives by ``leaves``."""
    index, order = index.sort(dim=-1)
    weights = weights.gather(1, order).float()
    signs = (torch.arange(logits.numel(), device=logits.device).view_as(logits) % 3 - 1).float()
    total = (logits * signs).sum() + (weights * (signs + 2)[:, : weights.shape[1]]).sum()
    grads = torch.autograd.grad(total, leaves) if leaves else ()
    return [index.float(), weights.detach(), logits.detach(), *grads]


def _small(module: nn.Module, experts: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Return a copy of a router with `_HIDDEN` features and random parameters and buffers."""
    small = copy.copy(module)

    def drawn(name: str, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if name == "weight":
            return nn.Parameter(0.3 * _normal((experts, _HIDDEN), generator).to(dtype))
        numbers = _correction(t.shape, generator)
        return nn.Parameter(numbers.to(dtype)) if name == "bias" else numbers

    own = vars(small)
    own["_parameters"] = {name: drawn(name, t) for name, t in module._parameters.items()}
    own["_buffers"] = {name: drawn(name, t) for name, t in module._buffers.items()}
    own["_modules"] = {n: _small(m, experts, dtype, generator) for n, m in module._modules.items() if m is not None}
    if "hidden_dim" in own:
        own["hidden_dim"] = _HIDDEN
    return small


def _correction(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return corrections that are mostly negative, so that corrected scores of both signs are compared."""
    return _normal(shape, generator) - 0.5


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
