"""The section ``fp8``: training under the recipe ``fp8_block`` on Hopper, against fused bf16 and unfused FP8."""
