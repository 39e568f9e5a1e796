"""Which op computes what a model's own gate computes: the gate is tried on numbers, and watched from then on.

`recognise` returns the op and what to watch: the op holds for as long as `state_of` and `functions_of` return what they
did at first. Which function the gate is, and what rows it takes, is said by the file of a framework.
"""

from __future__ import annotations

import copy
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations as class_of

from fusedmoe.ops import GeGLU, Op, ReGLU, SquaredReLU, SwiGLU
from fusedmoe.ops.glu import GLU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class RowLayout(NamedTuple):
    """How the rows lie that a gate takes, and how wide those are that it returns."""

    gated: bool  # a gate and an up for each value that it returns; else one value
    interleaved: bool  # gate and up alternate
    intermediate: int


Path = tuple[str, ...]  # names of submodules, from the module down; () is the module itself


class Watch(NamedTuple):
    """What is to be watched of a module or of one of its submodules."""

    path: Path
    methods: tuple[str, ...]  # of its class: what computes, and what that calls
    settings: tuple[str, ...]  # numbers and texts, and what is not there
    functions: tuple[str, ...]


Watched = tuple[Watch, ...]


class Recognised(NamedTuple):
    """The op that computes what a gate computes, and what it depends on."""

    op: Op
    watched: Watched


def recognise(
    module: nn.Module, gate: Callable[[nn.Module, Tensor], Tensor], method: str, layout: RowLayout
) -> Recognised | None:
    """Return the op that computes what a module's gate computes; None if there is none.

    It is found by trying, in fp64, fp32 and bf16, values and derivatives: the module's function on every pair of a gate
    and an up, from 1e-18 to 1e18, against each op with each of the module's own numbers for ``limit`` and ``alpha``.

    Parameters
    ----------
    module
        The module whose gate it is.
    gate
        What to try: a function of the module, or of a copy of it, and rows (R, 2 * I), or (R, I) where not gated.
    method
        The method of the module that ``gate`` calls, if its class has one.
    layout
        How the rows lie.

    Notes
    -----
    What is tried is a copy of the module that has nothing but numbers, texts and functions, and submodules of such:
    those are to be watched, and what else of its class the gate reads, or looks for and does not find. One that reads
    more, such as a parameter, a buffer or the model's configuration, is not recognised, and none that has a hook is
    tried. What a gate reads otherwise than as an attribute of a module (a variable of its Python module, arguments by
    default, ``vars(self)``, ``type(self)``) is taken at its present value.
    """
    try:
        bare, watched, key = _bare(module, method)
        key = (gate, layout, *key)
        found = _recognised_before.get(key)
        if found is None or not found.holds(module):
            if len(_recognised_before) >= _REMEMBERED:
                _recognised_before.clear()
            with ThreadPoolExecutor(1) as thread:  # where no mode and no hook for saved tensors holds that holds here
                op = thread.submit(_find_op, bare, watched, gate, layout).result()
                if op is not None and not thread.submit(_computed_by, module, op, gate, layout).result():
                    raise _NotRecognisable("its activation is another one than that of a copy")
            read = () if op is None else tuple(_read_besides(module, bare, watched))
            found = _Found(op, read, state_of(module, read), functions_of(module, read))
            _recognised_before[key] = found
    except _NotRecognisable as error:
        logger.info("%s: %s", type(module).__name__, error)
        return None
    return None if found.op is None else Recognised(copy.deepcopy(found.op), (*watched, *found.read))


class _Found(NamedTuple):
    """What became of a trial, and what the gate read besides that all modules with the same key have in common."""

    op: Op | None
    read: Watched
    state: tuple[object, ...]
    functions: tuple[object, ...]

    def holds(self, module: nn.Module) -> bool:
        return state_of(module, self.read) == self.state and functions_of(module, self.read) == self.functions


_recognised_before: dict[object, _Found] = {}
_REMEMBERED = 256


# ---- what a gate reads --------------------------------------------------------------------------------------------


class _NotRecognisable(Exception):  # noqa: N818
    """What keeps a gate from being tried."""


_SETTING = (bool, int, float, str, type(None))
_OF_MODULES = frozenset({*vars(nn.Module()), *vars(nn.Module)})


def _bare(module: nn.Module, method: str) -> tuple[nn.Module, Watched, tuple[object, ...]]:
    """Return a copy of a module with nothing in it that may change unnoticed, what to watch, and all of that as a key:
    two modules with the same key have the same gate.
    """
    bare, watched, key = _bare_part(module, (), method)
    gate = getattr(type(module), method, None)
    if method in vars(module):
        raise _NotRecognisable(f"{method} was set on the module itself")
    if gate is not None:
        _key(gate, module)
    return bare, tuple(watched), (gate, *key)


def _bare_part(module: nn.Module, path: Path, method: str) -> tuple[nn.Module, list[Watch], list[object]]:
    kind = class_of(module)
    try:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a ScriptModule")
        bare: nn.Module = object.__new__(_noting(kind))
        nn.Module.__init__(bare)
        vars(bare)[_READ] = set()
    except Exception as error:
        raise _NotRecognisable(f"{kind.__name__} cannot be copied: {error!r}") from error
    functions: list[str] = []
    key: list[object] = [path, kind]
    of_class = {n: v for c in reversed(kind.__mro__[:-1]) if c is not nn.Module for n, v in vars(c).items()}
    settings = [n for n, v in of_class.items() if n[0] != "_" and isinstance(v, _SETTING) and n not in _OF_MODULES]
    for name, value in vars(module).items():
        if name in _OF_MODULES and name != "forward":
            continue
        if name[0] != "_" and isinstance(value, _SETTING):
            settings.append(name)
            vars(bare)[name] = value
        elif name[0] != "_" and isinstance(value, _FUNCTIONS) and name not in of_class:
            functions.append(name)
            vars(bare)[name] = MethodType(value.__func__, bare) if isinstance(value, MethodType) else value
        elif name in of_class and (path or name != "forward"):  # the module's own forward is not its gate
            raise _NotRecognisable(f"{'.'.join((*path, name))} was set on the module itself")
    settings = list(dict.fromkeys(settings))
    key += [(name, type(value), value) for name in settings for value in [getattr(module, name)]]
    key += [(name, _key(getattr(module, name), module)) for name in functions]
    watched = [Watch(path, (method,), tuple(settings), tuple(functions))]
    if path:
        _key(type(module).forward, module)
        key.append(type(module).forward)
        if _hooked(module):
            raise _NotRecognisable(f"{'.'.join(path)} has a hook")
    for name, part in module._modules.items():
        if part is None or any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
            continue  # a gate that wants it fails without it
        bare_part, its_watched, its_key = _bare_part(part, (*path, name), "forward")
        bare._modules[name] = bare_part
        watched += its_watched
        key += its_key
    return bare, watched, key


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_READ = "_fusedmoe_read"


def _noting(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose instances note the name of each attribute that is read of them, be it there or not."""

    def note(self: nn.Module, name: str) -> object:
        if name[:2] != "__" and name not in _OF_MODULES and name != "parametrizations":  # which `class_of` looks for
            object.__getattribute__(self, "__dict__").get(_READ, set()).add(name)
        return kind.__getattribute__(self, name)

    unseen = type("_Unseen", (), {"__init_subclass__": classmethod(lambda cls, **_: None)})  # by registries of classes
    return type.__new__(type(kind), kind.__name__, (unseen, kind), {"__getattribute__": note})


def _read_besides(module: nn.Module, bare: nn.Module, watched: Watched) -> Iterator[Watch]:
    """Yield what a gate that was tried has read of a copy and is not watched; raise if a copy lacks what is there."""
    for path, methods, settings, functions in watched:
        part, tried = _at(module, path), _at(bare, path)
        assert part is not None
        assert tried is not None
        more_methods, more_settings = [], []
        for name in sorted(vars(tried)[_READ] - {_READ, *methods, *settings, *functions, *tried._modules}):
            of_class = _of_class(part, name)
            function = of_class.__func__ if isinstance(of_class, staticmethod | classmethod) else of_class
            function = function.fget if isinstance(function, property) else function
            its_own = any(name in there for there in (vars(part), part._parameters, part._buffers, part._modules))
            if not its_own and isinstance(function, _FUNCTIONS):
                _key(function, part)
                more_methods.append(name)
            elif not its_own and isinstance(of_class, _SETTING):  # or there is none
                more_settings.append(name)
            else:
                raise _NotRecognisable(f"its activation reads {'.'.join((*path, name))}")
        if more_methods or more_settings:
            yield Watch(path, tuple(more_methods), tuple(more_settings), ())


def _key(function: Any, module: nn.Module) -> object:
    """Return what makes a function what it is, apart from what it is written in; raise if it holds something else."""
    if isinstance(function, functools.partial):
        values = (*function.args, *function.keywords.values())
        if all(isinstance(value, _SETTING) for value in values):
            return _key(function.func, module), function.args, tuple(function.keywords.items())
    elif isinstance(function, MethodType):
        if function.__self__ is module:
            return _key(function.__func__, module)
    elif isinstance(function, FunctionType | BuiltinFunctionType):
        cells = getattr(function, "__closure__", None) or ()
        of = getattr(function, "__self__", None)  # a builtin may be a tensor's method
        if isinstance(of, ModuleType | type | None) and all(isinstance(c.cell_contents, type) for c in cells):
            return function  # with no variables but what super() means
    raise _NotRecognisable(f"{function!r} holds values of its own")


def state_of(module: nn.Module, watched: Watched) -> tuple[object, ...]:
    """Return the settings that are watched, as they are now."""
    found: list[object] = []
    for path, _, names, _ in watched:
        part = _at(module, path)
        found.append(None if part is None else class_of(part))  # peft's parametrizations bring a new one a call
        for name in names:
            value = getattr(part, name, _ABSENT)
            found.append(value if isinstance(value, _SETTING) else _NO_SETTING)
    return tuple(found)


_ABSENT, _NO_SETTING = "\0absent", "\0something else"


def functions_of(module: nn.Module, watched: Watched) -> tuple[object, ...]:
    """Return the functions that are watched, as they are now, and whether somebody hooks into them."""
    found: list[object] = []
    for path, methods, _, names in watched:
        part = _at(module, path)
        if part is not None:
            for method in methods:
                found += [_of_class(part, method), vars(part).get(method)]
        if part is not None and part is not module:
            found += [_hooked(part), tuple(part._modules)]
        for name in names:
            function = getattr(part, name, None)
            found.append(function)
            if isinstance(function, functools.partial):
                found += [function.args, tuple(function.keywords.items())]
    return tuple(found)


def _at(module: nn.Module, path: Path) -> nn.Module | None:
    part: nn.Module | None = module
    for name in path:
        part = None if part is None else part._modules.get(name)
    return part


def _of_class(module: nn.Module, name: str) -> object:
    """Return what a module's class has under a name, as it was written; None for nothing."""
    for kind in type(module).__mro__:
        if name in vars(kind):
            return vars(kind)[name]
    return None


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# ---- trying it ----------------------------------------------------------------------------------------------------


def _find_op(
    bare: nn.Module, watched: Watched, gate: Callable[[nn.Module, Tensor], Tensor], layout: RowLayout
) -> Op | None:
    state = state_of(bare, watched)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        rows = _rows_to_try(layout)
        try:
            answers = [
                _answer(functools.partial(gate, bare.train(training)), rows.to(dtype), layout)
                for dtype in (torch.float64, torch.float32, torch.bfloat16)
                for training in (True, False)
            ]
        except Exception as error:  # noqa: BLE001  (somebody else's function: it may want a GPU, or more than numbers)
            logger.info("%s: tried on a CPU, its activation says %r", type(bare).__name__, error)
            return None
        if state_of(bare, watched) != state:
            logger.info("%s: its activation changes what it reads", type(bare).__name__)
            return None
        of_module = (v for v in state if isinstance(v, int | float) and not isinstance(v, bool))
        numbers = dict.fromkeys(float(v) for v in of_module if v > 0)
        for op in _candidates(layout, list(numbers)):
            if _agree(op, rows[:1], answers[:1], layout) and _agree(op, rows, answers, layout):
                return op
    return None


def _computed_by(module: nn.Module, op: Op, gate: Callable[[nn.Module, Tensor], Tensor], layout: RowLayout) -> bool:
    """Whether a module itself computes what the op does that its copy was taken for."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        rows = _rows_to_try(layout)
        try:
            answer = _answer(functools.partial(gate, module), rows, layout)
        except Exception as error:  # noqa: BLE001  (it may read what is on a GPU)
            logger.info("%s: on a CPU, its activation says %r", type(module).__name__, error)
            return False
        return _agree(op, rows, [answer], layout)


def _rows_to_try(layout: RowLayout) -> Tensor:
    """Return rows of the module's own width, three or more, with every pair of a gate and an up in them; fp64."""
    sizes = torch.cat([torch.logspace(-18, -1, 9), torch.linspace(0.4, 10, 25), torch.logspace(1.1, 18, 15)])
    sizes = sizes.bfloat16().double()  # the same numbers in every dtype
    values = torch.cat([-sizes, torch.tensor([0.0, torch.nan]).double(), sizes])
    pairs = torch.cartesian_prod(values, values) if layout.gated else values[:, None]
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    intermediate = layout.intermediate
    height = max(3, -(-len(pairs) // intermediate))
    pairs = pairs[torch.arange(height * intermediate) % len(pairs)].view(height, intermediate, -1)
    return (pairs if layout.interleaved else pairs.mT).flatten(1)


class _Answer(NamedTuple):
    """What a function gives for rows: ``y``, and the derivative by each half of them; (1 or 2 or 3, *y.shape)."""

    values: Tensor
    tolerance: float
    with_derivatives: bool


def _answer(function: Any, rows: Tensor, layout: RowLayout) -> _Answer:
    x = rows.detach().requires_grad_()
    y = function(x)
    if y.shape != (len(rows), rows.shape[1] // (2 if layout.gated else 1)) or y.dtype is not rows.dtype:
        raise ValueError(f"{tuple(rows.shape)} in {rows.dtype} became {tuple(y.shape)} in {y.dtype}")
    (grad,) = torch.autograd.grad(y.sum(), x)
    values = torch.stack([y.detach(), *_halves(grad, layout)]).double()
    y = values[0][values[0].isfinite()]
    if rows.dtype is torch.bfloat16:
        return _Answer(values, 0.03, with_derivatives=False)  # too coarse to tell them
    # a function that computes in fp32, whatever it is given, comes no closer than that
    exact = rows.dtype is torch.float64 and not y.float().double().equal(y)
    return _Answer(values, 1e-12 if exact else 4e-6, with_derivatives=True)


def _halves(rows: Tensor, layout: RowLayout) -> tuple[Tensor, ...]:
    if not layout.gated:
        return (rows,)
    return (rows[:, ::2], rows[:, 1::2]) if layout.interleaved else rows.chunk(2, dim=-1)


def _agree(op: Op, rows: Tensor, answers: list[_Answer], layout: RowLayout) -> bool:
    """Whether an op gives the same, to the precision of answers for the first so many rows and more."""
    got = _answer(op.compute, rows, layout).values
    inputs = torch.stack(_halves(rows, layout))
    scales, limit = [rows.square(), rows.abs()], None
    if isinstance(op, GLU):
        gate, up = op.clamped(*inputs)
        scales, limit = [gate.abs() * (up.abs() + op.offset), up.abs() + op.offset, gate.abs()], op.limit
    # elsewhere a derivative is either of two, or overflows
    smooth = ((inputs != 0) & (inputs.abs() != limit) & (inputs.abs() < 1e4)).all(0)
    for values, tolerance, with_derivatives in answers:
        want = values[:, : len(rows)]
        same = ((got - want).abs() <= tolerance * torch.stack(scales)) | (got.isnan() & want.isnan())
        same[1:] |= ~smooth
        if not (same if with_derivatives else same[:1]).all():
            return False
    return True


def _candidates(layout: RowLayout, numbers: list[float]) -> Iterator[Op]:
    if not layout.gated:
        yield SquaredReLU()
        return
    for limit in (None, *numbers):
        for offset in (0.0, 1.0):
            shape: dict[str, Any] = {"limit": limit, "offset": offset, "interleaved": layout.interleaved}
            yield from (SwiGLU(alpha=alpha, **shape) for alpha in dict.fromkeys((1.0, 1.702, *numbers)))
            yield from (GeGLU("tanh", **shape), GeGLU("none", **shape), ReGLU(**shape))
