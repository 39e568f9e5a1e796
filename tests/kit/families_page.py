"""The table of docs/transformers.md: every family, and what of its experts fuses. Run it to write the table anew."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
from pathlib import Path
from unittest import mock

import torch
import transformers

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said
from fusedmoe.integrations.transformers import expert_modules, router_kinds
from fusedmoe.kernels.build import toolkit
from kit import moe_families

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
STAND_INS = Path(__file__).with_name("sm90_stand_ins.py")
TABLE = re.compile(r"(?<=<!-- families, by tests/kit/families_page.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
CAPTION = "Families of transformers {version}:\n\n"
TOKENS = 64
HEAD = ("families", "layout", "activation", "router", "sm_90, bf16")


def layout(module: torch.nn.Module) -> str:
    """What is not as with most: weights (E, out, in), all gates before all ups, no bias."""
    found = expert_modules.layout_of(module)
    names = {
        "transposed": found.transposed, "interleaved": found.interleaved, "bias": found.biased,
        "not gated": not found.gated, "norm after": found.normed, "weight before": found.scales_input,
    }  # fmt: skip
    return ", ".join(name for name, there in names.items() if there)


class Declined(logging.Handler):
    """What fell back at a call, for what its tensors are: the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "declined this call" in record.getMessage():
            self.ops += record.getMessage().partition(":")[0].split(" + ")


def verdict(module: torch.nn.Module) -> str:
    """What the rules for sm_90 do in a training step in bf16, the architecture being pretended: plan and call."""
    spec = importlib.util.spec_from_file_location("sm90_stand_ins", STAND_INS)
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    declined, logger = Declined(), logging.getLogger("fusedmoe.fusion.program.source")
    forget_said()
    logger.addHandler(declined)
    try:
        with (
            mock.patch("fusedmoe.fusion.program.plan_table.arch_of", return_value=90),
            mock.patch.object(toolkit, "missing_packages", return_value=()),
            contextlib.ExitStack() as stack,
        ):
            stand_ins.install(lambda *what: stack.enter_context(mock.patch.object(*what)))
            explanation = fusedmoe_transformers.explain(module, tokens=TOKENS)
            chain = expert_modules.experts_of(module).chain
            x = torch.zeros(TOKENS, chain.gate_up.in_features, dtype=torch.bfloat16, requires_grad=True)
            index = (torch.arange(2 * TOKENS) % chain.gate_up.num_groups).view(TOKENS, 2)
            weights = torch.ones(TOKENS, 2, requires_grad=True)
            fusedmoe_transformers.experts_forward(module, x, index, weights).sum().backward()
    finally:
        logger.removeHandler(declined)
    left = declined.ops + [op for plan in explanation.plans for step in plan.unfused for op in step.ops]
    if left:
        return f"fused except {', '.join(op.replace('_', ' ').replace('.', ' ') for op in left)}"
    return "unfused activation" if isinstance(chain.activation, expert_modules.ModelFunction) else "fused"


def router(model: torch.nn.Module, name: str) -> str:
    """What `patch_routers` does with the router next to experts."""
    block = model.get_submodule(name.rpartition(".")[0])
    found = router_kinds.recognise(block.gate if hasattr(block, "gate") else block.router)
    return "" if isinstance(found, str) else "patched" if found.fp32 else "patched with `fp32_logits`"


def row(family: str, module: torch.nn.Module, routed: str) -> tuple[str, ...]:
    op = fusedmoe_transformers.recognised(module)
    activation = "as it is" if op is None else f"`{re.sub(r'limit=[^,)]*', 'limit=…', repr(op))}`"
    shown = verdict(module)
    return family, layout(module), activation, routed, shown


def rows() -> list[tuple[str, ...]]:
    found = {}
    for family, model_class in [(family, None) for family in moe_families.family_names()] + moe_families.OTHER_MODELS:
        tiny = moe_families.tiny(family, "eager", torch.bfloat16, model_class=model_class)
        if family == "llama4":
            fusedmoe_transformers.patch_llama4(tiny.model)  # which says how many experts a token has
        for name, module in tiny.experts:
            found[family, type(module).__name__] = row(family, module, router(tiny.model, name))
    families: dict[tuple[str, ...], list[str]] = {}  # those with the same cells share a row
    for key in sorted(found):
        family, *cells = found[key]
        families.setdefault(tuple(cells), []).append(family)
    return [(", ".join(dict.fromkeys(names)), *cells) for cells, names in families.items()]


def table() -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *rows())]
    return CAPTION.format(version=transformers.__version__) + "\n".join(re.sub(" +", " ", x) for x in lines) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda match: table(), PAGE.read_text("utf-8")), "utf-8")
