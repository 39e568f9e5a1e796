"""``fusedmoe explain``: plan a model's experts for a GPU from the model's configuration; needs no GPU or weights."""

from __future__ import annotations

import difflib
import json
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from fusedmoe.base.errors import InputError
from fusedmoe.base.target import checked_arch
from fusedmoe.call import settings
from fusedmoe.commands.options import flag, option, required_sizes
from fusedmoe.fusion.language.rule import FusionError
from fusedmoe.fusion.report.data import format_bytes, hints
from fusedmoe.integrations import transformers as ours
from fusedmoe.layers.explain_model import explain
from fusedmoe.layers.moe import MoE
from fusedmoe.ops.glu import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from fusedmoe.layers.explain_model import ExplainedModules, ModelExplanation

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIZES = ("hidden", "intermediate", "experts", "top_k")
_MOST_TOKENS, _MOST_NUMBERS = 1 << 40, 1 << 56  # far within torch's 64-bit byte counts
_AUTO_CLASSES = {  # the first class that knows the configuration builds the model
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "AutoModel": "MODEL_MAPPING",
}
_PLAN_FIELDS = ("device", "dtype", "recipe", "kept", "kept_bytes", "weight_bytes", "assumed")  # printed as JSON
_STEP_FIELDS = ("direction", "ops", "rule", "status", "why", "host_sync", "bytes_moved", "launches")
_TRANSFORMERS = "needs transformers 5.7 or later: pip install transformers"


_LAYER = "one layer, instead of CONFIG"  # the title of options
_CONFIG = "config.json of a transformers model, a directory with one, or the name of a model in the local cache"


@dataclass(frozen=True)
class ExplainOptions:
    """The options of the command."""

    config: str | None = option(None, _CONFIG, "CONFIG", nargs="?")
    arch: str = option("90", "target architecture; 90 is an H100 or H200 (default: %(default)s)")
    tokens: int = option(8192, "tokens per call (default: %(default)s)", "T")
    recipe: str = option("bf16", "numeric recipe (default: %(default)s)")
    dtype: str | None = option(
        None, "dtype of the parameters (default: CONFIG's, else bfloat16)", choices=tuple(_DTYPES)
    )
    hidden: int | None = option(None, "features per token", "H", group=_LAYER)
    intermediate: int | None = option(None, "intermediate features per expert", "I", group=_LAYER)
    experts: int | None = option(None, "number of experts", "E", group=_LAYER)
    top_k: int | None = option(None, "chosen experts per token", "K", group=_LAYER)
    activation: str | None = option(None, "activation (default: swiglu)", choices=tuple(ACTIVATIONS), group=_LAYER)
    strict: bool = option(False, "exit with status 1 if an op that has a fused kernel is not fused")
    json: bool = option(False, "print JSON")


class ConfigError(Exception):
    """A model cannot be built from a configuration; the message gives the reason."""


def run(options: ExplainOptions) -> int:
    """Print the plans; return the exit status."""
    arch = checked_arch(options.arch, "--arch")
    required_sizes(options, ("tokens",))
    if options.tokens > _MOST_TOKENS:
        raise InputError(f"--tokens {options.tokens}: must be at most 2^40")
    with settings.recipe(options.recipe):
        try:
            title, model, not_planned = _model(options)
        except ConfigError as error:
            print(f"fusedmoe explain: error: {error}", file=sys.stderr)
            return 1
        result = explain(model, tokens=options.tokens, arch=arch)
    if not_planned:
        groups = tuple(replace(group, explanation=None, note=not_planned) for group in result.groups)
        result = replace(result, groups=groups)
    print(_as_json(title, arch, options, result) if options.json else _as_text(title, arch, options, result))
    return _checked(options, result) if options.strict else 0


# ---- the model -----------------------------------------------------------------------------------------------------


def _model(options: ExplainOptions) -> tuple[str, nn.Module, str]:
    """Return a title, the model on the meta device, and the reason why its experts are not planned, or ""."""
    sizes = {name: getattr(options, name) for name in (*_SIZES, "activation")}
    given = [flag(name) for name, size in sizes.items() if size is not None]
    if options.config is not None:
        if given:
            raise InputError(f"{', '.join(given)}: expected without CONFIG, got {options.config}")
        if not options.config:
            raise InputError("CONFIG: expected a path or a name, got an empty one")
        return _transformers_model(options.config, options.dtype)
    if missing := [flag(name) for name in _SIZES if sizes[name] is None]:
        sizes_of = "the missing sizes of a layer" if given else "the sizes of a layer"
        raise InputError(f"expected CONFIG, or {sizes_of}: {', '.join(missing)}")
    hidden, intermediate, experts, top_k = (int(sizes[name]) for name in _SIZES)
    if max(options.tokens * top_k, 2 * experts * intermediate) * max(hidden, 2 * intermediate) > _MOST_NUMBERS:
        raise InputError("the layer would have tensors of more than 2^56 numbers: choose smaller sizes")
    dtype, activation = options.dtype or "bfloat16", options.activation or "swiglu"
    layer = MoE(hidden, intermediate, experts, top_k, activation=activation, device="meta", dtype=_DTYPES[dtype])
    title = f"MoE layer, hidden {hidden}, intermediate {intermediate}, {experts} experts, top {top_k}, {activation}"
    return f"{title}, {dtype}", torch.nn.ModuleDict({"layer": layer}), ""


def _transformers_model(name: str, dtype: str | None) -> tuple[str, nn.Module, str]:
    """Return the results of `_model` for a configuration of transformers."""
    try:
        import transformers  # noqa: F401

        ours.register()
    except ImportError as error:
        raise ConfigError(f"{name}: {_TRANSFORMERS} ({error})") from error
    config = _config(name)
    dtype_ = _DTYPES[dtype] if dtype else getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    quantization = _quantization(name, config)
    method = quantization.get("quant_method", "bitsandbytes")  # early bitsandbytes checkpoints have no quant_method
    # transformers creates the layers of other methods from the weights
    model = _built(name, config, dtype_, quantization if method == "fp8" else None)
    if "llama4" in str(config.model_type) and not quantization:
        ours.patch_llama4(model)
    for experts in filter(ours.runs_here, model.modules()):
        top_k, of = ours.top_k_of(experts), cast("Any", experts).num_experts
        if top_k is not None and not 1 <= top_k <= of:
            raise ConfigError(f"{name}: experts per token: expected 1 to {of}, got {top_k}")
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    title = f"{type(model).__name__}, {billions:.1f} billion parameters, {str(dtype_).removeprefix('torch.')}"
    if not quantization:
        return title, model, ""
    not_planned = (
        f"the checkpoint is quantized by {method}, and fusedmoe has no kernels for quantized experts; "
        f"remove quantization_config from the configuration to plan the model unquantized"
    )
    return f"{title}, quantized by {method}", model, "" if method == "fp8" else not_planned


def _built(name: str, config: Any, dtype: torch.dtype, fp8: dict[str, Any] | None) -> nn.Module:
    """Return the model of a configuration on the meta device, with transformers' layers for an ``fp8`` checkpoint."""
    import transformers
    from transformers.quantizers.auto import AutoHfQuantizer

    known = (auto for auto, mapping in _AUTO_CLASSES.items() if type(config) in getattr(transformers, mapping))
    if (auto := next(known, None)) is None:
        raise ConfigError(f"{name}: transformers cannot build a model from {type(config).__name__} alone")
    how = {"experts_implementation": ours.NAME, "dtype": dtype, "trust_remote_code": False}
    with _errors_of_transformers(name):
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, auto).from_config(config, **how)
        if fp8 is not None:
            AutoHfQuantizer.from_config(fp8, pre_quantized=True).preprocess_model(model)
    return model


@contextmanager
def _errors_of_transformers(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any exception of the model's code
        text = f"transformers cannot build a model of it: {type(error).__name__}: {error}"
        raise ConfigError(f"{name}: {text}") from error


def _quantization(name: str, config: Any) -> dict[str, Any]:
    """Return the configuration's quantization settings; empty if the checkpoint is not quantized."""
    found = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    settings: object = next((settings for settings in found if settings), {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}: quantization_config: expected an object, got {settings!r}")
    return settings


def _config(name: str) -> Any:
    """Load the configuration from a file, a directory or the local cache, without downloading."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name}: the directory has no config.json")
        return _config(str(path / "config.json"))
    try:
        if path.is_file():
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict) or "model_type" not in fields:
                raise ConfigError(f"{name}: expected the config.json of a transformers model, got no model_type in it")
            kind = fields["model_type"]
            if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
                raise ConfigError(f"{name}: {_unknown_kind(kind, CONFIG_MAPPING)}")
            return AutoConfig.for_model(**fields)
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # from parsing the file, or from the configuration's class
        if not path.exists():
            missing = "no such file or directory, nor a model in the local cache of transformers"
            raise ConfigError(f"{name}: {missing}; download its config.json and pass the path") from error
        text = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise ConfigError(f"{name}: transformers cannot read it: {type(error).__name__}: {text}") from error


def _unknown_kind(kind: object, known: Iterable[str]) -> str:
    """Return the message for a ``model_type`` that transformers does not have, without the hundreds that it has."""
    import transformers

    close = difflib.get_close_matches(kind, known, n=1) if isinstance(kind, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return (
        f"model_type: expected one that transformers {transformers.__version__} has, got {kind!r}{hint} A model whose "
        f"code comes with its checkpoint cannot be read; a newer transformers may have it"
    )


# ---- output --------------------------------------------------------------------------------------------------------


def _as_text(title: str, arch: int, options: ExplainOptions, result: ModelExplanation) -> str:
    parts = [f"{title}\n{options.tokens} tokens, training, on an sm_{arch} GPU; nothing was run", result.table()]
    for group in result.groups:
        if group.explanation is not None:
            parts.append(f"{_heading(group)}\n\n{group.explanation.table()}")
    return "\n\n".join([*parts, *hints(result.plans)])


def _heading(group: ExplainedModules) -> str:
    """``model.layers.{0-47}.mlp.experts: Qwen3MoeExperts, x48, kept for backward 48 x 449.3 MiB = 21.1 GiB``."""
    assert group.explanation is not None
    count = len(group.names)
    kept = sum(plan.kept_bytes for plan in group.explanation.plans)
    text = format_bytes(kept)
    if count > 1:
        text = f"{count} x {text} = {format_bytes(count * kept)}"
    return f"{group.name}: {group.kind}{f', x{count}' if count > 1 else ''}, kept for backward {text}"


def _without_kernel(result: ModelExplanation) -> dict[str, list[str]]:
    """Return the ops without a fused kernel on this architecture and the modules between chains, by reason."""
    found: dict[str, dict[str, None]] = {}  # with the ops in order
    for plan in result.plans:
        for step in plan.without_kernel:
            why = step.nearest_miss.reason if step.nearest_miss is not None else "no fused kernel"
            found.setdefault(why, {}).update(dict.fromkeys(step.ops))
    for group in result.groups:
        for title in group.explanation.modules if group.explanation is not None else ():
            label, kind, why = title.removeprefix("module ").split(": ", 2)
            found.setdefault(f"no fused kernel ({why})", {})[f"{label}.{kind}"] = None
    return {why: list(ops) for why, ops in found.items()}


def _checked(options: ExplainOptions, result: ModelExplanation) -> int:
    """Report on stderr whether every op that has a fused kernel is fused; return the exit status."""
    sys.stdout.flush()
    try:
        result.raise_if_missed()
    except FusionError as error:
        print(f"fusedmoe explain: {error}", file=sys.stderr)
        return 1
    without = _without_kernel(result)
    for why, ops in without.items():
        print(f"strict: fusion not required for {', '.join(ops)}: {why}", file=sys.stderr)
    print(f"strict: everything{' else' if without else ''} is fused", file=sys.stderr)
    return 0


def _as_json(title: str, arch: int, options: ExplainOptions, result: ModelExplanation) -> str:
    groups = []
    for group in result.groups:
        of_group = {"names": group.names, "class": group.kind, "note": group.note, "router": group.router}
        modules, plans = ((), ()) if group.explanation is None else (group.explanation.modules, group.explanation.plans)
        shown = [
            {name: getattr(plan, name) for name in _PLAN_FIELDS}
            | {"steps": [{name: getattr(step, name) for name in _STEP_FIELDS} for step in plan.steps]}
            for plan in plans
        ]
        groups.append({**of_group, "modules": modules, "plans": shown})
    found = {
        "model": title,
        "arch": arch,
        "tokens": options.tokens,
        "recipe": options.recipe,
        "groups": groups,
        "missed": [{"where": where, "why": why} for where, why in result.missed],
        "without_kernel": _without_kernel(result),
    }
    return json.dumps(found, indent=2)
