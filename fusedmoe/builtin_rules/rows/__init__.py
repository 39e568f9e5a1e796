"""Rules for kernels without a matrix product. Those that name no architecture are for Hopper and for Blackwell."""
