"""One call of each block-scaled grouped GEMM of cudnn-frontend through its class: construct, check, compile, execute.

Legend: P rows (each expert's padded to 256), K summed over, N columns of B, I columns of an activation, E experts.
Codes are E4M3, scales E8M0 in flat buffers of tiles.
"""

import cudnn.gemm.cutedsl.grouped as grouped
import torch

from blackwell.scales import round_up

CONFIG = {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (2, 1), "sf_vec_size": 32}


def codes(rows, columns):
    """Return codes to be written: NaNs, so that those read without being written show."""
    return torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


def scales(rows, columns):
    """Return the scales of codes (rows, columns), in blocks along the columns, to be written: NaNs."""
    return torch.full((round_up(rows, 128) * round_up(columns, 128) // 32,), 0xFF, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )


def bf16(*shape):
    return torch.full(shape, torch.nan, dtype=torch.bfloat16)


def call(api_class, tensors, constants, **run_time):
    """Construct an API object for tensors (argument names without prefix and suffix) and execute it with them."""
    api = api_class(**{f"sample_{name}": t for name, t in tensors.items()}, **constants, **CONFIG)
    assert api.check_support()
    api.compile()
    api.execute(
        **{name if name == "padded_offsets" else f"{name}_tensor": t for name, t in tensors.items()}, **run_time
    )
    return api


def outputs(rows, columns, names=("d", "d_col")):
    """Return output tensors: codes by rows and by columns, neither transposed, and their scales."""
    return {
        names[0]: codes(rows, columns), names[1]: codes(rows, columns), "sfd_row": scales(rows, columns),
        "sfd_col": scales(columns, rows), "norm_const": torch.ones(1),
    }  # fmt: skip


def product(a, sfa, b, sfb, ends):
    """The operands of every product: a (P, K) and b (E, N, K)."""
    return {"a": a, "sfa": sfa, "b": b, "sfb": sfb, "padded_offsets": ends, "alpha": torch.ones(len(ends))}


def glu(operands, prob, *, clamp=None, bias=None, discrete_col_sfd=True):
    """C (P, N) bf16 and D (P, N / 2); `clamp` are run-time numbers; `bias` (E, N)."""
    rows, width = len(operands["a"]), operands["b"].shape[1]
    tensors = {**operands, "prob": prob, "c": bf16(rows, width), **outputs(rows, width // 2)}
    if bias is not None:
        tensors["bias"] = bias.T
    constants = {"act_func": "geglu" if clamp else "swiglu", "discrete_col_sfd": discrete_col_sfd}
    call(grouped.GroupedGemmGluSm100, tensors, constants, **(clamp or {}))
    return tensors


def quant(operands, *, bias=None, prob=None):
    """D (P, N) bf16. With a bias, a prob multiplies the bias only."""
    tensors = {**operands, "d": bf16(len(operands["a"]), operands["b"].shape[1])}
    if bias is not None:
        tensors |= {"bias": bias.T, "prob": prob}
    call(grouped.GroupedGemmQuantSm100, tensors, {})
    return tensors["d"]


def dglu(operands, prob, c, *, clamp=None, discrete_col_sfd=True):
    """D (P, 2 I) and dprob (P,), from C (P, 2 I) as glu wrote it; `clamp` are compile-time numbers."""
    dprob = torch.zeros(len(c))
    constants = {"act_func": "dgeglu" if clamp else "dswiglu", "discrete_col_sfd": discrete_col_sfd, **(clamp or {})}
    tensors = {**operands, "beta": torch.ones(len(operands["alpha"])), "prob": prob, "dprob": dprob, "c": c}
    tensors |= outputs(*c.shape, names=("d_row", "d_col"))
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    call(grouped.GroupedGemmDgluSm100, tensors, constants, workspace=memory[-memory.data_ptr() % 128 :])
    return tensors


def srelu(operands, prob, *, discrete_col_sfd=True):
    """C (P, I) bf16 and D (P, I)."""
    rows, width = len(operands["a"]), operands["b"].shape[1]
    tensors = {**operands, "prob": prob, "c": bf16(rows, width), **outputs(rows, width)}
    call(grouped.GroupedGemmSreluSm100, older_views(tensors), {"discrete_col_sfd": discrete_col_sfd})
    return tensors


def dsrelu(operands, prob, c, *, discrete_col_sfd=True):
    """D (P, I) and dprob (P,), from C (P, I) as srelu wrote it."""
    tensors = {**operands, "prob": prob, "dprob": torch.zeros(len(c)), "c": c}
    tensors |= outputs(*c.shape, names=("d_row", "d_col"))
    call(grouped.GroupedGemmDsreluSm100, older_views(tensors), {"discrete_col_sfd": discrete_col_sfd})
    return tensors


def wgrad(dy, x, sf_dy, sf_x, ends, out=None, *, accumulate=False):
    """The sum of dy^T x over each expert's rows (E, M, N): dy (P, M) and x (P, N) by columns, scales of each expert."""
    if out is None:
        out = bf16(len(ends), dy.shape[1], x.shape[1])
    tensors = {"a": dy.T, "b": x, "sfa": sf_dy, "sfb": sf_x, "offsets": ends, "wgrad": out}
    call(grouped.GroupedGemmWgradSm100, tensors, {"accumulate_on_output": accumulate})
    return out


def older_views(tensors):
    """Return views as srelu and dsrelu take them: (P, X, 1), (N, K, E), (P, 1, 1) and tiles in 6 dimensions."""
    experts, width, depth = tensors["b"].shape
    rows = len(tensors["a"])
    shapes = {
        "sfa": (1, rows, depth),
        "sfb": (experts, width, depth),
        "sfd_row": (1, rows, width),
        "sfd_col": (1, width, rows),
    }
    views = dict(tensors)
    for name, t in tensors.items():
        if name in shapes:
            groups, down, across = shapes[name]
            tiles = t.view(groups, round_up(down, 128) // 128, round_up(across, 128) // 128, 32, 4, 4)
            views[name] = tiles.permute(3, 4, 1, 5, 2, 0)
        elif name == "b":
            views[name] = t.permute(1, 2, 0)
        elif name in ("prob", "dprob"):
            views[name] = t.view(-1, 1, 1)
        elif t.dim() == 2:
            views[name] = t.as_strided((*t.shape, 1), (t.shape[1], 1, t.numel()))
    return views
