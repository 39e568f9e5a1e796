"""``fusedmoe bench``: compare one MoE layer of given sizes with plain torch and the installed peers.

The repository's benchmarks also use `timing`, `peers` and `machine`.
"""
