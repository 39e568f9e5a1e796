"""The parts of docs/fp8.md that have figures: from ``fp8.json``, and from comparisons of recipes in training.

Each part is between two comments that name it. Without its result file, a part is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import marked
from benchmarks.fp8 import training
from benchmarks.fp8.layers import (
    ACCUMULATED,
    BY_EXPERT,
    CASES,
    FORWARD,
    MICRO_BATCHES,
    RECIPES,
    RESULTS,
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
ERRORS = {"y": "y", "x": "dx", "router": "drouter", "probs": "dprobs", "weight1": "dw1", "weight2": "dw2"}
TITLES = {
    STEP: "Forward and backward, weights quantized in every step",
    ACCUMULATED: f"Forward and backward, weights quantized once per {MICRO_BATCHES} micro-batches",
    FORWARD: "Forward, weights quantized in every step",
}
SPEED = """\
## Speed

Each time is a median of CUDA events around one call, with a flushed L2 cache and without launch gaps of the host. The
variants take turns. {machine}, torch {torch}, CUDA {cuda}, nvidia-cutlass-dsl {dsl}, commit {commit}. {ceiling}All
figures are those of `fp8.json` from `python -m benchmarks --only fp8`.{note}

### Whole layers

`fm.MoE` from tokens to tokens with its router; for `deepseek-v3-ep32`, the routed experts of one rank on dispatched
rows. *x bf16* is the time in bf16 divided by that of the recipe: above 1, the recipe is faster.
"""
LONG_CALLS = """\
With micro-batches, the kernels add the weight gradients to fp32 `main_grad`. One call has {n} micro-batches, and its
time is divided by {n}. So these are times under sustained load, where a GPU may lower its clock. The times of the other
tables are those of single calls.
"""
PRODUCTS = """\
### Products

The products on dispatched rows of {names}, in bf16 and in FP8. *x bf16* is the time in bf16 divided by that in FP8.
*Quantize* in the name of a product says that FP8 also quantizes the results for the next products in that time.
"""
CEILING = """\
Measured ceilings of this GPU: {tflops:.0f} TFLOP/s (a bf16 product of 8192³), {copy_tb_s:.1f} TB/s (copy, read and
written). """
QUANTIZE = """\
### Quantization

Kernels that quantize, with the bytes that they read and write. *of copy* is their speed divided by that of a copy.
Rows that are read through an index count as if each of them were quantized. By rows alone, each token is quantized
once, and its codes are copied. So this kernel may be faster than a copy.
"""
UNFUSED = """\
### Against FP8 without fused kernels

The expert MLP on dispatched rows of {names}. *torch FP8 by rows* is what plain PyTorch offers on Hopper:
`F.scaled_grouped_mm` with E4M3 codes and one scale per row, and compiled functions for quantization, SwiGLU and its
derivative. The weights are quantized in every call, except where the name says otherwise. *x fp8_block* is the time
divided by that of `fp8_block`: above 1, `fp8_block` is faster.
"""
TENSOR = """\
The tables compare `fp8_tensor` with `fp8_block` of the same run. The columns are those of [Speed](#speed). *Delayed* is
delayed scaling with the defaults of Transformer Engine.
"""
NO_TENSOR = "No layer and no product with one scale per expert has been measured yet.\n"
TENSOR_PRODUCTS = """\
Products on dispatched rows. The gradients of *one scale per expert* are in E5M2, and *quantize* is that of delayed
scaling, which also finds the largest magnitude of each expert.
"""
MEMORY = """\
### Memory of the layers

GiB that forward keeps for backward, the peak of forward and backward beyond weights and inputs, and the quantized
weights, if they were measured. These are the allocations of the calls above. x in bf16 is an input of
`deepseek-v3-ep32`, and is not counted.
"""
ACCURACY = """\
## Accuracy

Errors of whole layers, relative to fp64 in norm, on a sample of tokens or rows and experts. Operands are normal random
numbers, in which no error averages out. {machine}, commit {commit}.
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
        "training": train_page.losses(trained), "tensor": tensor(found),
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
            text += [intro.format(names=names), "\n\n".join(tables(entry) for entry in entries) + "\n"]
    return "\n".join(text)


def tensor(found: Mapping[str, Any] | None) -> str:
    """Return the tables of one scale per expert; a sentence if nothing was measured."""
    if found is None:
        return NO_TENSOR
    recipes = [FP8, *BY_EXPERT]
    head = ["shape", "pass", "`bf16`, ms"]
    for recipe in recipes:
        head += [f"{_shown(recipe)}, ms", "x bf16"]
    of_layers = []
    for entry in found["layers"]:
        for case, title in TITLES.items():
            rows = [_row(entry, case, recipe) for recipe in recipes]
            if any(_ms(row) for row in rows[1:]):
                cells = [cell for row in rows for cell in (_ms(row), _ratio(row.get("speedup")))]
                of_layers.append([entry["name"], title, _ms(_row(entry, case, "bf16")), *cells])
    of_products = []
    for entry in found["products"]:
        by_format = {(row["product"], row["format"]): row for row in entry.get("rows", ())}
        for product, format in by_format:
            if format == PRODUCT_BY_EXPERT:
                bf16, *rows = (by_format[product, name] for name in ("bf16", "fp8", format))
                cells = [cell for row in rows for cell in (_ms(row), _ratio(row.get("speedup")))]
                of_products.append([entry["name"], product, _ms(bf16), *cells])
    text = []
    if of_layers:
        text += [TENSOR, table(head, of_layers) + "\n"]
    if of_products:
        head = ["shape", "product", "bf16, ms", f"`{FP8}`, ms", "x bf16", "one scale per expert, ms", "x bf16"]
        text += [TENSOR_PRODUCTS, table(head, of_products) + "\n"]
    return "\n".join(text) or NO_TENSOR


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
    rows = []
    for entry in found["layers"]:
        for recipe in EVERY_RECIPE:
            kept = _row(entry, FORWARD, recipe).get("kept_bytes")
            peak = _row(entry, STEP, recipe).get("peak_bytes")
            weights = entry.get("recipes", {}).get(recipe, {}).get("weight_bytes")
            if kept is not None or peak is not None:
                rows.append([entry["name"], _shown(recipe), *(_gib(value) for value in (kept, peak, weights))])
    if not rows:
        return ""
    head = ["shape", "recipe", "kept", "peak", "quantized weights"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return MEMORY + "\n" + table(head, rows) + "\n"


def accuracy(found: Mapping[str, Any] | None, compared: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of errors, and of losses in training."""
    text = []
    if found is not None:
        rows = []
        for entry in found["layers"]:
            for recipe in EVERY_RECIPE:
                if errors := entry.get("recipes", {}).get(recipe, {}).get("errors"):
                    shown = {ERRORS[name]: f"{error:.1e}" for name, error in errors.items()}
                    third = next((shown[name] for name in ("drouter", "dprobs") if name in shown), "")
                    cells = [shown[ERRORS[name]] for name in RESULTS]
                    rows.append([entry["name"], _shown(recipe), *cells[:2], third, *cells[2:]])
        head = ["shape", "recipe", "y", "dx", "drouter or dprobs", "dw1", "dw2"]
        if rows:
            text += [ACCURACY.format(machine=found["machine"], commit=found["commit"]), table(head, rows) + "\n"]
    if compared:
        text += [*([] if text else ["## Accuracy\n"]), training.section(compared)]
    return "\n".join(text)


def _layers(entries: Sequence[Mapping[str, Any]], case: str) -> str:
    head = ["shape", "`bf16`, ms", *(f"`{recipe}`, ms | x bf16" for recipe in (FP8, WGRAD_BF16))]
    rows = []
    for entry in entries:
        cells = [_ms(_row(entry, case, "bf16"))]
        for recipe in (FP8, WGRAD_BF16):
            row = _row(entry, case, recipe)
            cells += [_ms(row), _ratio(row.get("speedup"))]
        rows.append([entry["name"], *cells])
    means = speedups(entries).get(case, {})
    if len(rows) > 1 and means:
        rows.append(["*geometric mean*", "", "", _ratio(means.get(FP8)), "", _ratio(means.get(WGRAD_BF16))])
    return table(" | ".join(head).split(" | "), rows)


def _products(entry: Mapping[str, Any]) -> str:
    found = {(row["product"], row["format"]): row for row in entry["rows"]}
    rows = []
    for product in dict.fromkeys(row["product"] for row in entry["rows"]):
        bf16, fp8 = (found.get((product, format), {}) for format in ("bf16", "fp8"))
        figures = [_ms(bf16), _number(bf16.get("tflops"), ".0f"), _ms(fp8), _number(fp8.get("tflops"), ".0f")]
        rows.append([entry["name"], product, *figures, _ratio(fp8.get("speedup"))])
    return table(["shape", "product", "bf16, ms", "TFLOP/s", "FP8, ms", "TFLOP/s", "x bf16"], rows)


def _quantize(entry: Mapping[str, Any]) -> str:
    rows = []
    for row in entry["rows"]:
        if row["ms"] is None:
            continue
        kernel = row["kernel"].replace(GATHERED, "through an index: ")
        moved = (row["read_bytes"] + row["written_bytes"]) / 1e9
        shape = " x ".join(map(str, row["shape"]))
        rows.append([kernel, shape, _ms(row), f"{moved:.2f}", f"{row['tb_s']:.2f}", f"{row['of_copy']:.2f}"])
    return table(["kernel", "of", "ms", "GB", "TB/s", "of copy"], rows)


def _unfused(entry: Mapping[str, Any]) -> str:
    rows = []
    for row in entry["rows"]:
        shown = [_ms(row), _ratio(row["fp8_block_is"] if row["peer"] != OURS_IN_FP8 else None)]
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        rows.append([row["case"], row["peer"], *(shown if row["ms"] else [row["note"], ""]), error])
    return table(["pass", "", "ms", "x fp8_block", "error"], rows)


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
