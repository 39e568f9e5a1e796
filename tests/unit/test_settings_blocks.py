"""However a block ends, its settings end with it: interrupted at any instruction, out of order, in another thread."""

import contextlib
import gc
import os
import sys
import threading

import pytest

import fusedmoe as fm
from fusedmoe.call import settings

DEFAULT = settings.Settings()
PACKAGE = os.path.dirname(fm.__file__)


def interrupted(function, at):
    """Run a function, with Ctrl-C before its n-th instruction. Instructions of the functions that it calls count.

    Return the KeyboardInterrupt, whose traceback keeps every frame alive; None if there are fewer instructions.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        file = frame.f_code.co_filename
        if "site-packages" in file and not file.startswith(PACKAGE):  # a callback, whose error Python would only report
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces them only if asked before settrace
    gc.disable()  # finalizers of other tests, whose error Python would only report too
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
        gc.enable()
    return None


def one_block():
    with fm.recipe("mxfp8") as recipe:
        assert recipe.name == "mxfp8"


def nested_blocks():
    with fm.recipe("mxfp8"), fm.strict():
        pass


@fm.recipe("mxfp8")
def a_decorated_function():
    assert settings.current().recipe.name == "mxfp8"


def a_block_in_a_generator():
    def generator():
        with fm.recipe("mxfp8"):
            yield

    for _ in generator():
        pass


@pytest.mark.parametrize(
    "function",
    [one_block, nested_blocks, a_decorated_function, a_block_in_a_generator],
    ids=lambda f: f.__name__,
)
def test_an_interrupt_at_any_instruction_leaves_no_setting(function):
    function()  # what is computed once is not what is tested
    with contextlib.nullcontext() if function is nested_blocks else fm.disabled("outer.*"):
        before, key = settings.current(), settings.thread.key
        for at in range(1, 100_000):
            error = interrupted(function, at)
            assert settings.current() == before, f"after an interrupt at instruction {at}"
            assert settings.thread.key == key, f"after an interrupt at instruction {at}"
            if error is None:
                break
    assert at > 100
    assert settings.current() == DEFAULT
    assert settings.thread.key == ""


def test_blocks_that_end_in_the_order_in_which_they_began():
    a, b = fm.recipe("mxfp8"), fm.disabled("b.*")
    a.__enter__()
    b.__enter__()
    assert (settings.current().recipe.name, settings.current().disabled) == ("mxfp8", ("b.*",))
    a.__exit__(None, None, None)
    assert (settings.current().recipe.name, settings.current().disabled) == ("bf16", ("b.*",))
    b.__exit__(None, None, None)
    assert settings.current() == DEFAULT
    assert settings.thread.key == ""


def held(*blocks):
    """A generator that is within these blocks while it is not closed."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


def test_the_inner_settings_stay_when_an_outer_generator_is_closed():
    a, b, c = held(fm.recipe("mxfp8")), held(fm.disabled("b")), held(fm.disabled("c"), fm.strict())
    for generator in (a, b, c):
        next(generator)
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("mxfp8", ("b", "c"), True)
    b.close()
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("mxfp8", ("c",), True)
    assert settings.current() is now  # no new object for each call: a call compares them
    a.close()
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("bf16", ("c",), True)
    with fm.disabled("d"):
        c.close()
        assert settings.current() == settings.Settings(disabled=("d",))
    assert settings.current() == DEFAULT
    assert settings.thread.key == ""


def test_a_generator_that_is_closed_in_another_thread():
    generator = held(fm.recipe("mxfp8"))
    next(generator)
    assert settings.current().recipe.name == "mxfp8"
    seen = []

    def close():
        generator.close()
        seen.append((settings.current(), settings.thread.key))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert seen == [(DEFAULT, "")]
    assert settings.current() == DEFAULT


def test_a_block_may_be_entered_again_and_within_itself():
    block = fm.disabled("a")
    for _ in range(2):
        with block:
            assert settings.current().disabled == ("a",)
            with block:
                assert settings.current().disabled == ("a", "a")
            assert settings.current().disabled == ("a",)
    block.__enter__()
    with pytest.raises(RuntimeError, match="already entered"):
        block.__enter__()
    block.__exit__(None, None, None)
    assert settings.current() == DEFAULT


def yields():
    yield settings.current().recipe.name


async def awaits():
    return settings.current().recipe.name


async def yields_and_awaits():
    yield settings.current().recipe.name


@pytest.mark.parametrize("function", [yields, awaits, yields_and_awaits])
def test_a_decorated_generator_or_coroutine_is_refused(function):
    """Its body ran after the block had ended, under no recipe, without a word."""
    for block in (fm.recipe("mxfp8"), fm.strict(), fm.disabled("*")):
        with pytest.raises(fm.InputError, match=rf"function: expected .*{function.__name__}"):
            block(function)
