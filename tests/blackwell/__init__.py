"""NVIDIA's grouped GEMMs for Blackwell on a CPU: their checks, compiler and host code, with device code in PyTorch.

Needs cudnn-frontend, the CuTe DSL, tvm-ffi and gcc::

    from blackwell.on_cpu import blackwell_on_cpu

    with blackwell_on_cpu() as launches:
        ...  # the classes and wrapper functions of cudnn.gemm.cutedsl.grouped take CPU tensors
    launches[0].kernel.discrete_col_sfd

``on_cpu`` puts stand-ins in place and removes them; ``compiler`` and ``host`` compile and run host code; ``launches``
decodes what would be launched; ``soft_kernels`` (with ``scales``) do what the device would. ``calls`` is one call of
each kernel, ``expert_mlp`` a whole MLP.
"""
