"""``fusedmoe tune`` and its table, with times that are made up: no GPU."""

import json
import logging
import os

import pytest
import torch
from kit import sm90_stand_ins as stand_ins

from fusedmoe.base.errors import InputError
from fusedmoe.commands import tune as tune_cli
from fusedmoe.commands.main import main
from fusedmoe.commands.tune import Gpu, TuneOptions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles import choice, tuned, tuning
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, PP_128, by_model, candidates, choose

GPU = Gpu("Some GPU", 132)
SIZES = {"hidden": 2048, "intermediate": 768, "experts": 128, "rows": 262_144}
ARGUMENTS = ["tune", *(text for name, size in SIZES.items() for text in (f"--{name}", str(size)))]


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    """A cache directory of the test's own, on the machine of a GPU, without measurements; the table's path."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "gpu_name", lambda: GPU.name)
    monkeypatch.setattr(choice, "MEASURED", {})
    again()
    yield tuned.path()
    again()


def again():
    """As a new process: nothing read yet."""
    tuned.table.cache_clear()
    choose.cache_clear()


def last_is_best(mlp, product, reps, advance):
    """The later a candidate stands in the list, the faster."""
    configs = candidates(product.problem)
    for config in configs:
        advance(config.name)
    return {config: 2.0 - index / len(configs) for index, config in enumerate(configs)}


def tune(measure=last_is_best, **options):
    return tune_cli.run(TuneOptions(**SIZES | options), measure, GPU)


def problems():
    return [product.problem for product in tuning.products(tuning.Mlp(**SIZES), GPU.sms)]


def test_winners_are_kept_and_chosen_by_later_processes(table, capsys, monkeypatch):
    before = [choose(problem) for problem in problems()]
    assert tune() == 0
    assert [choose(problem) for problem in problems()] == before, "no kernel changes in the middle of a run"
    again()
    shipped = {problem.coarse: config.name for problem, config in zip(problems(), before, strict=True)}
    monkeypatch.setattr(choice, "MEASURED", shipped)  # which the measurements of this machine overrule
    after = [choose(problem) for problem in problems()]
    assert after == [CANDIDATES[problem.family][-1] for problem in problems()] != before
    captured = capsys.readouterr()
    assert f"saved in {table}" in captured.out
    total = sum(len(candidates(problem)) for problem in problems())
    assert f"{total}/{total} configurations, " in captured.err
    content = json.loads(table.read_text())
    monkeypatch.setattr(choice, "MEASURED", {})
    monkeypatch.setattr(tuned, "gpu_name", lambda: "Another GPU")
    again()
    assert [choose(problem) for problem in problems()] == [by_model(problem) for problem in problems()]
    assert len(content["gpus"][GPU.name]) == len({problem.coarse for problem in problems()}) == 10
    assert content["gpus"][GPU.name]["activation/22/1536/11"]["config"] == CANDIDATES["activation"][-1].name


def test_tuning_again_replaces_its_entries_and_keeps_the_others(table):
    tune()
    tune(intermediate=512)
    first_is_best = lambda mlp, product, reps, advance: dict(zip(candidates(product.problem), (1.0, 2.0), strict=False))  # noqa: E731
    tune(first_is_best)
    again()
    entries = json.loads(table.read_text())["gpus"][GPU.name]
    assert entries["activation/22/1024/11"]["config"] == CANDIDATES["activation"][-1].name
    assert choose(problems()[0]) == CANDIDATES["activation"][0]


def test_the_table_that_is_printed(capsys):
    def some_times(mlp, product, reps, advance):
        assert reps == 7
        return {config: 1.0 if config == PP_128 else 2.5 for config in candidates(product.problem)}

    tune(some_times, reps=7)
    out = capsys.readouterr().out
    assert "Some GPU, bf16, swiglu, 262144 rows of 128 experts, 1 per token, medians of 7 calls" in out
    first = out[out.index("FC1 and the activation") :].splitlines()
    assert first[2].split() == ["128x128pp_c21", "1.0000", "1649", "best"]  # 2 * 262144 * 1536 * 2048 in a millisecond
    assert any(line.endswith("the cost model's choice, used until now") for line in first[3:8])


GPUS = b'{"format": 2, "gpus": {"Some GPU": %s}}'


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"\xff", b'{"format": 1, "gpus": {}}', b'{"format": 2}',
        GPUS % b'{"activation/22/1536/11": "128x192pp_c21"}',
        GPUS % (b'{"activation/22/1536/%s": {"config": "a"}}' % (b"9" * 10_000)),
        b'{"format": 2, "gpus": ' + b"[" * 200_000,
    ],
    ids=lambda content: repr(content[:60]),
)  # fmt: skip
def test_a_damaged_table_is_ignored_with_one_warning(table, content, caplog):
    table.parent.mkdir(parents=True)
    table.write_bytes(content)
    ignored(table, "fusedmoe tune --clear", caplog)
    assert tune() == 0, "a damaged table is begun anew"
    again()
    assert len(tuned.table()) == len(problems())


def ignored(table, why, caplog):
    with caplog.at_level(logging.WARNING, logger="fusedmoe"):
        assert [choose(problem) for problem in problems()] == [by_model(problem) for problem in problems()]
    (record,) = caplog.records
    assert str(table) in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "is not a regular file"),  # reading it would wait for a writer, forever
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be opened"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "is larger than"),
        (lambda path: (path.write_bytes(b"{}"), path.chmod(0o666)), "is writable by everyone"),
    ],
    ids=["named pipe", "directory", "link to itself", "terabyte", "writable by everyone"],
)
def test_other_things_in_its_place_are_no_table(table, make, why, caplog, capsys):
    table.parent.mkdir(parents=True)
    make(table)
    ignored(table, f"{table.name} {why}", caplog)
    if table.is_dir():
        assert tune() == 1
        assert "cannot write" in capsys.readouterr().err
    else:
        assert tune_cli.run(TuneOptions(clear=True)) == 0
        assert not os.path.lexists(table)


def test_a_name_that_is_no_candidate_is_passed_over(table):
    problem = problems()[0]
    for name in ("no such name", "256x128co_c12"):
        tuned.add(table, GPU.name, problem.coarse, name, 1.0)
        again()
        assert choose(problem) == by_model(problem)


@pytest.mark.parametrize("folder", ["0", "file/below"])
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", folder)
    again()
    assert tuned.table() == {}
    assert tune(lambda mlp, product, reps, advance: pytest.fail("measured for nothing")) == 1
    assert ("FUSEDMOE_CACHE_DIR=0" if folder == "0" else "cannot write") in capsys.readouterr().err


def test_clear(table, capsys):
    assert main(["tune", "--clear"]) == 0
    assert f"{table} does not exist" in capsys.readouterr().out
    tune()
    capsys.readouterr()
    assert main(["tune", "--clear"]) == 0
    assert f"removed {table}" in capsys.readouterr().out
    assert not table.exists()


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(ARGUMENTS) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_no_memory_left(capsys):
    def full(mlp, product, reps, advance):
        raise torch.OutOfMemoryError

    assert tune(full) == 1
    assert "choose fewer --rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": None}, "--hidden: missing"),
        ({"rows": 0}, "--rows 0: must be 1 or more"),
        ({"hidden": 2049}, "--hidden 2049 is not a multiple of 8"),
        ({"clear": True}, "--clear: expected without sizes"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        tune(**options)


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_calls_are_those_of_the_products_titles(monkeypatch, activation):
    stand_ins.install(monkeypatch.setattr)
    mlp = tuning.Mlp(64, 32, 4, 100, activation)
    called, products_ = [], tuning.products(mlp, 132)
    columns = 32 if activation == "squared_relu" else 64
    of_first = [(p.problem.columns, p.problem.depth) for p in products_[:6]]
    assert of_first == [(columns, 64), (64, 32), (32, 64), (64, columns), (64, columns), (32, 64)]
    for product in products_:
        stand_ins.calls.clear()
        tuning.binder(mlp, product, "cpu")()()
        called.append(" of ".join(name for name, _ in reversed(stand_ins.calls)))
    assert called == [
        "grouped_gemm_activation", "grouped_gemm", "grouped_gemm_activation_backward", "grouped_gemm",
        "grouped_wgrad", "grouped_wgrad",
        "grouped_gemm_activation of gathered_gemm_activation",
        "grouped_gemm_activation_backward of gathered_gemm_activation_backward",
        "grouped_wgrad of gathered_wgrad_x", "grouped_wgrad of gathered_wgrad_dy",
    ]  # fmt: skip


def test_a_forced_configuration_is_what_launches_are_chosen_by():
    before = products.choose
    with tuning.forced(CO_256):
        assert products.choose(problems()[0]) == CO_256
    assert products.choose is before
