"""CuTe DSL kernels for Hopper GPUs, sm_90a: wgmma, TMA, warp specialisation."""
