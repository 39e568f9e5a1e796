"""The table of docs/transformers.md: every family, and what of its experts fuses. Run it to write the table anew."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.integrations.transformers import expert_modules, router_kinds
from kit import moe_families

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
TABLE = re.compile(r"(?<=<!-- families, by tests/kit/families_page.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
CAPTION = "Families of transformers {version}:\n\n"
HEAD = ("families", "layout", "activation", "router", "sm_90, bf16")


def layout(module: torch.nn.Module) -> str:
    """What is not as with most: weights (E, out, in), all gates before all ups, no bias."""
    found = expert_modules.layout_of(module)
    names = {
        "transposed": found.transposed, "interleaved": found.interleaved, "bias": found.biased,
        "not gated": not found.gated, "norm after": found.normed, "weight before": found.scales_input,
    }  # fmt: skip
    return ", ".join(name for name, there in names.items() if there)


def verdict(module: torch.nn.Module) -> str:
    """What the rules for sm_90 plan for a training step."""
    plans = fusedmoe_transformers.explain(module, tokens=64, arch=90).plans
    if left := [op for plan in plans for step in plan.unfused for op in step.ops]:
        return f"fused except {', '.join(op.replace('_', ' ').replace('.', ' ') for op in left)}"
    return "unfused activation" if fusedmoe_transformers.recognised(module) is None else "fused"


def router(model: torch.nn.Module, name: str) -> str:
    """What `patch_routers` does with the router next to experts."""
    block = model.get_submodule(name.rpartition(".")[0])
    found = router_kinds.recognise(block.gate if hasattr(block, "gate") else block.router)
    return "" if isinstance(found, str) else "patched" if found.fp32 else "patched with `fp32_logits`"


def activation(module: torch.nn.Module) -> str:
    op = fusedmoe_transformers.recognised(module)
    return "as it is" if op is None else f"`{re.sub(r'limit=[^,)]*', 'limit=…', repr(op))}`"


def rows() -> list[tuple[str, ...]]:
    found = {}
    for family, model_class in [(family, None) for family in moe_families.family_names()] + moe_families.OTHER_MODELS:
        tiny = moe_families.tiny(family, "eager", torch.bfloat16, model_class=model_class)
        if family == "llama4":
            fusedmoe_transformers.patch_llama4(tiny.model)  # which says how many experts a token has
        for name, module in tiny.experts:
            cells = layout(module), activation(module), router(tiny.model, name), verdict(module)
            found[family, type(module).__name__] = cells
    families: dict[tuple[str, ...], list[str]] = {}  # those with the same cells share a row
    for family, kind in sorted(found):
        families.setdefault(found[family, kind], []).append(family)
    return [(", ".join(dict.fromkeys(names)), *cells) for cells, names in families.items()]


def table() -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *rows())]
    return CAPTION.format(version=transformers.__version__) + "\n".join(re.sub(" +", " ", x) for x in lines) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda match: table(), PAGE.read_text("utf-8")), "utf-8")
