"""The forward and the backward chain: values, places and steps."""
