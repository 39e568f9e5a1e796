"""The fusion rules that only sm_100 and sm_103 (Blackwell) have, one file per fusion. NVIDIA's kernels compute the
products; see `fusedmoe.kernels.sm100`.
"""
