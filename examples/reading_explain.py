"""Reading `explain`: a layer of experts with five common mistakes, found one after the other until everything is fused.

    python examples/reading_explain.py

Every mistake gives right results, and runs slower than it could. `fm.strict` makes an error of the first two, where a
kernel is there and declines; of the others, where none is looked for, only `explain` tells. The kernels are for sm_90
GPUs (H100, H200). Without one, this script *rehearses*: rules with the patterns and the constraints of the real ones
are planned on the CPU, and their ops run in plain PyTorch. What explain says is then what it would say on such a GPU,
but for the rules' names.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import fusedmoe as fm
from fusedmoe.fusion.rule import NothingToDo

EXPERTS, HIDDEN = 4, 64


class Deinterleave(nn.Module):
    """Rows of gate, up, gate, up, ..., as GPT-OSS's checkpoints have them, to all gates and then all ups."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


@dataclass(frozen=True)
class Layer:
    """How somebody wrote the experts at first; every change of the story below is one of these lines."""

    dtype: torch.dtype = torch.float32
    intermediate: int = 100
    reorder_by_module: bool = True  # the checkpoint's gate and up alternate
    dropout_inside: bool = True
    scale_last: bool = True  # the router's weight, which is trained, multiplies the output

    def build(self, device: str) -> fm.Sequential:
        kind = {"dtype": self.dtype, "device": device}
        act = [Deinterleave(), fm.SwiGLU()] if self.reorder_by_module else [fm.SwiGLU(interleaved=True)]
        drop, scale = nn.Dropout(0.1), fm.Scale("probs")
        return fm.Sequential(
            fm.GroupedLinear(EXPERTS, HIDDEN, 2 * self.intermediate, **kind),
            *act,
            *([] if self.scale_last else [scale]),
            *([drop] if self.dropout_inside else []),
            fm.GroupedLinear(EXPERTS, self.intermediate, HIDDEN, **kind),
            *([scale] if self.scale_last else []),
            *([] if self.dropout_inside else [drop]),
        )


# what explain says, and the change that it asks for
STORY = (
    ("fp32 parameters: 'input is float32, not bfloat16 or float16'. Make them bf16, or use torch.autocast.",
     {"dtype": torch.bfloat16}),
    ("An odd width: 'in_features 100 is not a multiple of 8'. Make it 104, or pad a checkpoint with zeros.",
     {"intermediate": 104}),
    ("'module 1: Deinterleave: not an op: splits the chain'. SwiGLU reads alternating gate and up itself:\n"
     "SwiGLU(interleaved=True).", {"reorder_by_module": False}),
    ("'module 2: Dropout: not an op: splits the chain', in its middle. Drop from the layer's output instead.",
     {"dropout_inside": False}),
    ("'cannot keep 3.input, which 3.ScaleGrad needs': after a layer the kernel takes a Scale only if nobody wants its\n"
     "gradient. Without a bias a Scale before the layer gives the same, in the activation's own kernel.",
     {"scale_last": False}),
)  # fmt: skip


def rehearsal(rule: type[fm.FusionRule]) -> type[fm.FusionRule]:
    """Return a rule with the pattern and constraints of this one, for CPUs: planned as it is, run as plain PyTorch."""

    def bind(*tensors: object, **keep: object) -> None:
        raise NothingToDo("only rehearsed")  # the ops run unfused, and nobody is warned

    class Rehearsal(rule, name=rule.name.replace("sm90.", "rehearsed."), direction=rule.direction):
        @classmethod
        def available(cls, device: torch.device, arch: int | None) -> None:
            fm.require(device.type == "cpu", "rehearses on CPUs")

        def build(self, ctx: fm.PlanContext) -> fm.Step:
            return replace(super().build(ctx), bind=bind)

    return Rehearsal


def call_of(layer: Layer, device: str) -> tuple[fm.Sequential, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the experts, rows for them, and the runtime inputs by name."""
    torch.manual_seed(0)
    x = torch.randn(64, HIDDEN, dtype=layer.dtype, device=device, requires_grad=True)
    splits = torch.tensor([20, 0, 30, 14], device=device)
    probs = torch.rand(64, device=device, requires_grad=True)
    return layer.build(device), x, {"splits": splits, "probs": probs}


class Chapter(NamedTuple):
    explanation: fm.Explanation
    strict_error: str  # what fm.strict() raises, or nothing


def chapter(layer: Layer, device: str) -> Chapter:
    """Build the layer, plan a call of it and call it."""
    experts, x, named = call_of(layer, device)
    explanation = experts.explain(x, **named)
    try:
        with fm.strict():
            experts(x, **named).sum().backward()
    except fm.FusionError as error:
        return Chapter(explanation, str(error))
    return Chapter(explanation, "")


def show(chapter: Chapter) -> None:
    """Print what runs unfused and why, and what splits the chain: print(explanation) shows the same, and more."""
    steps = chapter.explanation.steps
    unfused = [step for step in steps if step.rule is None]
    strict = "raises" if chapter.strict_error else "passes"
    print(f"{len(steps) - len(unfused)} of {len(steps)} steps are FUSED; fm.strict() {strict}")
    for step in unfused:
        print(f"  not {' + '.join(step.ops)} ({step.direction}): {step.why}")
    for title, plan in chapter.explanation.parts:
        if plan is None:
            print(f"  {title}")


def main(argv: list[str] | None = None) -> list[Chapter]:
    """Tell the story; return how it was at first and after each change."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    layer, hopper = Layer(), torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if hopper else "cpu"
    told = [chapter(layer, device)]
    missing = [a for a in told[0].explanation.plans[0].attempts if a.status is fm.Status.UNAVAILABLE]
    with contextlib.ExitStack() as stack:
        if any(a.rule.startswith("sm90.") for a in missing):
            print(f"This machine has no kernels to fuse with ({missing[0].reason}): rehearsing.\n")
            rules = [rule for rule in fm.rules() if rule.name.startswith("sm90.")]
            stack.enter_context(fm.register(*map(rehearsal, rules)))
            told = [chapter(layer, device)]
        print(told[0].explanation)
        print(f"\nUnder fm.strict() that is an error:\n{told[0].strict_error}")
        for number, (lesson, change) in enumerate(STORY, 1):
            print(f"\n{number}. {lesson}")
            layer = replace(layer, **change)
            told.append(chapter(layer, device))
            show(told[-1])
    print(f"\n{told[-1].explanation}")
    return told


if __name__ == "__main__":
    main()
