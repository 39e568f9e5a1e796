"""Weights are quantized once, and again as soon as they may have changed: never is a stale one multiplied."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I = 3, 64, 32  # noqa: E741
SPLITS = torch.tensor([12, 0, 16])


@pytest.fixture(autouse=True)
def mxfp8():
    with fm.recipe("mxfp8"):
        yield


@pytest.fixture(autouse=True, params=["own", "passed", "transposed"])
def kind(request):
    """How a layer gets its weight: its own, or from the caller, as it is stored or as a view."""
    _kind[:] = [request.param]
    return request.param


_kind = ["own"]
ONLY_OWN = pytest.mark.parametrize("kind", ["own"], indirect=True)
ONLY_PASSED = pytest.mark.parametrize("kind", ["passed", "transposed"], indirect=True)


class Passed(nn.Module):
    """As integrations do it: the ops are no submodule, and each call passes them the parameters."""

    def __init__(self, transposed, **options):
        super().__init__()
        chain = fm.Sequential(fm.GroupedLinear(E, H, I, **options))
        weight, self.bias = chain[0].weight.detach(), chain[0].bias
        self.weight = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        self.__dict__.update(_ops=("more", chain.without_parameters()), transposed=transposed)

    def forward(self, x, splits):
        weight = self.weight.mT if self.transposed else self.weight
        return self._ops[1].forward_with({"0.weight": weight, "0.bias": self.bias}, x, splits=splits)


def layer(**options):
    (kind,) = _kind
    return fm.GroupedLinear(E, H, I, **options) if kind == "own" else Passed(kind == "transposed", **options)


def entry_of(fc):
    return (fc._ops[1][0] if isinstance(fc, Passed) else fc)._of_process.quantized_weight


def rows(dtype=torch.float32, requires_grad=True):
    return torch.randn(30, H, dtype=dtype, requires_grad=requires_grad)


def results(module, x):
    """The output, and the gradients of rows and weight, of a call; what gradients there are is left alone."""
    y = module(x, splits=SPLITS)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y, wanted, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))]


def assert_as_fresh(module, x):
    fresh = copy.deepcopy(module)
    assert fm.weight_cache_bytes(fresh) == 0
    for got, want in zip(results(module, x), results(fresh, x), strict=True):
        assert want.any()
        assert torch.equal(got, want)


def train(module, x, micro_batches=1):
    for _ in range(micro_batches):
        y = module(x, splits=SPLITS)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()


BOTH = 2  # by rows for the output, by columns for the data gradient


# ---- kept ---------------------------------------------------------------------------------------------------------


def test_once_over_micro_batches(count):
    fc, x = layer(), rows()
    train(fc, x, micro_batches=4)
    assert count() == BOTH
    fc.zero_grad(set_to_none=False)  # perhaps after an update that torch does not count
    train(fc, x, micro_batches=4)
    assert count() == BOTH
    train(fc, x, micro_batches=2)
    assert count() == 0
    assert_as_fresh(fc, x)


@ONLY_OWN
def test_once_where_forward_passes_run_ahead_or_are_recomputed(count):
    fc, x = layer(), rows()
    outputs = [fc(x, splits=SPLITS) for _ in range(3)]
    for y in outputs:
        y.sum().backward()
    fc(x, splits=SPLITS).sum().backward()
    assert count() == BOTH
    fc, x = layer(), rows()
    for _ in range(2):
        checkpoint(fc, x, splits=SPLITS, use_reentrant=False).sum().backward()
    assert count() == BOTH


def test_once_for_a_parameter_of_two_layers_each(kind, count):
    first, second, x = layer(), layer(), rows()
    second.weight = first.weight
    for _ in range(4):
        (first(x, splits=SPLITS) + second(x, splits=SPLITS)).sum().backward()
    # and once more after the first pass, where autograd has added the second gradient to the first in place; the sum of
    # a transposed weight is copied. After codes that no call used, the next codes of a passed weight are not kept
    assert count() == {"own": 2, "passed": 3, "transposed": 1}[kind] * 2 * BOTH
    first.weight.data.mul_(2)
    first.weight.grad = None
    for fc in (first, second):
        assert_as_fresh(fc, x)


@ONLY_OWN
def test_once_where_gradients_go_elsewhere_and_autograds_is_dropped(count):
    """As Megatron-LM does after each micro-batch."""
    fc, x = layer(accumulate_into_main_grad=True), rows()
    fc.weight.main_grad = torch.zeros(E, I, H)
    fc.weight.grad_added_to_main_grad = False
    for _ in range(3):
        train(fc, x)
        assert fc.weight.grad is not None
        fc.weight.grad = None
    assert count() == BOTH
    assert fc.weight.main_grad.any()
    in_place(fc)
    train(fc, x)
    assert count() == BOTH


# ---- quantized again ------------------------------------------------------------------------------------------------


def in_place(fc):
    with torch.no_grad():
        fc.weight.mul_(1.5)


class ThroughData(torch.optim.Optimizer):
    """Writes where torch does not count."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


def stepped(optimizer, set_to_none=True, **options):
    def change(fc):
        step = optimizer(fc.parameters(), lr=0.1, **options)
        step.step()
        step.zero_grad(set_to_none=set_to_none)

    return change


def by_hand(drop):
    """A loop without an optimizer writes through data."""

    def change(fc):
        fc.weight.data.add_(fc.weight.grad, alpha=-0.1)
        drop(fc)

    return change


def same_count(fc):
    """A new parameter over the same memory counts its versions from zero, and reaches the count of the one before."""
    count, fc.weight = fc.weight._version, nn.Parameter(fc.weight.data)
    with torch.no_grad():
        for _ in range(count):
            fc.weight.add_(0.5)
    fc.weight.data.add_(0.5)


def new_weight(fc):
    fc.weight = nn.Parameter(torch.randn_like(fc.weight))


def freed(fc):
    """Offloaded and gathered: another weight, perhaps at the old address."""
    shape = fc.weight.shape
    fc.weight.data = torch.empty(0)
    fc.weight.data = torch.randn(shape)


def cast(fc, swap=False):
    """To another dtype and back; torch may swap the parameters' tensors for it."""
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        fc.to(torch.bfloat16).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = {
    "SGD foreach": stepped(torch.optim.SGD, foreach=True),
    "AdamW fused": stepped(torch.optim.AdamW, fused=True),
    "optimizer through data": stepped(ThroughData),
    "optimizer through data, grad kept": lambda fc: ThroughData(fc.parameters()).step(),
    "optimizer through data, grad zeroed": stepped(ThroughData, set_to_none=False),
    "by hand": by_hand(lambda fc: setattr(fc.weight, "grad", None)),
    "by hand, zero_": by_hand(lambda fc: fc.weight.grad.zero_()),
    "by hand, zero_grad": by_hand(lambda fc: fc.zero_grad(set_to_none=False)),
    "by hand, clipped": by_hand(lambda fc: torch.nn.utils.clip_grad_norm_(fc.parameters(), 1e-3)),
    "in place": in_place,
    "state_dict copied": lambda fc: fc.load_state_dict({"weight": torch.randn_like(fc.weight)}),
    "state_dict assigned": lambda fc: fc.load_state_dict({"weight": torch.randn_like(fc.weight)}, assign=True),
    "attribute": new_weight,
    "parameter over the same memory": same_count,
    "memory freed": freed,
    "cast": cast,
    "cast by swapping": lambda fc: cast(fc, swap=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_again_after_a_change(change, count):
    for micro_batches in (1, 2):
        fc, x = layer(), rows()
        for first in (True, False):
            train(fc, x, micro_batches)
            assert count() == BOTH or not first
            before = fc.weight.detach().clone()
            CHANGES[change](fc)
            assert not (first and torch.equal(before, fc.weight))
            with torch.no_grad():
                assert torch.equal(fc(x, splits=SPLITS), copy.deepcopy(fc)(x, splits=SPLITS))
            count()
        fm.clear_weight_cache(fc)
    assert_as_fresh(fc, x)
    assert count() == 2 * BOTH


def test_again_where_a_loop_by_hand_takes_gradients_that_autograd_returns():
    """The gradient of an earlier backward pass is still there, and nothing is added to it."""
    fc, x = layer(), rows()
    train(fc, x)
    for _ in range(3):
        (grad,) = torch.autograd.grad(fc(x, splits=SPLITS).square().sum(), fc.weight)
        fc.weight.data.sub_(0.01 * grad)
        with torch.no_grad():
            assert torch.equal(fc(x, splits=SPLITS), copy.deepcopy(fc)(x, splits=SPLITS))


@ONLY_OWN
def test_again_where_a_weight_with_gaps_is_updated_by_hand():
    """Autograd takes a first gradient of such a weight as it is."""
    fc, x = layer(), rows()
    fc.weight = nn.Parameter(torch.randn(E, I, H + 32)[..., :H])
    fc(x, splits=SPLITS).square().sum().backward()
    fc.weight.data.sub_(fc.weight.grad)  # torch does not count this write
    fc.weight.grad.zero_()
    assert_as_fresh(fc, x)


def test_again_where_the_gradient_is_dropped_in_the_backward_pass(count):
    """An optimizer that steps as soon as a gradient is there, so that none is kept."""

    def step(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    fc, x = layer(), rows()
    fc.weight.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        train(fc, x)
        assert count() == BOTH
    assert_as_fresh(fc, x)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_results_are_right_through_a_life_of_changes(debug, monkeypatch):
    """Compared with a layer that was never called before; no change that torch counts is an error in debugging."""
    monkeypatch.setenv("FUSEDMOE_DEBUG", debug)
    changes = [change for name, change in CHANGES.items() if debug == "0" or "by hand" not in name]
    fc, x = layer(), rows()
    generator = torch.Generator().manual_seed(3 + len(changes))
    for _ in range(16):
        train(fc, x, micro_batches=1 + int(torch.randint(2, (), generator=generator)))
        changes[int(torch.randint(len(changes), (), generator=generator))](fc)
        assert_as_fresh(fc, x)


def test_other_weights_of_a_functional_call_are_never_mixed_up():
    fc, swapped, x = layer(), layer(), rows()
    results(fc, x)
    for form in (lambda w: w, torch.Tensor.detach, lambda w: w * 1.0, lambda w: w):
        weight = form(swapped.weight)
        y = torch.func.functional_call(fc, {"weight": weight}, (x,), {"splits": SPLITS})
        assert torch.equal(y, copy.deepcopy(swapped)(x, splits=SPLITS))
        assert_as_fresh(fc, x)
        in_place(swapped)


def test_again_under_another_recipe(count):
    fc, x = layer(), rows()
    results(fc, x)
    for recipe in ("fp8_row", "mxfp8", "bf16"):
        with fm.recipe(recipe):
            assert_as_fresh(fc, x)
    assert count() == (1 + 2 * 2) * BOTH


def test_weights_cast_by_autocast_are_kept_for_the_parameter(count):
    fc, x = layer(), rows()
    with torch.autocast("cpu", torch.bfloat16):
        train(fc, x, micro_batches=3)
        assert count() == BOTH
        in_place(fc)
        train(fc, x)
        assert count() == BOTH
    with torch.autocast("cpu", torch.float16):
        train(fc, x)
    assert count() == BOTH
    assert_as_fresh(fc, x)


@pytest.mark.parametrize(
    ("mode", "kind"), [(torch.no_grad, "passed"), (torch.inference_mode, "own")], indirect=["kind"]
)
def test_inference_keeps_the_form_that_it_reads_and_training_both(mode, count):
    fc, x = layer(), rows()
    one, two = [
        sum(fm.quantize(fc.weight.detach(), fm.Quantize(weight="mxfp8").weight_quantizer, a).nbytes for a in axes)
        for axes in ((-1,), (-1, -2))
    ]
    with mode():
        for _ in range(2):
            fc(x, splits=SPLITS)
    assert count() == 1
    assert fm.weight_cache_bytes(fc) == one
    train(fc, x)
    assert count() == BOTH
    assert fm.weight_cache_bytes(fc) == two
    with mode():
        fc(x, splits=SPLITS)
    assert count() == 0  # the form by rows is there
    assert fm.weight_cache_bytes(fc) == two
    assert_as_fresh(fc, x)


@ONLY_OWN
def test_weights_quantized_in_inference_mode_serve_training(count):
    fc = layer()
    x = rows(requires_grad=False)  # whose gradient nobody wants: no columns
    with torch.inference_mode():
        fc(x, splits=SPLITS)
    fc(x, splits=SPLITS).sum().backward()
    assert fc.weight.grad.any()
    assert count() == 1


def test_a_frozen_weight_stays_quantized(count):
    fc, x = layer().requires_grad_(False), rows()
    for _ in range(3):
        fc(x, splits=SPLITS).sum().backward()
    assert count() == BOTH
    in_place(fc)
    fc(x, splits=SPLITS).sum().backward()
    assert count() == BOTH


def test_bytes_are_those_of_the_forms_kept():
    """Once for ops in several chains, as the experts of transformers after `patch_routers`."""
    fc, x = layer(), rows()
    assert fm.weight_cache_bytes(fc) == 0
    fc(x, splits=SPLITS)
    one = 2 * E * (H * I + H * I // 32)  # two forms: a byte for each element, and one for 32 of them
    assert fm.weight_cache_bytes(fc) == one
    other = fm.GroupedLinear(E, I, H)
    model = nn.Sequential(fc, nn.Identity(), other)
    if isinstance(fc, Passed):
        model[1].__dict__["again"] = fm.Sequential(fc._ops[1][0])
    other(torch.randn(30, I), splits=SPLITS)
    assert fm.weight_cache_bytes(model) == one + fm.weight_cache_bytes(other) > one
    fm.clear_weight_cache(model)
    assert fm.weight_cache_bytes(fc) == fm.weight_cache_bytes(other) == 0


def double_in_numpy(weight):
    array = weight.detach().numpy()
    array *= 2


@pytest.mark.parametrize("write", [double_in_numpy, lambda w: w.data.copy_(w.data.flip(0))], ids=["numpy", "swap"])
def test_debugging_finds_writes_that_torch_does_not_count(write, monkeypatch, count):
    fc, x = layer(bias=True), rows()
    train(fc, x)  # kept before debugging
    count()
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    train(fc, x, micro_batches=2)
    assert count() == BOTH  # once more, to be compared from then on
    write(fc.weight)
    for _ in range(2):
        with pytest.raises(fm.InputError, match=r"weight: changed .*fm\.clear_weight_cache"):
            fc(x, splits=SPLITS)
    assert count() == 0
    fm.clear_weight_cache(fc)
    assert_as_fresh(fc, x)


@ONLY_OWN
def test_the_error_says_which_of_many_layers_it_is(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    model, x = nn.Sequential(*(fm.MoE(32, 32, 4, 2) for _ in range(3))), torch.randn(5, 32)
    model(x)
    model[1].experts.down.weight.data.mul_(2)
    named = r"experts\.down\.GroupedLinear\(num_groups=4, .*weight: changed"
    with pytest.raises(fm.InputError, match=f"^{named}"):
        model(x)
    fm.explain(model)
    with pytest.raises(fm.InputError, match=rf"^1\.{named}"):
        model(x)


def test_copies_take_nothing_along():
    fc, x = layer(), rows()
    train(fc, x)
    buffer = io.BytesIO()
    torch.save(fc, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fc), pickle.loads(pickle.dumps(fc)), torch.load(buffer, weights_only=False)):
        assert fm.weight_cache_bytes(other) == 0
        train(other, x)
        in_place(other)
        assert_as_fresh(other, x)
    assert fm.weight_cache_bytes(fc) > 0
    assert_as_fresh(fc, x)


def test_no_memory_is_held():
    """Neither of the parameter, nor of its gradient, nor of a layer that is gone."""
    fc, x = layer(), rows()
    train(fc, x, micro_batches=2)
    gone = [weakref.ref(fc.weight), weakref.ref(fc.weight.grad)]
    new_weight(fc)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    train(fc, x)
    data = weakref.ref(entry_of(fc).forms[-1].data)
    if not isinstance(fc, Passed):  # FSDP2 sets a parameter twice a step
        fc.weight = fc.weight
        gc.collect()
        assert data() is None
        assert fm.weight_cache_bytes(fc) == 0
        train(fc, x)
    gone = [weakref.ref(fc), weakref.ref(entry_of(fc).forms[-2].data)]
    del fc
    gc.collect()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---- weights that a call passes -----------------------------------------------------------------------------------


class Scaled(nn.Parameter):
    """As frameworks mark parameters."""


OTHERS = {
    "detached": lambda p: p.detach(),
    "subclass": lambda p: Scaled(p.detach()),
    "view of a computed tensor": lambda p: (p.mT * 1.0).mT,
    "part of a parameter": lambda p: nn.Parameter(torch.cat([p.detach(), p.detach()]))[E:],
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["passed"], indirect=True)
def test_no_other_tensor_is_kept(other):
    fc, x = layer(), rows()
    want = fc(x, splits=SPLITS)
    for kept_before in (True, False):
        assert (fm.weight_cache_bytes(fc) > 0) is kept_before
        for factor in (1, 2):
            weight = OTHERS[other](fc.weight)
            weight.data.mul_(factor)
            assert torch.equal(fc._ops[1].forward_with({"0.weight": weight}, x, splits=SPLITS), factor * want)
            assert fm.weight_cache_bytes(fc) == 0
            fc.weight.data.div_(factor if weight.data_ptr() == fc.weight.data_ptr() else 1)
        fm.clear_weight_cache(fc)  # otherwise, nothing would be kept after codes that no call used


@ONLY_OWN
def test_explain_of_added_gradients_without_a_weight():
    weight = nn.Parameter(torch.randn(E, I, H))
    chain = fm.Sequential(fm.GroupedLinear(E, H, I, accumulate_into_main_grad=True)).without_parameters()
    (plan,) = chain.explain_with({"0.weight": weight}, torch.randn(28, H), splits=SPLITS).plans
    assert any("WgradIntoMainGrad" in op for step in plan.steps for op in step.ops)


@ONLY_PASSED
def test_codes_that_no_call_uses_are_not_kept_the_next_time(count):
    fc, x = layer(), rows()
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)

    def step(micro_batches):
        train(fc, x, micro_batches)
        found = count(), fm.weight_cache_bytes(fc) > 0
        optimizer.step()
        optimizer.zero_grad()
        return found

    assert step(1) == (BOTH, True)  # the first codes are kept: a later call may use them
    assert step(1) == (BOTH, False)
    assert step(1) == (BOTH, False)
    assert step(3) == (2 * BOTH, True)  # kept as of the second micro-batch
    assert step(3) == (BOTH, True)
    assert step(1) == (BOTH, True)
    assert step(1) == (BOTH, False)
    assert_as_fresh(fc, x)


@ONLY_OWN
def test_again_with_other_strides_in_the_same_memory():
    """Neither address nor version shows it."""
    fc, x = fm.GroupedLinear(E, H, H), rows(requires_grad=False)
    before = fc(x, splits=SPLITS)
    fc.weight.data = fc.weight.data.mT
    assert not torch.allclose(fc(x, splits=SPLITS), before, atol=0.1)


def test_delayed_scaling_counts_a_weight_once_per_quantization(count):
    fc, x = layer(), rows()
    op = fc._ops[1][0] if isinstance(fc, Passed) else fc
    with fm.recipe(FP8Tensor(delayed=Delayed(history=8))):
        for step in range(4):
            train(fc, x, micro_batches=3)
            # also the very first, whose scale does not come from the weight, and which is not kept
            assert (op.amax_history.weight.amax != 0).any(1).sum() == 2 + step
            assert count() == (2 * BOTH if step == 0 else BOTH)
            in_place(fc)


@ONLY_OWN
def test_weights_of_an_op_that_a_chain_has_twice_are_not_mixed_up():
    op = fm.GroupedLinear(E, H, H)
    chain = fm.Sequential(op, op).without_parameters()
    x, first, second = torch.randn(28, H), *(nn.Parameter(torch.randn(E, H, H)) for _ in range(2))

    def run(one, other):
        return chain.forward_with({"0.weight": one, "1.weight": other}, x, splits=SPLITS)

    expected = fm.Sequential(fm.GroupedLinear(E, H, H), fm.GroupedLinear(E, H, H)).without_parameters()
    for one, other in ((first, second), (first, second), (second, first), (first, first), (first, second)):
        want = expected.forward_with({"0.weight": one, "1.weight": other}, x, splits=SPLITS)
        assert torch.equal(run(one, other), want)
