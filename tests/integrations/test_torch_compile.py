"""torch.compile with fullgraph=True: a chain is one operator, results are those of eager mode bit for bit, and whatever
changes what a chain computes has it traced anew, and nothing else has.
"""

import copy
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)
ROWS = 12
SPLITS = torch.tensor([3, 4, 0, 4])  # an expert without rows, and a row of no expert

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp(**options):
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I, **options), fm.SwiGLU(), fm.GroupedLinear(E, I, H, **options))


def nested():
    torch.manual_seed(0)
    first = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(limit=0.5))
    return fm.Sequential(OrderedDict(first=first, last=fm.Sequential(fm.GroupedLinear(E, I, H, bias=True))))


def with_foreign_modules():
    torch.manual_seed(0)
    layers = fm.GroupedLinear(E, H, H), nn.LayerNorm(H), nn.Dropout(0.5), mlp(), nn.GELU(), fm.GroupedLinear(E, H, H)
    return fm.Sequential(*layers).eval()


class Routed(nn.Module):
    """Rows by expert, experts and back, with a foreign module in the middle; the routing is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.chain = fm.Sequential(fm.Dispatch(), *mlp(), nn.LayerNorm(H), fm.Combine("probs"))

    def forward(self, x, splits):
        index = torch.arange(2 * x.shape[0]).view(-1, 2) % E
        return self.chain(x, expert_index=index, expert_weight=x[:, :2].sigmoid())


class MoE(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.moe = fm.MoE(H, I, E, 2, **options)

    def forward(self, x, splits):
        y, stats = self.moe(x, return_stats=True)
        return y + stats.load_balancing_loss + stats.z_loss


MODULES = {
    "Sequential": mlp,
    "bias": lambda: mlp(bias=True),
    "nested": nested,
    "foreign modules": with_foreign_modules,
    "routed": Routed,
    "MoE": lambda: MoE(shared_intermediate=I, shared_gate=True),
    "MoE, sigmoid": lambda: MoE(score="sigmoid", num_groups=2, top_groups=1, bias=True, activation="geglu"),
    "one op": lambda: fm.GroupedLinear(E, H, I, bias=True),
    "frozen": lambda: frozen(mlp()),
}


def frozen(module):
    module[0].weight.requires_grad_(False)
    return module


def rows(count=ROWS, seed=1):
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def outcome(module, called, x=None, splits=SPLITS, wants=True):
    """The output and every gradient of a weighted sum of it."""
    x = (rows() if x is None else x).clone().requires_grad_(wants)
    module.zero_grad()
    y = called(x, splits=splits)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return {name: t for name, t in found.items() if t is not None}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    assert len(want) > 1
    for name, t in want.items():
        assert t.abs().sum() > 0, f"{name}: zeros would pass"
        assert t.dtype is got[name].dtype
        assert torch.equal(got[name], t), name


def compiled(module, backend="eager"):
    return torch.compile(module, backend=backend, fullgraph=True)


def counted(module):
    """The compiled module, and what counts its graphs."""
    counter = CompileCounterWithBackend("eager")
    return compiled(module, counter), counter


# ---- the same results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), [(name, "aot_eager") for name in MODULES] + [("MoE", "eager")])
def test_compiled_is_eager(name, backend):
    module = MODULES[name]()
    assert_equal(outcome(module, compiled(module, backend)), outcome(module, module))


def test_inductor():
    module = MODULES["bias"]()
    got, want = outcome(module, compiled(module, "inductor")), outcome(module, module)
    assert got.keys() == want.keys()
    for key, t in want.items():
        torch.testing.assert_close(got[key], t)
        assert t.abs().sum() > 0


@pytest.mark.parametrize(("name", "recipe"), [
    ("bias", "fp8_row"), ("bias", "mxfp8"), ("routed", "mxfp8"), ("bias", "fp8_tensor"), ("routed", "fp8_block"),
])  # fmt: skip
def test_recipes(name, recipe):
    module = MODULES[name]()
    with fm.recipe(recipe):
        assert_equal(outcome(module, compiled(module, "aot_eager")), outcome(module, module))


def test_a_recipe_that_rounds_at_random_draws_the_same_numbers():
    module = mlp()
    results = []
    for called in (compiled(module, "aot_eager"), module):
        torch.manual_seed(3)
        with fm.recipe("nvfp4"):
            results.append(outcome(module, called))
    assert results[0].keys() == results[1].keys()
    assert torch.equal(results[0]["y"], results[1]["y"])


@pytest.mark.parametrize(("name", "recipe", "dtype"), [
    ("bias", "bf16", torch.float16), ("routed", "bf16", torch.bfloat16), ("routed", "mxfp8", torch.bfloat16),
])  # fmt: skip
def test_autocast(name, recipe, dtype):
    module = MODULES[name]()
    with torch.autocast("cpu", dtype), fm.recipe(recipe):
        assert_equal(outcome(module, compiled(module, "aot_eager")), outcome(module, module))


def test_autocast_within_the_graph():
    module = mlp()

    def call(x, splits):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x, splits=splits)
        return y.float()

    got = outcome(module, compiled(call, "aot_eager"))
    assert_equal(got, outcome(module, call))
    assert not torch.equal(got["y"], module(rows(), splits=SPLITS))


def test_rows_that_want_no_gradient():
    module = mlp()
    got = outcome(module, compiled(module, "aot_eager"), wants=False)
    assert "x" not in got
    assert_equal(got, outcome(module, module, wants=False))


def test_values_that_an_op_provides():
    op = fm.Dispatch(E)
    index = torch.tensor([[0, 3], [2, 0], [3, 9]])  # the last is a sentinel
    weights = [torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    results = []
    for called, weight in zip((compiled(op, "aot_eager"), op), weights, strict=True):
        y, provided = called(rows(3), expert_index=index, expert_weight=weight)
        provided["probs"].square().sum().backward()
        results.append({"y": y, **provided, "grad": weight.grad})
    assert not results[0]["splits"].requires_grad
    assert_equal(*results)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    module = mlp()
    called, counter = counted(module)
    want = module(rows(), splits=SPLITS).detach()
    for _ in range(2):
        with context():
            y = called(rows(), splits=SPLITS)
        assert torch.equal(y, want)
        assert y.grad_fn is None
        assert called(rows(), splits=SPLITS).requires_grad
    assert counter.frame_count == 2


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, splits):
        return self.second(self.first(x, splits=splits), splits=splits)


@pytest.mark.parametrize("second", ["equal", "other settings", "the same", "shared weight"])
def test_two_in_one_graph(second):
    first = mlp()
    other = {
        "equal": lambda: copy.deepcopy(first),
        "other settings": lambda: fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(limit=0.1), first[2]),
        "the same": lambda: first,
        "shared weight": mlp,
    }[second]()
    if second == "shared weight":
        other[0].weight = first[0].weight
    module = Two(first, other)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    assert_equal(outcome(module, compiled(module, "aot_eager")), outcome(module, module))


def test_one_weight_of_two_layers():
    torch.manual_seed(0)
    module = fm.Sequential(fm.GroupedLinear(E, H, H), fm.SquaredReLU(), fm.GroupedLinear(E, H, H))
    module[2].weight = module[0].weight
    got = outcome(module, compiled(module, "aot_eager"))
    assert_equal(got, outcome(module, module))
    assert got.keys() == {"y", "x", "0.weight"}


def test_parameters_that_come_with_the_call():
    module = mlp(bias=True)
    given = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    composed = mlp(bias=True).without_parameters()

    def call(x, splits):
        return composed.forward_with(given, x, splits=splits)

    got = outcome(module, compiled(call, "aot_eager"))
    want = outcome(module, module)
    got |= {name: t.grad for name, t in given.items()}
    assert_equal(got, want)


def test_hooks_run():
    module = mlp()
    shapes = []
    module[1].register_forward_hook(lambda op, args, y: y * 2)
    module[0].register_forward_pre_hook(lambda op, args: shapes.append(args[0].shape))
    assert_equal(outcome(module, compiled(module, "aot_eager")), outcome(module, module))
    assert len(shapes) == 2


# ---- what is traced anew, and what is not -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Sequential", "MoE", "routed"])
def test_other_numbers_of_rows_take_one_more_graph(name):
    module = MODULES[name]()
    called, counter = counted(module)
    for count in (12, 11, 7, 300, 2, 12, 4096):
        splits = torch.tensor([0, count // 2, 0, count - count // 2])
        assert torch.equal(called(rows(count), splits=splits), module(rows(count), splits=splits))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_another_number_of_rows(backend):
    module = mlp(bias=True)
    called = compiled(module, backend)
    for count in (12, 9, 31):
        splits = torch.tensor([2, count - 5, 0, 2])
        x = rows(count)
        assert_equal(outcome(module, called, x, splits), outcome(module, module, x, splits))


def test_other_splits_take_no_other_graph():
    module = mlp()
    called = compiled(module)
    called(rows(), splits=SPLITS)
    with torch.compiler.set_stance("fail_on_recompile"):
        for splits in ([12, 0, 0, 0], [0, 0, 0, 0], [3, 3, 3, 3]):
            x, splits = rows(seed=splits[0]), torch.tensor(splits)
            assert torch.equal(called(x, splits=splits), module(x, splits=splits))
        with pytest.raises(RuntimeError, match="recompile"):
            called(rows(5), splits=SPLITS)


def test_new_values_of_weights_take_no_other_graph():
    module = mlp()
    called = compiled(module, "aot_eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for recipe in ("mxfp8", "mxfp8", "mxfp8"):
        with fm.recipe(recipe), torch.compiler.set_stance("fail_on_recompile" if losses else "default"):
            assert_equal(got := outcome(module, called), outcome(module, module))
        optimizer.step()
        losses.append(got["y"].sum().item())
    assert len(set(losses)) == 3


def test_no_rows():
    module = mlp(bias=True)
    called = compiled(module, "aot_eager")
    called(rows(), splits=SPLITS)
    for _ in range(2):
        x = rows(0).requires_grad_()
        module.zero_grad()
        y = called(x, splits=torch.zeros(E, dtype=torch.int64))
        assert y.shape == (0, H)
        y.sum().backward()
        assert x.grad.shape == (0, H)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())
    assert_equal(outcome(module, called), outcome(module, module))


def test_training_and_evaluation_have_one_graph_each():
    module = with_foreign_modules()
    called, counter = counted(module)
    for training in (False, True, False, True, False):
        module.train(training)
        torch.manual_seed(0)
        y = called(rows(), splits=SPLITS)
        torch.manual_seed(0)
        assert torch.equal(y, module(rows(), splits=SPLITS))
    assert counter.frame_count == 2


CHANGES = {
    "an attribute": lambda m: setattr(m[1], "limit", 0.05),
    "another op": lambda m: m.__setitem__(1, fm.GeGLU()),
    "one more op": lambda m: m.append(fm.GroupedLinear(E, H, H)),
    "one op less": lambda m: m.__delitem__(2),
    "another foreign module": lambda m: m.append(nn.Tanh()),
    "a recipe of its own": lambda m: setattr(m[0], "recipe", "fp8_row"),
    "no bias": lambda m: setattr(m[2], "bias", None),
    "another weight": lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().flip(0))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_followed(name):
    module = mlp(bias=True)
    called = compiled(module)
    before = outcome(module, called)
    CHANGES[name](module)
    got = outcome(module, called)
    assert_equal(got, outcome(module, module))
    assert not (got["y"].shape == before["y"].shape and torch.equal(got["y"], before["y"]))


def test_freezing_and_thawing():
    module = mlp()
    called = compiled(module, "aot_eager")
    everything = outcome(module, called)
    module[2].weight.requires_grad_(False)
    part = outcome(module, called)
    assert part.keys() == everything.keys() - {"2.weight"}
    assert_equal(part, {name: everything[name] for name in part})
    module[2].weight.requires_grad_(True)
    assert_equal(outcome(module, called), everything)


def test_kernel_options_change_no_result():
    module = mlp()
    called, counter = counted(module)
    for margin in (0, 8, 0, 8):
        module.sm_margin = margin
        assert_equal(outcome(module, called), outcome(module, module))
    assert counter.frame_count == 2


def test_the_settings_of_every_call_hold():
    module = mlp()
    called, counter = counted(module)
    found = {}
    for _ in range(2):
        for recipe in ("bf16", "mxfp8", "fp8_row"):
            with fm.recipe(recipe):
                found[recipe] = outcome(module, called)
                assert_equal(found[recipe], outcome(module, module))
    assert counter.frame_count == 3
    assert not torch.equal(found["bf16"]["y"], found["mxfp8"]["y"])
    assert not torch.equal(found["fp8_row"]["y"], found["mxfp8"]["y"])
    with fm.recipe("mxfp8"), fm.recipe("fp8_row"), torch.compiler.set_stance("fail_on_recompile"):
        assert_equal(outcome(module, called), found["fp8_row"])


class Doubled(FusionRule, name="tests.doubled", direction="forward"):
    """Computes something else than the op, so that its use shows."""

    act: fm.SwiGLU

    def offer(self, ctx):
        return Step(needs=("input",), gives=("output",), launches=0)

    def build(self, ctx, keep):
        return lambda *tensors: lambda x: 2 * self.act.compute(x)


def test_rules_are_followed(monkeypatch):
    module, x = mlp(), rows()
    called = compiled(module)
    with torch.no_grad():
        plain = called(x, splits=SPLITS)
        with fm.register(Doubled):
            doubled = module(x, splits=SPLITS)
            assert torch.equal(called(x, splits=SPLITS), doubled)
            with fm.disabled("tests.*"):
                assert torch.equal(called(x, splits=SPLITS), plain)
            assert torch.equal(called(x, splits=SPLITS), doubled)
        assert torch.equal(called(x, splits=SPLITS), plain)
    assert torch.equal(doubled, 2 * plain)


class Refusing(FusionRule, name="tests.refusing", direction="forward"):
    act: fm.SwiGLU

    def offer(self, ctx):
        fm.require(self.act.limit is not None, "wants a limit")
        return Step(needs=("input",), gives=("output",))


def test_strict_is_followed():
    module, x = mlp(), rows()
    called = compiled(module)
    with fm.register(Refusing), torch.no_grad():
        want = called(x, splits=SPLITS)
        with pytest.raises(Exception, match="wants a limit"), fm.strict():
            called(x, splits=SPLITS)
        assert torch.equal(called(x, splits=SPLITS), want)


# ---- around torch.compile -----------------------------------------------------------------------------------------


def test_a_copy_of_a_compiled_module_is_a_module_of_its_own():
    module = mlp()
    called = compiled(module, "aot_eager")
    want = called(rows(), splits=SPLITS)
    other = copy.deepcopy(called)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert torch.equal(called(rows(), splits=SPLITS), want)
    assert torch.equal(other(rows(), splits=SPLITS), other._orig_mod(rows(), splits=SPLITS))
    assert not torch.equal(other(rows(), splits=SPLITS), want)


def test_compiled_in_place():
    module = mlp()
    want = outcome(module, module)
    module.compile(backend="aot_eager", fullgraph=True)
    assert_equal(outcome(module, module), want)
    assert module.state_dict().keys() == mlp().state_dict().keys()


def test_compiled_twice_and_reset():
    module = mlp()
    called, counter = counted(module)
    want = outcome(module, module)
    assert_equal(outcome(module, compiled(called)), want)
    torch._dynamo.reset()
    assert_equal(outcome(module, called), want)
    assert counter.frame_count >= 1


def test_a_compiled_part_within_a_compiled_module():
    first = mlp()
    first.compile(backend="eager", fullgraph=True)
    module = Two(first, mlp(bias=True))
    assert_equal(outcome(module, compiled(module, "aot_eager")), outcome(module, module))


def test_threads_have_settings_of_their_own():
    module, x = mlp(), rows()
    called = compiled(module)
    want = {}
    for recipe in ("bf16", "mxfp8"):
        with fm.recipe(recipe), torch.no_grad():
            want[recipe] = called(x, splits=SPLITS)
    failed = []

    def work(recipe):
        try:
            with torch.no_grad():
                for _ in range(5):
                    with fm.recipe(recipe):
                        assert torch.equal(called(x, splits=SPLITS), want[recipe])
                with pytest.raises(Exception, match=r"x: expected shape \(rows, 16\)"):
                    called(x[:, :7], splits=SPLITS)
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in ("bf16", "mxfp8", "bf16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not torch.equal(want["bf16"], want["mxfp8"])


@pytest.mark.parametrize(("wrong", "message"), [
    ({"x": torch.zeros(ROWS, 15)}, r"0\.GroupedLinear.*x: expected shape \(rows, 16\), got \(12, 15\)"),
    ({"x": torch.zeros(ROWS, H, dtype=torch.float64)}, r"0\.GroupedLinear.*x: expected torch.float32, the dtype of we"),
    ({"x": torch.zeros(H)}, r"0\.GroupedLinear.*x: expected shape \(rows, 16\), got \(16,\)"),
    ({"splits": torch.tensor([1, 2])}, r"0\.GroupedLinear.*splits: expected shape \(4,\), one count per expert"),
    ({"probs": torch.zeros(ROWS)}, "no op takes the runtime input 'probs'; the inputs that ops take: 'splits'"),
])  # fmt: skip
def test_wrong_arguments_are_named(wrong, message):
    called = compiled(mlp())
    called(rows(), splits=SPLITS)
    given = {"x": rows(), "splits": SPLITS, **wrong}
    with pytest.raises(Exception, match=message):
        called(given.pop("x"), **given)
    with pytest.raises(Exception, match="the runtime input 'splits' is missing, which"):
        called(rows())
    assert torch.equal(called(rows(), splits=SPLITS), mlp()(rows(), splits=SPLITS))


# ---- what is not traced -------------------------------------------------------------------------------------------


def with_main_grad():
    module = mlp()
    module[0].accumulate_into_main_grad = True
    module[0].weight.main_grad = torch.zeros_like(module[0].weight)
    return module


def delayed():
    return fm.recipe(FP8Tensor(delayed=Delayed(history=4)))


def test_a_main_grad_is_added_to_as_in_eager_mode():
    module, other = with_main_grad(), with_main_grad()
    called = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        assert_equal(outcome(module, called), outcome(other, other))
    assert torch.equal(module[0].weight.main_grad, other[0].weight.main_grad)
    assert module[0].weight.main_grad.abs().sum() > 0


def test_delayed_scaling_remembers_as_in_eager_mode():
    module, other = mlp(), mlp()
    called = torch.compile(module, backend="aot_eager")
    with delayed():
        for seed in range(2):
            x = rows(seed=seed) * (seed + 1)
            assert_equal(outcome(module, called, x), outcome(other, other, x))
    assert module.state_dict().keys() > mlp().state_dict().keys()
    for name, t in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], t), name


@pytest.mark.parametrize("what", ["main_grad", "delayed scaling"])
def test_what_changes_state_says_why_it_is_no_full_graph(what):
    module = with_main_grad() if what == "main_grad" else mlp()
    around = fm.recipe("bf16") if what == "main_grad" else delayed()
    why = r"accumulate_into_main_grad, delayed scaling\) is not traced"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why), around:
        compiled(module)(rows(), splits=SPLITS)


ANY_NUMBER_OF_ROWS = """
import torch, fusedmoe as fm

class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = fm.Sequential(
            fm.Dispatch(), fm.GroupedLinear(4, 16, 32), fm.SwiGLU(), fm.GroupedLinear(4, 16, 16), fm.Combine()
        )

    def forward(self, x, index, weight):
        return self.chain(x, expert_index=index, expert_weight=weight)

torch.manual_seed(0)
layer = Routed()
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
for rows, frozen in ((5, False), (9, False), (7, True), (1, True), (0, True)):
    layer.requires_grad_(not frozen)
    x, index, weight = torch.randn(rows, 16), torch.randint(0, 4, (rows, 2)), torch.rand(rows, 2)
    results = []
    for run in (layer, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf, index, weight)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    for got, want in zip(*results):
        assert torch.equal(got, want) and (want.any() or not rows), (rows, frozen)
"""


@pytest.mark.slow
def test_a_plan_first_made_for_any_number_of_rows():
    """In a process of its own: plans of another graph would be there already."""
    done = subprocess.run([sys.executable, "-c", ANY_NUMBER_OF_ROWS], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
