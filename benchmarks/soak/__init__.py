"""``make soak``: repeats every shipped Hopper kernel thousands of times. A kernel that hangs is an error.

`layers` and `direct` run the kernels, `launches` records and repeats their launches, `worker` does so in a process of
its own, `watch` waits for that process, `results` compares with plain PyTorch, and `__main__` prints.
"""
