"""The demo's checkpoint: whole or as before, whatever happens, and never loaded unless it is what was written."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from fusedmoe.commands.demo import checkpoint, files
from fusedmoe.commands.demo.errors import DemoError

FIRST, SECOND = ({"step": step, "weights": torch.full((1000,), float(step))} for step in (1, 2))


def step_in(folder):
    return checkpoint.load(folder)["step"]


def names_in(folder):
    return sorted(os.listdir(folder))


def test_what_is_loaded_is_what_was_saved(tmp_path):
    checkpoint.save(tmp_path, FIRST)
    checkpoint.save(tmp_path, SECOND)
    state = checkpoint.load(tmp_path)
    assert state["step"] == 2
    assert torch.equal(state["weights"], SECOND["weights"])
    assert names_in(tmp_path) == ["checkpoint.pt", "checkpoint.pt.sha256"]


def test_the_files_are_those_of_torch_and_of_sha256sum(tmp_path):
    checkpoint.save(tmp_path, FIRST)
    path = tmp_path / "checkpoint.pt"
    assert torch.load(path, weights_only=True)["step"] == 1
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / "checkpoint.pt.sha256").read_text() == f"{digest}  checkpoint.pt\n"


@pytest.mark.parametrize("position", [0, 500, -1])
def test_a_changed_byte_is_refused(tmp_path, position):
    checkpoint.save(tmp_path, FIRST)
    path = tmp_path / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(DemoError, match=r"checkpoint\.pt is corrupt.*start without --resume"):
        checkpoint.load(tmp_path)


def test_a_cut_off_file_is_refused(tmp_path):
    checkpoint.save(tmp_path, FIRST)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DemoError, match="corrupt"):
        checkpoint.load(tmp_path)


def test_without_a_checkpoint_or_its_digest_the_message_says_what_is_missing(tmp_path):
    with pytest.raises(DemoError, match=r"no checkpoint at .*start without --resume"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, FIRST)
    (tmp_path / "checkpoint.pt.sha256").unlink()
    with pytest.raises(DemoError, match=r"sha256 is missing"):
        checkpoint.load(tmp_path)


def test_an_intact_file_of_something_else_is_refused(tmp_path):
    for content in (b"not a checkpoint", b""):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        (tmp_path / "checkpoint.pt.sha256").write_text(hashlib.sha256(content).hexdigest() + "  checkpoint.pt\n")
        with pytest.raises(DemoError, match="is not a checkpoint of this demo"):
            checkpoint.load(tmp_path)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    checkpoint.save(tmp_path, FIRST)
    monkeypatch.undo()
    with pytest.raises(DemoError, match="another version"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_full_disk_leaves_a_good_checkpoint_and_no_half_written_file(tmp_path, monkeypatch, failing_call):
    checkpoint.save(tmp_path, FIRST)
    calls = []

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_on_full_disk(*arguments, **keywords):
        calls.append(arguments)
        file = open(*arguments, **keywords)  # noqa: SIM115  (the code under test closes it)
        return FullDisk(file) if len(calls) >= failing_call else file

    monkeypatch.setattr(files, "open", open_on_full_disk, raising=False)
    with pytest.raises(DemoError, match=r"the disk is full: cannot write .*checkpoint\.pt.*free some space"):
        checkpoint.save(tmp_path, SECOND)
    monkeypatch.undo()
    assert step_in(tmp_path) == (1 if failing_call < 3 else 2)  # the third write only tidies the digests up
    assert names_in(tmp_path) == ["checkpoint.pt", "checkpoint.pt.sha256"]
    checkpoint.save(tmp_path, SECOND)
    assert step_in(tmp_path) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_only_when_flushed(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, FIRST)
    monkeypatch.setattr(files, "open", lambda path, mode: Path("/dev/full").open(mode), raising=False)  # noqa: SIM115
    with pytest.raises(DemoError, match="the disk is full"):
        checkpoint.save(tmp_path, SECOND)
    assert step_in(tmp_path) == 1


class PowerCutError(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("cut_at", range(9))
def test_wherever_the_power_is_cut_one_of_the_two_loads(tmp_path, monkeypatch, cut_at):
    checkpoint.save(tmp_path, FIRST)
    done = []

    def until_cut(call):
        def counted(*arguments):
            if len(done) == cut_at:
                raise PowerCutError
            done.append(call)
            return call(*arguments)

        return counted

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, until_cut(getattr(os, name)))
    with pytest.raises(PowerCutError):
        checkpoint.save(tmp_path, SECOND)
    monkeypatch.undo()
    assert step_in(tmp_path) == (1 if os.replace not in done[3:] else 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match=r"cannot write .*file.*choose a folder"):
        files.make_folder(tmp_path / "file")
    with pytest.raises(DemoError, match=r"cannot write .*missing"):
        checkpoint.save(tmp_path / "missing", FIRST)


def test_a_checkpoint_set_aside_is_not_overwritten(tmp_path):
    assert checkpoint.set_aside(tmp_path) is None
    checkpoint.save(tmp_path, FIRST)
    assert checkpoint.set_aside(tmp_path) == tmp_path / "checkpoint.previous.pt"
    checkpoint.save(tmp_path, SECOND)
    assert torch.load(tmp_path / "checkpoint.previous.pt", weights_only=True)["step"] == 1
    assert step_in(tmp_path) == 2
