"""Read `explain`: find and correct five common mistakes in a layer of experts until everything is fused.

    python examples/reading_explain.py

The results of the layer are correct with every mistake, but it is slower. ``explain(..., arch=90)`` plans for an sm_90
GPU (H100, H200), so the script needs no GPU. `raise_if_missed` raises for the first two mistakes, where a rule matches
the ops and declines. No rule matches the others, so only the plan shows them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import fusedmoe as fm

EXPERTS, HIDDEN = 4, 64


class Deinterleave(nn.Module):
    """Turn alternating gate and up features, the layout of GPT-OSS's checkpoints, into ``[gate | up]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


@dataclass(frozen=True)
class Layer:
    """The experts with all mistakes; each change in `STORY` sets one of these fields."""

    dtype: torch.dtype = torch.float32
    intermediate: int = 100
    reorder_by_module: bool = True  # gate and up alternate in the checkpoint
    dropout_inside: bool = True
    scale_last: bool = True  # the trained routing weight multiplies the output

    def build(self) -> fm.Sequential:
        act = [Deinterleave(), fm.SwiGLU()] if self.reorder_by_module else [fm.SwiGLU(interleaved=True)]
        drop, scale = nn.Dropout(0.1), fm.Scale("probs")
        return fm.Sequential(
            fm.GroupedLinear(EXPERTS, HIDDEN, 2 * self.intermediate, dtype=self.dtype),
            *act,
            *([] if self.scale_last else [scale]),
            *([drop] if self.dropout_inside else []),
            fm.GroupedLinear(EXPERTS, self.intermediate, HIDDEN, dtype=self.dtype),
            *([scale] if self.scale_last else []),
            *([] if self.dropout_inside else [drop]),
        )


# the reason that explain prints with the remedy, and the change
STORY = (
    ("fp32 parameters: 'input is float32, not bfloat16 or float16'. Make them bf16, or use torch.autocast.",
     {"dtype": torch.bfloat16}),
    ("An odd width: 'in_features 100 is not a multiple of 8'. Make it 104, or pad a checkpoint with zeros.",
     {"intermediate": 104}),
    ("'module 1: Deinterleave: not an op: splits the chain'. SwiGLU reads alternating gate and up itself:\n"
     "SwiGLU(interleaved=True).", {"reorder_by_module": False}),
    ("'module 2: Dropout: not an op: splits the chain', in its middle. Drop from the layer's output instead.",
     {"dropout_inside": False}),
    ("'cannot keep 3.input, which 3.ScaleGrad needs': the kernel takes a Scale after a layer only if its factors\n"
     "need no gradient. Without a bias, a Scale before the layer gives the same result, in the activation's kernel.",
     {"scale_last": False}),
)  # fmt: skip


def call_of(layer: Layer) -> tuple[fm.Sequential, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the experts, their rows, and the runtime inputs by name."""
    torch.manual_seed(0)
    x = torch.randn(64, HIDDEN, dtype=layer.dtype, requires_grad=True)
    splits = torch.tensor([20, 0, 30, 14])
    return layer.build(), x, {"splits": splits, "probs": torch.rand(64, requires_grad=True)}


class Chapter(NamedTuple):
    explanation: fm.Explanation
    strict_error: str  # the error of raise_if_missed(), or ""


def chapter(layer: Layer) -> Chapter:
    """Build the layer and plan a call for an sm_90 GPU."""
    experts, x, named = call_of(layer)
    explanation = experts.explain(x, **named, arch=90)
    try:
        explanation.raise_if_missed()
    except fm.FusionError as error:
        return Chapter(explanation, str(error))
    return Chapter(explanation, "")


def show(chapter: Chapter) -> None:
    """Print the unfused ops with their reasons, and the modules that split the chain."""
    steps = chapter.explanation.steps
    unfused = [step for step in steps if step.rule is None]
    strict = "raises" if chapter.strict_error else "passes"
    print(f"{len(steps) - len(unfused)} of {len(steps)} steps are FUSED; raise_if_missed() {strict}")
    for step in unfused:
        print(f"  not {' + '.join(step.ops)} ({step.direction}): {step.why}")
    for title, plan in chapter.explanation.parts:
        if plan is None:
            print(f"  {title}")


def main(argv: list[str] | None = None) -> list[Chapter]:
    """Print the story; return the first chapter, and the chapter after each change."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    layer = Layer()
    told = [chapter(layer)]
    print(told[0].explanation)
    print(f"\nraise_if_missed() raises:\n{told[0].strict_error}")
    for number, (lesson, change) in enumerate(STORY, 1):
        print(f"\n{number}. {lesson}")
        layer = replace(layer, **change)
        told.append(chapter(layer))
        show(told[-1])
    print(f"\n{told[-1].explanation}")
    return told


if __name__ == "__main__":
    main()
