"""NVIDIA's grouped GEMMs for Blackwell on a CPU: their checks, compiler and host code, with device code in PyTorch.

``from blackwell.on_cpu import blackwell_on_cpu`` needs cudnn-frontend, the CuTe DSL, tvm-ffi and gcc.
"""
