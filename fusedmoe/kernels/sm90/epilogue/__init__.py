"""The epilogues of the grouped products: outputs in bf16 and in FP8."""
