"""``fusedmoe bench``: a layer of the user's sizes, ours beside plain torch and the peers that are installed.

`timing` and `peers` serve the benchmarks of the repository too.
"""
