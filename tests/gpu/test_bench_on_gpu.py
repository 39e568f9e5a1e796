"""`fusedmoe bench` and the benchmark of the layer on a GPU: every installed candidate is right, timed and measured."""

import pytest
import torch
from kit.hopper import needs_gpu

from fusedmoe.commands.bench.layer import OURS, Sizes, Work
from fusedmoe.commands.bench.measure import FORWARD, INFERENCE, STEP, measure
from fusedmoe.commands.main import main
from fusedmoe.commands.timing import GpuTimer

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler and of peers
]

SIZES = Sizes(hidden=1024, intermediate=512, experts=16, top_k=4, tokens=4096)


def test_every_candidate_is_right_and_measured(device):
    work = Work(SIZES, torch.bfloat16, device)
    rows = measure(work, GpuTimer(device, reps=5, host_reps=3))
    names = {row.name for row in rows}
    assert names == {OURS, "torch grouped_mm", "torch grouped_mm, compiled", "torch loop"}
    for row in rows:
        assert row.ms is not None, f"{row.name}: {row.note}"
        assert 0 < row.quartiles_ms[0] <= row.ms <= row.quartiles_ms[1]
        assert 0 < row.error < 0.03
        assert row.peak_bytes > 0
        assert (row.kept_bytes is None) == (row.case != FORWARD)
    ours = {row.case: row for row in rows if row.name == OURS}
    kept = {row.name: row.kept_bytes for row in rows if row.case == FORWARD and row.ms is not None}
    assert kept[OURS] < kept["torch grouped_mm"], "less is kept than eager autograd keeps"
    assert ours[INFERENCE].peak_bytes < ours[FORWARD].peak_bytes
    tokens = SIZES.tokens * SIZES.hidden * 2
    assert ours[STEP].peak_bytes > tokens, "the gradient of the tokens at least"


def test_more_tokens_than_memory_end_in_an_error(capsys):
    sizes = ["--hidden", "8192", "--intermediate", "8192", "--experts", "8", "--top-k", "8", "--tokens", str(1 << 28)]
    with pytest.raises(SystemExit):
        main(["bench", *sizes, "--reps", "1"])
    assert "such as fewer --tokens" in capsys.readouterr().err
