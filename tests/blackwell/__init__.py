"""NVIDIA's grouped GEMMs for Blackwell on a CPU: their checks, compiler and host code, with device code in PyTorch.

Needs cudnn-frontend, the CuTe DSL, tvm-ffi and gcc. ``on_cpu`` puts stand-ins in place and removes them; ``compiler``
compiles; ``launches`` decodes what would be launched; ``soft_kernels`` (with ``scales``) do what the device would.
"""
