"""The command line as a user meets it: messages, exit codes, Ctrl-C, pipes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedmoe
from fusedmoe.commands.main import main

PACKAGE_PARENT = str(Path(fusedmoe.__file__).parents[1])
SIZES = "--layers 1 --hidden 16 --heads 2 --experts 4 --top-k 2 --intermediate 16 --context 32 --batch 4"
SETTINGS = "--device cpu --dtype float32"
TINY = f"{SIZES} {SETTINGS}".split()


def command(*arguments):
    return [sys.executable, "-m", "fusedmoe", *arguments]


def environment():
    path = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def start(folder, *arguments):
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def refused(capsys, *arguments):
    """Run the command, which must end with status 2 and one line; return the line."""
    try:
        status = main(list(arguments))
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in ("--layers", "--hidden", "--steps", "--seed", "--device", "--dtype", "--recipe", "--resume"):
        assert option in text
    assert "fusedmoe-demo" in text


def test_help_and_version_of_the_command(capsys):
    for arguments, expected in (
        (["--help"], "doctor"),
        (["--help"], "compile"),
        (["--help"], "tune"),
        (["--version"], "fusedmoe "),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


def test_unknown_options_are_named_with_the_nearest_known_one(capsys):
    message = refused(capsys, "demo", "--layer", "3")
    assert "unknown option --layer" in message
    assert "did you mean --layers?" in message
    assert "fusedmoe demo --help" in message
    assert "unknown argument rubbish" in refused(capsys, "demo", "rubbish")


def test_no_command_and_an_unknown_one(capsys):
    assert "COMMAND" in refused(capsys)
    assert "unknown command train: expected one of doctor, demo, " in refused(capsys, "train")
    assert "unknown command explian (did you mean explain?)" in refused(capsys, "explian", "--strict")


def test_bad_values(capsys, tmp_path):
    output = ("--output", str(tmp_path / "out"))
    assert "--top-k 9: must be at most --experts 8" in refused(
        capsys, "demo", "--device", "cpu", "--top-k", "9", *output
    )
    assert "invalid int value: 'many'" in refused(capsys, "demo", "--steps", "many", *output)
    assert "--recipe fp3: choose from bf16, " in refused(capsys, "demo", "--recipe", "fp3", *output)
    assert not (tmp_path / "out").exists()


def test_doctor_names_the_nearest_option(capsys):
    assert "fusedmoe doctor: error: unknown option --jsn (did you mean --json?)" in refused(capsys, "doctor", "--jsn")


def test_doctor_gets_the_arguments_after_its_name(monkeypatch):
    from fusedmoe.commands import doctor

    monkeypatch.setattr(doctor, "run", lambda options: 7 if options.json else 0)
    assert main(["doctor", "--json"]) == 7


def test_a_run_into_a_pipe_is_plain_text_and_leaves_its_files(tmp_path):
    process = start(tmp_path, "demo", *TINY, "--steps", "5")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)  # no control character but the line feed
    assert "the byte-bigram model: 3." in out
    assert "5 steps, " in out.splitlines()[-1]
    folder = tmp_path / "fusedmoe-demo"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.pt",
        "results.json",
        "training.png",
    ]
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG\r\n")
    results = json.loads((folder / "results.json").read_text())
    assert results["evaluations"][-1] == [5, results["held_out_bits_per_byte"]]
    assert f"Held-out text: {results['held_out_bits_per_byte']:.3f} bits per byte" in out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_says_how_to_continue(tmp_path):
    process = start(tmp_path, "demo", *TINY, "--steps", "2400")
    for line in process.stdout:
        if "held-out" in line and line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "fusedmoe demo: interrupted; --resume continues from the last checkpoint\n"
    assert torch.load(tmp_path / "fusedmoe-demo" / "checkpoint.pt", weights_only=True)["step"] == 300


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell's pipe")
def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path):
    process = start(tmp_path, "demo", *TINY, "--steps", "100000")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in err
    assert "Exception" not in err


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_onto_a_full_disk_is_said_in_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command("demo", *TINY, "--steps", "5"),
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=120,
        )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "the disk that the output goes to is full" in result.stderr


def test_resume_without_a_checkpoint_and_an_output_that_is_a_file(tmp_path, capsys):
    assert "no checkpoint at" in refused(capsys, "demo", "--resume", "--output", str(tmp_path))
    (tmp_path / "file").write_text("")
    message = refused(capsys, "demo", *TINY, "--steps", "1", "--output", str(tmp_path / "file"))
    assert "choose a folder that you can write to" in message


def test_without_matplotlib_it_says_which_extra_brings_it(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", *TINY, "--steps", "2", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pip install 'fusedmoe[demo]'" in out
    assert not (tmp_path / "training.png").exists()
    assert (tmp_path / "results.json").exists()
