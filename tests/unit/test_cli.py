"""The command line as a user meets it: messages, exit codes, Ctrl-C, pipes."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fusedmoe
from fusedmoe.commands.main import main

PACKAGE_PARENT = str(Path(fusedmoe.__file__).parents[1])
SIZES = "--layers 1 --hidden 16 --heads 2 --experts 4 --top-k 2 --intermediate 16 --context 32 --batch 4"
TINY = f"{SIZES} --device cpu --dtype float32".split()


def refused(capsys, *arguments):
    """Run the command, which must end with status 2 and one line; return the line."""
    try:
        status = main(list(arguments))
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert (status, captured.out, len(captured.err.splitlines())) == (2, "", 1)
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "verify"),
        ("--version", "fusedmoe "),
        ("demo --help", "--resume"),
        ("compile --help", "(default: sm_90a)"),
        ("explain --help", "one layer, instead of CONFIG:\n  --hidden H"),
    ],
)
def test_help(capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "COMMAND"),
        ("train", "unknown command train: expected one of doctor, demo, "),
        ("explian --strict", "unknown command explian (did you mean explain?)"),
        ("doctor --jsn", "fusedmoe doctor: error: unknown option --jsn (did you mean --json?)"),
        ("demo rubbish", "unknown argument rubbish; `fusedmoe demo --help` lists the options"),
        ("demo --steps many", "invalid int value: 'many'"),
        ("demo --recipe fp3", "--recipe fp3: choose from bf16, "),
        ("demo --resume", "no checkpoint at"),
        ("demo --device cpu --output a-file", "choose a folder that you can write to"),
    ],
)
def test_wrong_arguments(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    assert said in refused(capsys, *arguments.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_run_into_a_pipe_is_plain_text_and_leaves_its_files(tmp_path):
    path = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "fusedmoe", "demo", *TINY, "--steps", "5"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, encoding="utf-8", capture_output=True, timeout=300
    )
    out = ran.stdout
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)  # no control character but the line feed
    assert "the byte-bigram model: 3." in out
    assert "5 steps, " in out.splitlines()[-1]
    folder = tmp_path / "fusedmoe-demo"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "results.json", "training.png"]
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG\r\n")
    results = json.loads((folder / "results.json").read_text())
    assert results["evaluations"][-1] == [5, results["held_out_bits_per_byte"]]
    assert f"Held-out text: {results['held_out_bits_per_byte']:.3f} bits per byte" in out


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BrokenPipeError(), 1, ""),  # the reader of a pipe has left
        (OSError(errno.ENOSPC, "No space left"), 1, "fusedmoe: error: the disk that the output goes to is full; "),
        (KeyboardInterrupt(), 130, "fusedmoe demo: interrupted; --resume continues from the last checkpoint"),
    ],
)
def test_a_run_that_ends_early(monkeypatch, capsys, error, status, said):
    def ends(options):
        raise error

    monkeypatch.setattr("fusedmoe.commands.demo.command.run", ends)
    monkeypatch.setattr("fusedmoe.commands.main._silence_output", lambda: None)
    assert main(["demo"]) == status
    err = capsys.readouterr().err
    assert (err.startswith(said), bool(err)) == (True, bool(said))


def test_without_matplotlib_it_says_which_extra_brings_it(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", *TINY, "--steps", "2", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pip install 'fusedmoe[demo]'" in out
    assert not (tmp_path / "training.png").exists()
    assert (tmp_path / "results.json").exists()
