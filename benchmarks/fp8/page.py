"""The parts of docs/fp8.md that have figures: from ``fp8.json``, and from comparisons of recipes in training.

Each part is between two comments that name it. Without its result file, a part is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import demo, marked
from benchmarks.fp8.layers import (
    ACCUMULATED,
    BY_EXPERT,
    CASES,
    FORWARD,
    MICRO_BATCHES,
    RECIPES,
    STEP,
    speedups,
)
from benchmarks.fp8.products import BY_EXPERT as PRODUCT_BY_EXPERT
from benchmarks.fp8.quantize import GATHERED
from benchmarks.fp8.unfused import OURS_IN_FP8
from benchmarks.marked import table
from benchmarks.train import page as train_page

FP8, WGRAD_BF16 = RECIPES[1:]
EVERY_RECIPE = (*RECIPES, *BY_EXPERT)
FORMATS = {"bf16": "bf16", "fp8": f"`{FP8}`", PRODUCT_BY_EXPERT: "one scale per expert"}
ERRORS = ("y",), ("x",), ("router", "probs"), ("weight1",), ("weight2",)  # of each column
TITLES = {
    STEP: "Forward and backward, weights quantized in every step",
    ACCUMULATED: f"Forward and backward, weights quantized once per {MICRO_BATCHES} micro-batches",
    FORWARD: "Forward, weights quantized in every step",
}
SPEED = """\
## Speed

Each time is a median of CUDA events around one call, with a flushed L2 cache and without launch gaps of the host. The
variants take turns. {machine}, torch {torch}, CUDA {cuda}, nvidia-cutlass-dsl {dsl}, commit {commit}. {ceiling}All
figures are those of `fp8.json` from `python -m benchmarks --only fp8`.{note} A number with *x* is the time in bf16
divided by that of the recipe: above 1, the recipe is faster.

### Whole layers

`fm.MoE` from tokens to tokens with its router, in ms; for `deepseek-v3-ep32`, the routed experts of one rank on
dispatched rows. *Delayed* is delayed scaling with the defaults of Transformer Engine.
"""
LONG_CALLS = """\
With micro-batches, the kernels add the weight gradients to fp32 `main_grad`. A call has {n} of them, and its time is
divided by {n}: times under sustained load, where a GPU may lower its clock.
"""
PRODUCTS = """\
### Products

The products on dispatched rows: ms (TFLOP/s). *Quantize*: FP8 also quantizes the results for the next products. With
one scale per expert, that is delayed scaling, which also finds the amax of each expert, and gradients are E5M2.
"""
CEILING = """\
Measured ceilings of this GPU: {tflops:.0f} TFLOP/s (a bf16 product of 8192³), {copy_tb_s:.1f} TB/s (copy, read and
written). """
QUANTIZE = """\
### Quantization

Kernels that quantize, with the bytes that they read and write. *of copy* is their speed divided by that of a copy. Rows
read through an index count as if each were quantized; by rows alone, each token is quantized once.
"""
UNFUSED = """\
### Against FP8 without fused kernels

The expert MLP on dispatched rows of {names}: ms, *x* (the time divided by that of `fp8_block`), and the error. *torch
FP8 by rows* is `F.scaled_grouped_mm` with E4M3 codes and one scale per row, the rest compiled. Weights are quantized in
every call, unless the name says otherwise.
"""
MEMORY = """\
### Memory of the layers

GiB that forward keeps for backward, and the peak of forward and backward beyond weights and inputs; then the quantized
weights. x in bf16 is an input of `deepseek-v3-ep32`, and is not counted.
"""
ACCURACY = """\
## Accuracy

Errors of whole layers, relative to fp64 in norm, on a sample of tokens or rows and experts: the least and the largest
of the shapes of [whole layers](#whole-layers). Operands are normal random numbers, in which no error averages out.
{machine}, commit {commit}.
"""


def filled(
    text: str,
    found: Mapping[str, Any] | None,
    compared: Sequence[Mapping[str, Any]] = (),
    trained: Mapping[str, Any] | None = None,
) -> str:
    """Return the page with its parts replaced.

    Parameters
    ----------
    text
        The page.
    found
        ``fp8.json``.
    compared
        A comparison of recipes in the demo, by seed.
    trained
        ``train_recipes.json``.
    """
    parts = {
        "speed": speed(found), "memory": memory(found), "accuracy": accuracy(found, compared),
        "training": train_page.losses(trained),
    }  # fmt: skip
    return marked.filled(text, parts, "docs/fp8.md")


def speed(found: Mapping[str, Any] | None) -> str:
    """Return the tables of times."""
    if found is None:
        return ""
    versions, layers = found["versions"], [entry for entry in found["layers"] if entry.get("rows")]
    text = [
        SPEED.format(
            machine=found["machine"], torch=versions["torch"], cuda=versions.get("cuda"),
            dsl=versions.get("nvidia-cutlass-dsl"), commit=found["commit"],
            ceiling=CEILING.format(**found["ceiling"]) if found["ceiling"] else "",
            note=f" {found['note']}" if "note" in found else "",
        )
    ]  # fmt: skip
    for case, title in TITLES.items():
        text.append(f"#### {title}\n\n{_layers(layers, case)}\n")
        if case == ACCUMULATED:
            text.append(LONG_CALLS.format(n=found["micro_batches"]))
    if found["left_out"]:
        each = ", ".join(f"`{name}` ({why})" for name, why in found["left_out"].items())
        text.append(f"Not measured: {each}.\n")
    for part, intro, tables in (
        ("products", PRODUCTS, _products), ("quantize", QUANTIZE, _quantize), ("unfused", UNFUSED, _unfused),
    ):  # fmt: skip
        if entries := [entry for entry in found[part] if entry.get("rows")]:
            names = " and ".join(f"`{entry['name']}`" for entry in entries)
            text += [intro.format(names=names), tables(entries) + "\n"]
    return "\n".join(text)


def measured(found: Mapping[str, Any]) -> str:
    """Return the recipes of the layers, as text."""
    names = dict.fromkeys(f"`{row['recipe'].partition(',')[0]}`" for entry in found["layers"] for row in entry["rows"])
    quantized = [name for name in names if name in ("`fp8_block`", "`fp8_tensor`")]
    return f"the recipe{'s' * (len(quantized) > 1)} {' and '.join(quantized)}"


def _shown(recipe: str) -> str:
    """Return a recipe's name and its remark, as text of the page."""
    name, comma, remark = recipe.partition(",")
    return f"`{name}`{comma}{remark}"


def memory(found: Mapping[str, Any] | None) -> str:
    """Return the table of memory."""
    if found is None:
        return ""
    recipes = _recipes(found["layers"])
    rows = []
    for entry in found["layers"]:
        cells = []
        for recipe in recipes:
            kept = _gib(_row(entry, FORWARD, recipe).get("kept_bytes"))
            peak = _gib(_row(entry, STEP, recipe).get("peak_bytes"))
            cells.append(", ".join(figure for figure in (kept, peak) if figure))
        if any(cells):
            weights = (_gib(of.get("weight_bytes")) for name, of in entry.get("recipes", {}).items() if name != "bf16")
            rows.append([entry["name"], *cells, " or ".join(dict.fromkeys(weights))])
    if not rows:
        return ""
    return MEMORY + "\n" + table(["shape", *map(_shown, recipes), "quantized weights"], rows) + "\n"


def accuracy(found: Mapping[str, Any] | None, compared: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of errors, and of losses in training."""
    text = []
    if found is not None:
        rows = []
        for recipe in EVERY_RECIPE:
            errors = [entry.get("recipes", {}).get(recipe, {}).get("errors") for entry in found["layers"]]
            if any(errors):
                cells = [_range([of[name] for of in errors if of for name in names if name in of]) for names in ERRORS]
                rows.append([_shown(recipe), str(len([of for of in errors if of])), *cells])
        head = ["recipe", "shapes", "y", "dx", "drouter or dprobs", "dw1", "dw2"]
        if rows:
            text += [ACCURACY.format(machine=found["machine"], commit=found["commit"]), table(head, rows) + "\n"]
    if compared:
        text += [*([] if text else ["## Accuracy\n"]), demo.section(compared)]
    return "\n".join(text)


def _recipes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the recipes that any layer was measured with."""
    found = {row["recipe"] for entry in entries for row in entry.get("rows", ())}
    return [recipe for recipe in EVERY_RECIPE if recipe in found]


def _layers(entries: Sequence[Mapping[str, Any]], case: str) -> str:
    recipes = _recipes(entries)
    rows = [[entry["name"], *(_time(_row(entry, case, recipe)) for recipe in recipes)] for entry in entries]
    means = speedups(entries).get(case, {})
    if len(rows) > 1 and means:
        of = {recipe: f"{means[recipe]:.2f}x" if recipe in means else "" for recipe in recipes}
        rows.append(["*geometric mean*", *of.values()])
    return table(["shape", *map(_shown, recipes)], rows)


def _products(entries: Sequence[Mapping[str, Any]]) -> str:
    found = {(entry["name"], row["product"], row["format"]): row for entry in entries for row in entry["rows"]}
    columns = [key for key in FORMATS if any(key == format for *_, format in found)]
    head = ["product", *(f"{entry['name']}: {FORMATS[key]}" for entry in entries for key in columns)]
    rows = []
    for product in dict.fromkeys(product for _, product, _ in found):
        cells = [_time(found.get((entry["name"], product, key), {})) for entry in entries for key in columns]
        rows.append([product, *cells])
    return table(head, rows)


def _quantize(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in (row for entry in entries for row in entry["rows"] if row["ms"] is not None):
        kernel = row["kernel"].replace(GATHERED, "through an index: ")
        moved = (row["read_bytes"] + row["written_bytes"]) / 1e9
        shape = "x".join(map(str, row["shape"]))
        rows.append([kernel, shape, _ms(row), f"{moved:.2f}", f"{row['tb_s']:.2f}", f"{row['of_copy']:.2f}"])
    return table(["kernel", "of", "ms", "GB", "TB/s", "of copy"], rows)


def _unfused(entries: Sequence[Mapping[str, Any]]) -> str:
    found = {(row["peer"], row["case"]): row for entry in entries for row in entry["rows"]}
    cases = list(dict.fromkeys(case for _, case in found))
    rows = []
    for peer in dict.fromkeys(peer for peer, _ in found):
        rows.append([peer, *(_against(found.get((peer, case), {}), peer) for case in cases)])
    return table(["", *cases], rows)


def _against(row: Mapping[str, Any], peer: str) -> str:
    """Return the time of a peer, its factor and its error; or why it has none."""
    if not row.get("ms"):
        return str(row.get("note", ""))
    factor = "" if peer == OURS_IN_FP8 else f" {_ratio(row['fp8_block_is'])}x"
    return f"{_ms(row)}{factor}" + ("" if row["error"] is None else f", {row['error']:.1e}")


def _time(row: Mapping[str, Any]) -> str:
    """Return milliseconds, TFLOP/s of a product, and the factor against bf16 except for bf16 itself."""
    if not row.get("ms"):
        return ""
    tflops = f" ({row['tflops']:.0f})" if "product" in row else ""
    is_bf16 = "bf16" in (row.get("recipe"), row.get("format"))
    factor = f" {_ratio(row['speedup'])}x" if row.get("speedup") and not is_bf16 else ""
    return f"{_ms(row)}{tflops}{factor}"


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1e}" for value in (min(values), max(values)))) if values else ""


def _row(entry: Mapping[str, Any], case: str, recipe: str) -> Mapping[str, Any]:
    assert case in CASES
    rows = entry.get("rows", ())
    return next((row for row in rows if (row["case"], row["recipe"]) == (case, recipe)), {})


def _ms(row: Mapping[str, Any]) -> str:
    return _number(row.get("ms"), ".3f")


def _ratio(value: float | None) -> str:
    return _number(value, ".2f")


def _gib(amount: int | None) -> str:
    return "" if amount is None else f"{amount / 2**30:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
