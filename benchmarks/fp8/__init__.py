"""The section ``fp8``: training under ``fp8_block`` and ``fp8_tensor`` on Hopper, against bf16 and unfused FP8."""
