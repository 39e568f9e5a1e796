"""What the block-scaled kernels of cudnn-frontend do on the device, in PyTorch.

Written from the kernels' source, with its names of arguments. Numbers are parameters of a launch (the activation of
glu), were constants when a kernel was traced (those of dglu), or are attributes of the kernel.

Legend: P rows, of all experts, each expert's padded to 256. K is summed over, N are columns of the product, E experts.
"""

import struct

import torch
from cudnn.gemm.cutedsl.grouped.moe_utils import MoEWeightMode
from cutlass.cute.nvgpu import OperandMajorMode

from blackwell.launches import memory
from blackwell.scales import TILE, dequantized, quantized, round_up, tiled, untiled

ROWS = 256  # FIX_PAD_SIZE of the kernels: the first row of an expert is a multiple of it
CLAMPED = ("geglu_alpha", "linear_offset", "glu_clamp_min", "glu_clamp_max")
DTYPES = {
    "Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16, "Float8E4M3FN": torch.float8_e4m3fn,
}  # fmt: skip


def run(launch):
    """Run the soft kernel of a launch."""
    package = type(launch.kernel).__module__.split(".")[-2]
    if launch.name == "helper_kernel":
        if package == "wgrad":
            wgrad_helper(launch)
        return  # in the other kernels it clears the counter of the dynamic scheduler
    refuse_what_is_not_written(launch)
    KERNELS[package](launch)


def refuse_what_is_not_written(launch):
    """Raise where the device code would do more than the soft kernels."""
    refused = [name for name in ("mAmax_tensor", "mDbias_tensor", "row_scale") if name in launch]
    options = ("tanh_clamp_scale", "deterministic", "generate_d_srelu")
    refused += [name for name in options if getattr(launch.kernel, name, None) not in (None, False)]
    if refused or launch.kernel.weight_mode != MoEWeightMode.DENSE:
        raise NotImplementedError(f"the soft kernels have no {', '.join(refused) or 'pointers to weights'}")


def glu(launch):
    """x = alpha A B + bias, to C; D = prob * act(x)."""
    kernel = launch.kernel
    x_PN = product(launch) + bias(launch)
    write(launch, "tma_atom_c", kernel.c_dtype, x_PN)
    gate, up = blocks_of_32(x_PN)
    if kernel.act_func == "geglu":
        alpha, offset, low, high = map(launch.number, CLAMPED)
        gate, up = gate.clamp(max=high), up.clamp(low, high)
        act = (up + offset) * gate * torch.sigmoid(alpha * gate)
    else:
        assert kernel.act_func == "swiglu"
        act = up * gate * torch.sigmoid(gate)
    write_d(launch, act * prob(launch, len(act)))


def quant(launch):
    """D = prob * alpha A B without a bias, and alpha A B + prob * bias with one."""
    x_PN = product(launch)
    scale = prob(launch, len(x_PN))
    write_d(launch, x_PN + scale * bias(launch) if launch.kernel.enable_bias else x_PN * scale)


def srelu(launch):
    """x = alpha A B + bias, to C; D = prob * max(x, 0)^2."""
    kernel = launch.kernel
    x_PN = product(launch) + bias(launch)
    if kernel.generate_c:
        write(launch, "tma_atom_c", kernel.c_dtype, x_PN)
    write_d(launch, x_PN.relu().square() * prob(launch, len(x_PN)))


def dglu(launch):
    """g = alpha^2 A B. D: the derivative of prob * act(C), times g. dprob += sum of g act(C). C is scaled by beta."""
    kernel = launch.kernel
    g = product(launch, square_alpha=True)
    c_PN = launch.tensor("tma_atom_c", DTYPES[kernel.c_dtype.__name__])[: len(g)].to(torch.float32)
    gate, up = blocks_of_32(c_PN)
    if kernel.act_func == "dgeglu":  # beta is not used here
        alpha, offset, low, high = map(launch.number, CLAMPED)
        if kernel.vectorized_f32:  # compares with bounds in the type of C
            low, high = (torch.tensor(bound, dtype=torch.bfloat16).item() for bound in (low, high))
        gate_passes, up_passes = gate <= high, (up >= low) & (up <= high)
        gate, up = gate.clamp(max=high), up.clamp(low, high) + offset
    else:
        assert kernel.act_func == "dswiglu"
        beta = by_row(launch, "beta")
        gate, up, alpha, gate_passes, up_passes = gate * beta, up * beta, 1.0, True, True
    sigmoid = torch.sigmoid(alpha * gate)
    if kernel.generate_dprob:
        add_dprob(launch, g * up * gate * sigmoid)
    g = g * prob(launch, len(g))
    dgate = g * up * sigmoid * (1 + alpha * gate * (1 - sigmoid)) * gate_passes
    dup = g * gate * sigmoid * up_passes
    halves = dgate.unflatten(-1, (-1, 32)), dup.unflatten(-1, (-1, 32))
    write_d(launch, torch.stack(halves, -2).flatten(-3))


def dsrelu(launch):
    """g = alpha A B. D = g * 2 prob max(C, 0). dprob += sum of g max(C, 0)^2."""
    kernel = launch.kernel
    g = product(launch)
    relu = launch.tensor("tma_atom_c", DTYPES[kernel.c_dtype.__name__])[: len(g)].to(torch.float32).relu()
    if "dprob" in launch:
        add_dprob(launch, relu.square() * g)
    scale = prob(launch, len(g))
    write_d(launch, relu * g * (2 * scale))


def wgrad_helper(launch):
    """Leave descriptors of each expert's scales in the workspace: here, the addresses of the scales and the rows."""
    table = workspace(launch)
    for e, start, end in experts(launch, "offs", 128):
        table[e] = torch.tensor([launch.address("sfa_gemm"), launch.address("sfb_gemm"), start, end])


def wgrad(launch):
    """C[e] = A_e B_e, over the rows of expert e; zeros for an expert without rows; added to C in its type if asked."""
    kernel = launch.kernel
    c_EMN = launch.tensor("tma_atom_c", DTYPES[kernel.c_dtype.__name__])
    a_MP = _major(launch.codes("tma_atom_a")[0], kernel.a_major_mode)
    b_NP = _major(launch.codes("tma_atom_b")[0], kernel.b_major_mode)
    factors = [
        launch.array(f"global_scale_{x}", len(c_EMN), torch.float32) for x in "ab" if f"global_scale_{x}" in launch
    ]
    for e, (sfa, sfb, start, end) in enumerate(workspace(launch).tolist()):
        product = _expert_columns(a_MP, sfa, start, end) @ _expert_columns(b_NP, sfb, start, end).T
        for factor in factors:
            product = product * factor[e]
        product = product.to(c_EMN.dtype)
        c_EMN[e] = c_EMN[e] + product if kernel.accumulate_on_output else product


def workspace(launch):
    """Return the workspace of wgrad, of which the soft kernels use four numbers an expert."""
    experts = launch.kernel.expert_cnt
    return memory(launch.address("workspace_ptr"), 32 * experts).view(torch.int64).view(experts, 4)


def _expert_columns(codes_MP, scales, start, end):
    """Return one expert's values (M, rows). Its scales are tiles in row-major order, after those of earlier experts."""
    rows = 64 if codes_MP.dtype is torch.uint8 else 128  # of a tile of scales
    down, across = round_up(len(codes_MP), 128) // 128, (end - start) // rows
    scale = memory(scales + down * start // rows * TILE, down * across * TILE).view(down, across, TILE)
    return dequantized(codes_MP[:, start:end], untiled(scale))


KERNELS = {"glu": glu, "quant": quant, "srelu": srelu, "dglu": dglu, "dsrelu": dsrelu, "wgrad": wgrad}


def experts(launch, offsets, multiple):
    """Yield (expert, first row, end). The kernels do not check the multiple: here a wrong one is an error."""
    start = 0
    for e, end in enumerate(launch.array(offsets, launch.kernel.expert_cnt, torch.int32).tolist()):
        assert end >= start, f"the {offsets} of the experts decrease"
        assert end % multiple == 0, f"an expert ends at row {end}, which is not a multiple of {multiple}"
        yield e, start, end
        start = end


def _major(codes, mode):
    """Return codes with the summed axis last."""
    return codes if mode == OperandMajorMode.K else codes.mT


def product(launch, square_alpha=False):
    """Return alpha A B in fp32, for the rows of experts: rows after the last expert's are not computed."""
    kernel = launch.kernel
    a_PK = launch.codes("tma_atom_a")
    b_ENK = _major(launch.codes("tma_atom_b"), kernel.b_major_mode)
    assert a_PK.shape[1] == b_ENK.shape[2], "A and B differ in K, which the host code does not notice"
    sfa, sfb = launch.scales("tma_atom_sfa"), launch.scales("tma_atom_sfb")
    a_PK = dequantized(a_PK, untiled(sfa))
    alpha = launch.array("alpha", kernel.expert_cnt, torch.float32)
    parts = []
    for e, start, end in experts(launch, "padded_offsets", ROWS):
        factor = alpha[e] ** 2 if square_alpha else alpha[e]
        parts.append(a_PK[start:end] @ dequantized(b_ENK[e], untiled(sfb[e])).T * factor)
    return torch.cat(parts)


def by_row(launch, name):
    """Return one fp32 number for each expert as a column (P, 1)."""
    values = launch.array(name, launch.kernel.expert_cnt, torch.float32)
    return torch.cat([values[e].expand(end - start, 1) for e, start, end in experts(launch, "padded_offsets", ROWS)])


def bias(launch):
    """Return the bias of each row (P, N), or 0."""
    if "mBias_nl" not in launch:
        return 0.0
    n, count, stride = struct.unpack("iii", launch.one("mBias_nl")[8:20])
    assert stride == n, "the bias is a transposed contiguous tensor (E, N)"
    bias_EN = launch.array("mBias_nl", n * count, DTYPES[launch.kernel.bias_dtype.__name__]).view(count, n)
    rows = [bias_EN[e].expand(end - start, n) for e, start, end in experts(launch, "padded_offsets", ROWS)]
    return torch.cat(rows).to(torch.float32)


def prob(launch, rows):
    """Return the weight of each row (P, 1), or 1."""
    return launch.array("prob", rows, torch.float32)[:, None] if "prob" in launch else 1.0


def add_dprob(launch, values):
    launch.array("dprob", len(values), torch.float32).add_(values.sum(1))


def blocks_of_32(x_PN):
    """Return the gate and the up projection: 32 columns of the one, 32 of the other, and so on."""
    gate, up = x_PN.unflatten(-1, (-1, 2, 32)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def write(launch, name, dtype, values):
    dtype = DTYPES[dtype.__name__]
    launch.tensor(name, dtype)[: len(values)] = values.to(dtype)


def write_d(launch, values):
    """Write D: quantized by rows and by columns from the same fp32 values, or converted."""
    kernel = launch.kernel
    if not kernel.generate_sfd:
        write(launch, "tma_atom_d", kernel.d_dtype, values)
        return
    rows, columns = values.shape
    if not rows:
        return
    codes, scale = quantized(values, norm_const(launch))
    write(launch, "tma_atom_d", kernel.d_dtype, codes)
    size = rows // 128 * round_up(columns, 128) // 128 * TILE
    memory(launch.address("mSFDRow_mnl"), size).copy_(tiled(scale))
    write_columns(launch, values, "tma_atom_d_col", "mSFDCol_mnl")


def write_columns(launch, values, codes_name, scales_name):
    """Write codes of columns, not transposed, and their scales.

    Scales lie as a matrix (columns, blocks of 32 rows) for each expert, at the byte
    round_up(columns, 128) * (first row) / 32.
    """
    kernel = launch.kernel
    codes = launch.tensor(codes_name, torch.float8_e4m3fn)
    total, columns = codes.shape
    out = memory(launch.address(scales_name), round_up(columns, 128) * round_up(total, 128) // 32)
    assert kernel.discrete_col_sfd, "the soft kernels have no scales of all experts as one matrix"
    for _, start, end in experts(launch, "padded_offsets", ROWS):
        if start == end:
            continue
        codes_t, scale = quantized(values[start:end].T, norm_const(launch))
        codes[start:end] = codes_t.T
        at = round_up(columns, 128) * start // 32
        out[at : at + round_up(columns, 128) * (end - start) // 32] = tiled(scale)


def norm_const(launch):
    return launch.array("norm_const_tensor", 1, torch.float32).item()
