"""A process in which no call has made the tensors that calls keep, see `fusedmoe.base.lasting`."""

from fusedmoe.base.lasting import unread
from fusedmoe.call.compile import handles
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import launch, one_group
from fusedmoe.kernels.sm100 import calls

KEPT = ((launch, "_tile_counters"), (one_group, "_tables"), (slot_functions, "_no_scales"), (calls, "_ones"))
# a launch that is bound to its arguments keeps such tensors too
BOUND = ((handles, "_chains"), (handles, "_plans"), (handles, "_last_calls"))


def forget_kept_tensors(monkeypatch):
    """Until the end of a test, calls of compiled graphs make these tensors anew."""
    for module, name in (*KEPT, *BOUND):
        monkeypatch.setattr(module, name, {})
    unread.cache_clear()
