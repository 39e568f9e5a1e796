"""The bytes that a call keeps for its backward pass, compared with those that `explain()` says."""

import torch

import fusedmoe as fm
from fusedmoe.ops.op import Op
from kit.toy import only_plan


def rows(*shape, requires_grad=True):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=requires_grad)


def experts(num_groups=4, hidden=32, intermediate=32):
    up = fm.GroupedLinear(num_groups, hidden, 2 * intermediate)
    return fm.Sequential(up, fm.SwiGLU(), fm.GroupedLinear(num_groups, intermediate, hidden)).bfloat16()


def splits(num_groups, num_rows):
    """Uneven ones, that leave two rows to nobody where there are as many."""
    expert = torch.randint(0, num_groups, (max(num_rows - 2, 0),))
    return torch.bincount(expert, minlength=num_groups)


def storages(tensors):
    found = [t.untyped_storage() for t in tensors if t is not None]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


def quantized_weights(module):
    states = [m._of_process for m in module.modules() if isinstance(m, Op)]
    entries = [state.quantized_weight for state in states if state.quantized_weight is not None]
    return [t for entry in entries for form in entry.forms.values() for t in form.tensors()]


def saved_bytes(chain, x, **named):
    """The bytes of what autograd keeps of a call, each storage once: parameters and quantized weights apart."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = chain(x, **named)
    assert y.grad_fn is not None
    elsewhere = storages([*chain.parameters(), *quantized_weights(chain)])
    return sum(nbytes for at, nbytes in storages(saved).items() if at not in elsewhere)


def check_bytes(chain, x, **named):
    plan = only_plan(chain, x, **named)
    assert plan.kept_bytes == saved_bytes(chain, x, **named)
    assert plan.weight_bytes == fm.weight_cache_bytes(chain)
    return plan
