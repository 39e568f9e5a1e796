"""The control words of a region, see control.py. Without the CuTe DSL, for the host."""

MOST_RANKS = 32  # a lane of a warp each
READY, DONE, NUMBER = 0, MOST_RANKS, 2 * MOST_RANKS
TICKETS = NUMBER + 1
CONTROL_WORDS = 128
REPORT = CONTROL_WORDS - 2  # and the next word: an address
CONTROL_BYTES = 4 * CONTROL_WORDS
BEGIN, TELL, END = range(3)  # phases of `Signal`
COPY_WARPS = 8  # per CTA of a kernel that copies rows; `Pull` adds 1 for each to the word of a step
LISTED = COPY_WARPS * 4096  # tokens of other ranks that the warps of a CTA list, at most; see steps.py
SCATTER_WARPS = 16  # per CTA of `Scatter`; each adds 1 to a word when the rows of a rank are written
MOST_SLOTS = 8  # of a token whose values return by kernels
MOST_TIMEOUT_S = 3600  # of an exchange: products that follow it wait longer, see `MOST_READS`
