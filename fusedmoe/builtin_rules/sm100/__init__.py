"""The fusion rules for sm_100 and sm_103 (Blackwell), one file per fusion. NVIDIA's kernels compute the products; see
`fusedmoe.kernels.sm100`. `rows` has the rules whose kernels are those for Hopper.
"""
