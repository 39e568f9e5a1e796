"""Rules for grouped products on Hopper, in bf16 and in FP8."""
