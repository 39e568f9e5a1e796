"""Functions inside kernels: warps, FP8 codes, formulas of activations, predicated stores, gathered rows."""
