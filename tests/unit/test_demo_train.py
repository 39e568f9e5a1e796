"""Training in pieces is training in one piece, bit for bit; what goes wrong on the way leaves the last checkpoint."""

import errno
import io
import os
import re
import signal

import pytest
import torch
from rich.console import Console

from fusedmoe.commands.demo import checkpoint, files, train
from fusedmoe.commands.demo import run as demo_run
from fusedmoe.commands.demo.data import Split, load_split
from fusedmoe.commands.demo.errors import DemoError, InterruptedRunError, UsageError
from fusedmoe.commands.demo.history import History
from fusedmoe.commands.demo.options import Call, Job, job_of
from fusedmoe.commands.demo.progress import Bar, Lines, load_bars, progress_on

TINY = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "intermediate": 16,
    "context": 16,
    "batch": 4,
    "steps": 6,
    "device": "cpu",
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _little_text():
    whole = load_split()
    little = Split(train=whole.train[:50_000], held_out=whole.held_out[:3_000])
    with pytest.MonkeyPatch.context() as patch:  # one of its own, which a test's undo leaves alone
        patch.setattr(demo_run, "load_split", lambda: little)
        yield


def demo(folder, *, given=None, **call):
    console = Console(file=io.StringIO(), width=200)
    settings = {"eval_interval": 3, "checkpoint_interval": 2, "sample_bytes": 0} | call
    status = demo_run.run(TINY | (given or {}), Call(output=folder, **settings), console)
    return status, console.file.getvalue()


def state_in(folder):
    return checkpoint.load(folder)


def assert_same(a, b, path="state"):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key != "seconds":  # how long it took is the one thing that differs
                assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    else:
        assert a == b, path


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"router": "sigmoid", "bias_rate": 0.1},
        {"dropout": 0.3},
        {"dtype": "bfloat16", "activation": "gpt_oss", "layers": 1},
        *(pytest.param(of, marks=pytest.mark.slow) for of in ({"dtype": "bfloat16"}, {"activation": "gpt_oss"})),
    ],
    ids=["plain", "sigmoid", "dropout", "both", "bfloat16", "gpt_oss"],
)
def test_three_steps_and_three_more_are_six_bit_for_bit(tmp_path, given):
    demo(tmp_path / "whole", given=given)
    status, text = demo(tmp_path / "pieces", given=given, stop_at=3)
    assert status == 0
    assert "continue with: fusedmoe demo --resume --output" in text
    assert state_in(tmp_path / "pieces")["step"] == 3
    torch.manual_seed(123)  # what happened to the generator in between must not matter
    _, text = demo(tmp_path / "pieces", given=given, resume=True)
    assert "Resuming after step 3 of 6" in text
    assert "Not bit for bit" not in text
    whole = state_in(tmp_path / "whole")
    assert whole["step"] == 6
    assert len(whole["history"]["losses"]) == len(whole["history"]["loads"]) == 6
    assert [step for step, _ in whole["history"]["evaluations"]] == [3, 6]
    assert_same(whole, state_in(tmp_path / "pieces"))


def test_a_seed_is_a_run_and_another_seed_is_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo(tmp_path / name, given={"seed": seed, "steps": 2})
    a, b, c = (state_in(tmp_path / name) for name in "abc")
    assert_same(a, b)
    assert not torch.equal(a["model"]["embedding.weight"], c["model"]["embedding.weight"])
    assert not torch.equal(a["history"]["losses"], c["history"]["losses"])


def test_resuming_a_finished_run_trains_nothing_and_reports_again(tmp_path):
    demo(tmp_path)
    before = state_in(tmp_path)
    status, text = demo(tmp_path, resume=True)
    assert status == 0
    assert "0 steps, " in text
    assert_same(before, state_in(tmp_path))


def test_too_little_memory_is_said(tmp_path, monkeypatch):
    def no_memory(self):
        torch.empty(2**50)

    monkeypatch.setattr(train.Trainer, "train_step", no_memory)
    with pytest.raises(DemoError, match="out of memory on cpu; choose a smaller --batch"):
        demo(tmp_path)


def test_by_default_half_the_threads_are_used(monkeypatch):
    for available, used in ((1, 1), (2, 1), (3, 1), (8, 4), (64, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda available=available: available)
        assert job_of({"device": "cpu"}).threads == used


def test_more_steps_can_be_asked_of_a_finished_run(tmp_path):
    demo(tmp_path)
    _, text = demo(tmp_path, given={"steps": 8}, resume=True)
    assert "Not bit for bit the result of an uninterrupted run: --steps was 6, is 8" in text
    assert state_in(tmp_path)["step"] == 8
    with pytest.raises(UsageError, match=r"--steps 3: the checkpoint has 8 steps already"):
        demo(tmp_path, given={"steps": 3}, resume=True)


def test_other_sizes_than_the_checkpoint_s_are_refused(tmp_path):
    demo(tmp_path, stop_at=1)
    with pytest.raises(
        UsageError, match=r"--experts 8: the checkpoint was made with --experts 4; leave out the option"
    ):
        demo(tmp_path, given={"experts": 8}, resume=True)
    assert state_in(tmp_path)["step"] == 1


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(tmp_path):
    demo(tmp_path, stop_at=1)
    state = state_in(tmp_path)
    del state["model"]["norm.weight"]
    checkpoint.save(tmp_path, state)
    with pytest.raises(DemoError, match="does not fit the model"):
        demo(tmp_path, resume=True)


def test_another_torch_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "made_with", lambda: {"torch": "0.4"})
    demo(tmp_path, stop_at=1)
    monkeypatch.undo()
    _, text = demo(tmp_path, resume=True)
    assert "Not bit for bit the result of an uninterrupted run: torch was 0.4, is " in text


def test_the_number_of_threads_is_the_checkpoint_s_unless_given(tmp_path, monkeypatch):
    used = []
    train_step = train.Trainer.train_step
    monkeypatch.setattr(
        train.Trainer, "train_step", lambda self: (used.append(torch.get_num_threads()), train_step(self))
    )
    before = torch.get_num_threads()
    demo(tmp_path, given={"threads": 2}, stop_at=2)
    torch.set_num_threads(1)
    try:
        demo(tmp_path, resume=True, stop_at=4)
        _, text = demo(tmp_path, given={"threads": 1}, resume=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert used == [2, 2, 2, 2, 1, 1]
    assert "Not bit for bit the result of an uninterrupted run: --threads was 2, is 1" in text


def test_a_new_run_keeps_the_checkpoint_of_the_one_before(tmp_path):
    demo(tmp_path, given={"seed": 1})
    _, text = demo(tmp_path, given={"seed": 2}, stop_at=1)
    assert "kept as" in text
    assert torch.load(tmp_path / "checkpoint.previous.pt", weights_only=True)["step"] == 6


def test_a_full_disk_in_mid_training_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    fsync = os.fsync
    calls = []

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) > 12:  # six for a checkpoint: those of steps 0 and 2 are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(DemoError, match="the disk is full"):
        demo(tmp_path)
    monkeypatch.undo()
    assert state_in(tmp_path)["step"] == 2
    demo(tmp_path, resume=True)
    demo(tmp_path / "whole")
    assert_same(state_in(tmp_path), state_in(tmp_path / "whole"))


def test_a_full_disk_shows_before_the_first_step(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_step(self):
        raise AssertionError("trained although the disk is full")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    monkeypatch.setattr(train.Trainer, "train_step", no_step)
    with pytest.raises(DemoError, match="the disk is full"):
        demo(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_step_saves_and_says_how_to_go_on(tmp_path, monkeypatch, number):
    train_step = train.Trainer.train_step

    def interrupted_in_step_4(self):
        if self.step == 3:
            signal.raise_signal(number)
        train_step(self)

    earlier = signal.getsignal(number)
    monkeypatch.setattr(train.Trainer, "train_step", interrupted_in_step_4)
    with pytest.raises(InterruptedRunError, match=r"stopped after step 4 of 6.*continue with: fusedmoe demo") as caught:
        demo(tmp_path)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is earlier
    monkeypatch.undo()
    assert state_in(tmp_path)["step"] == 4
    demo(tmp_path, resume=True)
    demo(tmp_path / "whole")
    assert_same(state_in(tmp_path), state_in(tmp_path / "whole"))


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    def interrupted_twice(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train.Trainer, "train_step", interrupted_twice)
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path)
    assert state_in(tmp_path)["step"] == 0


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, monkeypatch):
    train_step = train.Trainer.train_step

    def broken_in_step_4(self):
        if self.step == 3:
            torch.nn.init.constant_(self.model.norm.weight, float("nan"))
        train_step(self)

    monkeypatch.setattr(train.Trainer, "train_step", broken_in_step_4)
    with pytest.raises(DemoError, match=r"step 4 gave a loss of nan.*--lr below 0\.003"):
        demo(tmp_path)
    assert state_in(tmp_path)["step"] == 2


def test_results_read_late_are_the_same(tmp_path, monkeypatch):
    demo(tmp_path / "each")
    monkeypatch.setattr(train.Trainer, "results_due", property(lambda self: False))  # as on a GPU, between its readings
    demo(tmp_path / "late")
    assert_same(state_in(tmp_path / "each"), state_in(tmp_path / "late"))


def test_sixty_steps_learn_something(tmp_path):
    _, text = demo(tmp_path, given={"steps": 60, "batch": 8, "lr": 1e-2}, eval_interval=60)
    losses = state_in(tmp_path)["history"]["losses"]
    assert losses[-10:].mean() < losses[:10].mean() - 1.0
    assert "How the experts of a layer run:" in text
    assert "bits per byte; the byte-bigram model: " in text


def test_the_balancing_bias_is_used_with_the_sigmoid_router_alone(tmp_path):
    assert job_of({"router": "sigmoid", "device": "cpu"}).aux_loss == 0
    assert job_of({"device": "cpu"}).aux_loss > 0
    demo(tmp_path / "a", given={"router": "sigmoid", "bias_rate": 0.0})
    demo(tmp_path / "b", given={"router": "sigmoid", "bias_rate": 0.5})
    a, b = (state_in(tmp_path / name)["history"] for name in "ab")
    assert torch.equal(a["loads"][0], b["loads"][0])
    assert not torch.equal(a["loads"][1:], b["loads"][1:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": 30}, r"--hidden 30 with --heads 4.*multiple of 8"),
        ({"top_k": 9}, r"--top-k 9 with --experts 8"),
        ({"layers": 0}, r"--layers 0: must be 1 or more"),
        ({"lr": float("nan")}, r"--lr nan"),
        ({"lr": -1.0}, r"--lr -1\.0: must be more than 0"),
        ({"dropout": 1.0}, r"--dropout 1\.0"),
        ({"aux_loss": -0.1}, r"--aux-loss -0\.1"),
        ({"seed": -1}, r"--seed -1"),
        ({"dtype": "float8"}, r"--dtype float8: choose from float32, bfloat16"),
        ({"device": "toaster"}, r"--device toaster: not a device"),
        ({"device": "meta"}, r"--device meta: choose cpu or cuda"),
        ({"device": "cuda:99"}, r"--device cuda:99: torch finds no such GPU"),
    ],
)
def test_bad_values_are_named_with_what_is_possible(given, message):
    with pytest.raises(UsageError, match=message):
        job_of({"device": "cpu"} | given)


def test_a_context_longer_than_the_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--context 10000000: the held-out text allows at most \d+"):
        demo(tmp_path, given={"context": 10_000_000})


def test_defaults_are_complete_and_good_on_both_devices():
    from fusedmoe.commands.demo.options import CPU_DEFAULTS, GPU_DEFAULTS

    Job(**CPU_DEFAULTS, device="cpu", threads=2).check()
    Job(**GPU_DEFAULTS, device="cpu", threads=2).check()


def history_of(steps):
    load = torch.tensor([[10, 20, 30, 40]], dtype=torch.int32)
    return History(losses=[4.0] * steps, loads=[load] * steps, evaluations=[])


def test_the_bar_shows_loss_rate_and_load():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with progress_on(console, 0, 1000, 10_000) as progress:
        assert isinstance(progress, Bar)
        progress.update(1, 0.5, history_of(1))
        progress.evaluated(1, 3.25)
        progress.update(2, 1.0, history_of(2))
    text = console.file.getvalue()
    assert "step    1/1000  held-out 3.250 bits/byte" in text
    assert re.search(r"   2/1000 loss 4.00 bits/byte 20,000 tokens/s load [▁-█]{4} \S+", text)


def test_elsewhere_lines_are_printed_now_and_then():
    console = Console(file=io.StringIO(), width=140)
    steps = 480
    with progress_on(console, 0, steps, 1000) as progress:
        assert isinstance(progress, Lines)
        for step in range(1, steps + 1):
            progress.update(step, step * 0.1, history_of(step))
    lines = console.file.getvalue().splitlines()
    assert 20 <= len(lines) <= 30
    assert lines[-1] == "step 480/480  loss 4.00 bits/byte  10,000 tokens/s  busiest expert 1.60x its share"


def test_load_bars_are_in_the_middle_where_balanced():
    assert load_bars(torch.tensor([0.0, 1.0, 2.0, 9.0]), "12345") == "1355"
