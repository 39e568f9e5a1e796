"""What a type checker knows of calls; `make lint` checks this file, nothing runs it."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import fusedmoe as fm
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.layers.moe import Routing


def calls_of_a_layer(moe: fm.MoE, x: Tensor, flag: bool) -> None:
    assert_type(moe(x), Tensor)
    assert_type(moe(x, return_stats=False), Tensor)
    assert_type(moe(x, return_stats=True), tuple[Tensor, fm.MoEStats])
    assert_type(moe(x, flag), Tensor | tuple[Tensor, fm.MoEStats])
    assert_type(moe.forward(x), Tensor)
    assert_type(moe.forward(x, return_stats=True), tuple[Tensor, fm.MoEStats])
    assert_type(moe.router(x), Routing)
    assert_type(fm.explain(moe, arch="sm_90").plans, tuple[Any, ...])
    assert_type(moe.explain(x, arch=90), Explanation)
    assert_type(moe.explain(x, arch="sm_90"), Explanation)
    moe(x, return_stats="yes")  # type: ignore[call-overload]


def calls_of_a_chain(chain: fm.Sequential, x: Tensor) -> None:
    assert_type(chain(x, splits=torch.tensor([1])), Tensor)
