"""`torch.compile` and `torch.export` of a chain: tracing, operators and their handles."""
