"""One call, from `Sequential.forward` to a plan: the partition into chains, autograd and `torch.compile`."""
