"""NVIDIA's grouped GEMMs for Blackwell on a CPU: their checks, compiler and host code, with device code in PyTorch.

Needs cudnn-frontend, the CuTe DSL, tvm-ffi and gcc::

    from blackwell.on_cpu import blackwell_on_cpu

    with blackwell_on_cpu() as launches:
        ...  # the classes and wrapper functions of cudnn.gemm.cutedsl.grouped take CPU tensors
    launches[0].kernel.discrete_col_sfd

``on_cpu`` puts stand-ins in place and removes them; ``compiler`` compiles; ``launches`` decodes what would be launched;
``soft_kernels`` (with ``scales``) do what the device would. ``plain_mlp`` is what a whole MLP is compared with.
"""
