"""CuTe DSL kernels for Blackwell GPUs, sm_100a and sm_103a."""
