"""Draw docs/_static/plan.svg: one chain from the ops that a user composes to the kernels that run.

    python docs/figures/plan.py

Standard library only, so that the same text comes out everywhere. A test compares the committed file with `draw()`, and
`STEPS` with the plan of this chain for an sm_90 GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parents[1] / "_static" / "plan.svg"

OPS = ("GroupedLinear", "SwiGLU", 'Scale("probs")', "GroupedLinear")


class Step(NamedTuple):
    """A step of the plan: its direction, the ops that it covers, the rule that fuses them, and its kernel in words."""

    direction: str
    ops: tuple[str, ...]
    rule: str
    kernel: str


STEPS = (
    Step(
        "forward",
        ("0.GroupedLinear", "1.SwiGLU", "2.Scale"),
        "sm90.grouped_gemm_activation",
        "grouped GEMM; epilogue: SwiGLU, scale",
    ),
    Step("forward", ("3.GroupedLinear",), "sm90.grouped_gemm", "grouped GEMM"),
    Step("backward", ("3.Wgrad",), "sm90.grouped_wgrad", "weight gradient"),
    Step(
        "backward",
        ("3.Dgrad", "2.ScaleGrad", "2.DScale", "1.DSwiGLU"),
        "sm90.grouped_dgrad_activation",
        "input gradient; epilogue: their derivatives",
    ),
    Step("backward", ("0.Wgrad",), "sm90.grouped_wgrad", "weight gradient"),
    Step("backward", ("0.Dgrad",), "sm90.grouped_dgrad", "input gradient"),
)

FONT = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"
MONO = "font-family='SFMono-Regular, Menlo, DejaVu Sans Mono, monospace'"
INK, MUTED, PAPER, LINE = "#1b2733", "#5b6b7b", "#ffffff", "#b8c4d0"
FILLS = {"op": "#eef2f7", "forward": "#e3effd", "backward": "#fdeee0", "plan": "#e2f4e6", "step": "#cdebd4"}

WIDTH, TOP, ROW, BOX = 892, 84, 38, 28
GAP = 18  # between forward and backward
COLUMNS = {"op": (20, 130), "chain": (190, 138), "plan": (372, 236), "step": (648, 224)}  # left edge and width
HEADINGS = {
    "op": ("1  Ops", "in a Sequential"),
    "chain": ("2  Chain", "in both directions"),
    "plan": ("3  Plan", "fusion rules, chosen by cost"),
    "step": ("4  Steps", "kernels that run"),
}
NOTE = (
    "The plan for an sm_90 GPU in bf16, as explain() prints it.",
    "An op that no rule covers is one step in plain PyTorch, which computes the same function.",
)


def _text(x: float, y: float, text: str, size: float = 13, fill: str = INK, extra: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size:g}' fill='{fill}' {extra or FONT}>{escape(text)}</text>"


def _box(column: str, y: float, height: float, fill: str) -> str:
    x, width = COLUMNS[column]
    return f"<rect x='{x}' y='{y:g}' width='{width}' height='{height:g}' rx='5' fill='{FILLS[fill]}' stroke='{LINE}'/>"


def _arrow(start: str, end: str, y: float) -> str:
    left, right = sum(COLUMNS[start]) + 6, COLUMNS[end][0] - 8
    return f"<line x1='{left}' y1='{y:g}' x2='{right}' y2='{y:g}' stroke='{MUTED}' marker-end='url(#head)'/>"


def _wrapped(text: str) -> list[str]:
    """``"a; b" -> ["a;", "b"]``."""
    first, separator, rest = text.partition("; ")
    return [first + ";", rest] if separator else [text]


def draw() -> str:
    """Return the picture as SVG."""
    parts = []
    for column, (title, subtitle) in HEADINGS.items():
        x = COLUMNS[column][0]
        parts += [_text(x, 38, title, 17, INK, f"{FONT} font-weight='bold'"), _text(x, 58, subtitle, 12.5, MUTED)]
    y, op = float(TOP), 0
    for i, step in enumerate(STEPS):
        if i and STEPS[i - 1].direction != step.direction:
            y += GAP
        height = ROW * len(step.ops) - (ROW - BOX)
        middle = y + height / 2
        for k, name in enumerate(step.ops):
            top = y + k * ROW
            parts += [
                _box("chain", top, BOX, step.direction),
                _text(COLUMNS["chain"][0] + 10, top + 19, name, 12.5, INK, MONO),
            ]
            if step.direction == "forward":
                parts += [_box("op", top, BOX, "op"), _text(COLUMNS["op"][0] + 10, top + 19, OPS[op], 12.5, INK, MONO)]
                parts.append(_arrow("op", "chain", top + BOX / 2))
                op += 1
        bracket = sum(COLUMNS["chain"]) + 6
        if len(step.ops) > 1:
            path = f"M{bracket - 1} {y + 4:g} h8 V{y + height - 4:g} h-8"
            parts.append(f"<path d='{path}' fill='none' stroke='{MUTED}'/>")
        parts += [
            f"<line x1='{bracket + 7}' y1='{middle:g}' x2='{COLUMNS['plan'][0] - 8}' y2='{middle:g}' stroke='{MUTED}' "
            "marker-end='url(#head)'/>",
            _box("plan", y, height, "plan"),
            _text(COLUMNS["plan"][0] + 10, middle + 5, step.rule, 12.5, INK, MONO),
            _arrow("plan", "step", middle),
            _box("step", y, height, "step"),
        ]
        lines = _wrapped(step.kernel)
        for k, line in enumerate(lines):
            parts.append(_text(COLUMNS["step"][0] + 10, middle + 5 + (k - (len(lines) - 1) / 2) * 18, line))
        y += height + ROW - BOX
    backward = TOP + ROW * sum(len(s.ops) for s in STEPS if s.direction == "forward") + GAP
    parts += [
        _text(20, backward + 19, "each op names its", 12.5, MUTED),
        _text(20, backward + 36, "backward ops", 12.5, MUTED),
        *(_text(20, y + 22 + 18 * k, line, 12.5, MUTED) for k, line in enumerate(NOTE)),
    ]
    height = y + 60
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' width='{WIDTH}' "
        f"height='{height:g}' role='img' aria-label='From ops to a chain, a plan and steps'>"
    )
    marker = (
        "<defs><marker id='head' markerWidth='8' markerHeight='8' refX='6' refY='3' orient='auto'>"
        f"<path d='M0 0 L6 3 L0 6 z' fill='{MUTED}'/></marker></defs>"
    )
    paper = f"<rect width='{WIDTH}' height='{height:g}' rx='8' fill='{PAPER}'/>"
    return "\n".join([head, marker, paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
