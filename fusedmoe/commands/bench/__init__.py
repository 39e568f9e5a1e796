"""``fusedmoe bench``: compare one MoE layer of given sizes with plain torch; `benchmarks` adds other libraries."""
