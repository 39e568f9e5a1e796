"""Draw docs/_static/fp8.svg: the values of an expert MLP under ``fp8_block``, and the kernels between them.

    python docs/figures/fp8.py

Standard library only, so that the same text comes out everywhere. A test compares the committed file with `draw()`, and
the rules of `KERNELS` with the plan of this chain for an sm_90 GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parents[1] / "_static" / "fp8.svg"

FONT = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"
INK, MUTED, PAPER, LINE = "#1b2733", "#5b6b7b", "#ffffff", "#b8c4d0"
FILLS = {"bf16": "#eef2f7", "rows": "#cfe3fb", "columns": "#fbdcc0", "kernel": "#dff3e3"}
LEGEND = {"bf16": "bf16 (dW may be fp32)", "rows": "FP8 by rows", "columns": "FP8 by columns", "kernel": "kernel"}

WIDTH, HEIGHT, BOX = 960, 500, 34


class Value(NamedTuple):
    """A box with a value: its left edge, its top, its width, and its kind in `FILLS`."""

    x: int
    y: int
    text: str
    kind: str
    width: int = 84


class Kernel(NamedTuple):
    """A box with a kernel, and the rule that launches it."""

    x: int
    y: int
    width: int
    text: str
    rule: str


FORWARD, KEPT, WGRADS, COLUMNS, BACKWARD = 84, 158, 232, 306, 380
VALUES = {
    "x": Value(20, FORWARD, "x", "bf16", 48),
    "x8": Value(216, FORWARD, "x", "rows", 60),
    "h8": Value(548, FORWARD, "h", "rows", 60),
    "y": Value(892, FORWARD, "y", "bf16", 48),
    "xc": Value(112, KEPT, "x", "columns", 60),
    "p": Value(386, KEPT, "p", "bf16", 48),
    "dw1": Value(20, WGRADS, "dW1", "bf16", 56),
    "dw2": Value(880, WGRADS, "dW2", "bf16", 60),
    "dpc": Value(216, COLUMNS, "dp", "columns", 60),
    "hc": Value(548, COLUMNS, "h", "columns", 60),
    "dyc": Value(776, COLUMNS, "dy", "columns", 60),
    "dx": Value(20, BACKWARD, "dx", "bf16", 48),
    "dp8": Value(216, BACKWARD, "dp", "rows", 60),
    "dy8": Value(672, BACKWARD, "dy", "rows", 60),
    "dy": Value(892, BACKWARD, "dy", "bf16", 48),
}
KERNELS = {
    "qx": Kernel(100, FORWARD, 84, "quantize", "sm90.quantize"),
    "fc1": Kernel(308, FORWARD, 208, "FC1, SwiGLU, scale, quantize", "sm90.fp8_grouped_gemm_activation"),
    "fc2": Kernel(672, FORWARD, 60, "FC2", "sm90.fp8_grouped_gemm"),
    "w1": Kernel(112, WGRADS, 104, "FC1 wgrad", "sm90.fp8_grouped_wgrad"),
    "w2": Kernel(672, WGRADS, 104, "FC2 wgrad", "sm90.fp8_grouped_wgrad"),
    "d1": Kernel(100, BACKWARD, 84, "FC1 dgrad", "sm90.fp8_grouped_dgrad"),
    "d2": Kernel(336, BACKWARD, 276, "FC2 dgrad, dscale, dSwiGLU, quantize", "sm90.fp8_grouped_dgrad_activation"),
    "qdy": Kernel(764, BACKWARD, 84, "quantize", "sm90.quantize_grad"),
}
# (from, to), with the side of each box: right, left, top or bottom
ARROWS = (
    ("x", "qx", "rl"), ("qx", "x8", "rl"), ("x8", "fc1", "rl"), ("fc1", "h8", "rl"), ("h8", "fc2", "rl"),
    ("fc2", "y", "rl"), ("qx", "xc", "bt"), ("fc1", "p", "bt"),
    ("dy", "qdy", "lr"), ("qdy", "dy8", "lr"), ("dy8", "d2", "lr"), ("d2", "dp8", "lr"), ("dp8", "d1", "lr"),
    ("d1", "dx", "lr"),
    ("qdy", "dyc", "tb"), ("d2", "hc", "tb"), ("d2", "dpc", "tr"), ("p", "d2", "bt"),
    ("xc", "w1", "bt"), ("dpc", "w1", "tb"), ("hc", "w2", "tb"), ("dyc", "w2", "tb"), ("w1", "dw1", "lr"),
    ("w2", "dw2", "rl"),
)  # fmt: skip
NOTES = (
    "forward, from left to right",
    "backward, from right to left",
    "FC1, FC2 and their dgrads also read the weights: FP8 codes in blocks of 128x128, cached until the weights change.",
    "FC2 dgrad recomputes h from p, and writes it by columns.",
)


def _text(x: float, y: float, text: str, size: float = 13, fill: str = INK, extra: str = FONT) -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size:g}' fill='{fill}' {extra}>{escape(text)}</text>"


def _box(x: int, y: int, width: int, fill: str, corner: int) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{BOX}' rx='{corner}' fill='{fill}' stroke='{LINE}'/>"


def _side(name: str, side: str) -> tuple[float, float]:
    """Return the middle of a side of a box."""
    box = VALUES.get(name) or KERNELS[name]
    across, down = {"l": (0.0, 0.5), "r": (1.0, 0.5), "t": (0.5, 0.0), "b": (0.5, 1.0)}[side]
    return box.x + across * box.width, box.y + down * BOX


def _arrow(start: str, end: str, sides: str) -> str:
    (x1, y1), (x2, y2) = _side(start, sides[0]), _side(end, sides[1])
    dx, dy = x2 - x1, y2 - y1
    length = (dx * dx + dy * dy) ** 0.5
    x2, y2 = x2 - 3 * dx / length, y2 - 3 * dy / length
    return f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{MUTED}' marker-end='url(#head)'/>"


def draw() -> str:
    """Return the picture as SVG."""
    middle = f"{FONT} text-anchor='middle'"
    parts = [_arrow(*arrow) for arrow in ARROWS]
    for value in VALUES.values():
        parts.append(_box(value.x, value.y, value.width, FILLS[value.kind], 2))
        parts.append(_text(value.x + value.width / 2, value.y + 22, value.text, 13.5, INK, middle))
    for kernel in KERNELS.values():
        parts.append(_box(kernel.x, kernel.y, kernel.width, FILLS["kernel"], 12))
        parts.append(_text(kernel.x + kernel.width / 2, kernel.y + 22, kernel.text, 13, INK, middle))
    x = 20
    for kind, text in LEGEND.items():
        corner = 12 if kind == "kernel" else 2
        parts.append(
            f"<rect x='{x}' y='22' width='26' height='18' rx='{corner / 2:g}' fill='{FILLS[kind]}' stroke='{LINE}'/>"
        )
        parts.append(_text(x + 34, 36, text, 13, MUTED))
        x += 74 + 7 * len(text)
    parts.append(_text(20, FORWARD - 10, NOTES[0], 12.5, MUTED))
    parts.append(_text(20, BACKWARD + BOX + 22, NOTES[1], 12.5, MUTED))
    parts += [_text(20, HEIGHT - 36 + 20 * k, note, 12.5, MUTED) for k, note in enumerate(NOTES[2:])]
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        "role='img' aria-label='Values and kernels of an expert MLP under fp8_block'>"
    )
    marker = (
        "<defs><marker id='head' markerWidth='8' markerHeight='8' refX='6' refY='3' orient='auto'>"
        f"<path d='M0 0 L6 3 L0 6 z' fill='{MUTED}'/></marker></defs>"
    )
    paper = f"<rect width='{WIDTH}' height='{HEIGHT}' rx='8' fill='{PAPER}'/>"
    return "\n".join([head, marker, paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
