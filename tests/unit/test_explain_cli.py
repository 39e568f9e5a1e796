"""``fusedmoe explain``: one layer by its sizes, what is printed, exit statuses.

Models of transformers are in tests/integrations/test_explain_config.py.
"""

import json

import pytest
import torch

import fusedmoe as fm
from fusedmoe.commands.main import main

pytestmark = pytest.mark.usefixtures("builtin_rules")

LAYER = ["explain", "--hidden", "2048", "--intermediate", "768", "--experts", "128", "--top-k", "8"]


def test_a_layer_by_its_sizes(capsys):
    assert main([*LAYER, "--tokens", "8192"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "MoE layer, hidden 2048, intermediate 768, 128 experts, top 8, swiglu, bfloat16\n"
        "8192 tokens, training, on an sm_90 GPU; nothing was run\n"
    )
    assert "planned for sm_90 (requested), bfloat16, recipe bf16" in text
    assert "experts.gate_up.GroupedLinear + experts.activation.SwiGLU" in text
    assert "4 of 4 fused" in text
    assert main([*LAYER, "--strict"]) == 0
    assert capsys.readouterr().err == "strict: everything is fused\n"


def test_it_is_the_plan_of_the_layer(capsys):
    main([*LAYER, "--tokens", "300", "--activation", "geglu", "--json"])
    found = json.loads(capsys.readouterr().out)
    layer = fm.MoE(2048, 768, 128, 8, activation="geglu", device="meta", dtype=torch.bfloat16)
    (plan,) = fm.explain(layer, tokens=300, arch=90).plans
    (group,) = found["groups"]
    assert (found["arch"], found["tokens"], found["missed"], group["names"]) == (90, 300, [], ["layer"])
    (printed,) = group["plans"]
    assert printed["kept_bytes"] == plan.kept_bytes > 0
    assert [step["rule"] for step in printed["steps"]] == [step.rule for step in plan.steps]
    assert [step["bytes_moved"] for step in printed["steps"]] == [step.bytes_moved for step in plan.steps]


def test_strict_names_what_is_not_and_ends_with_status_1(capsys):
    assert main([*LAYER, "--dtype", "float32", "--strict"]) == 1
    out, err = capsys.readouterr()
    assert "unfused HOST SYNC" in out
    assert err.startswith("fusedmoe explain: strict: these ops run unfused although there is a kernel for them:\n")
    assert "  layer: experts.down.GroupedLinear: sm90.grouped_gemm: CONSTRAINT: input is float32" in err
    assert main([*LAYER, "--dtype", "float32"]) == 0


def test_strict_lets_pass_what_has_no_kernel_and_says_so(capsys):
    assert main([*LAYER, "--recipe", "fp8_row", "--strict"]) == 0
    err = capsys.readouterr().err
    assert "strict: fusion not required for " in err
    assert "experts.gate_up.GroupedLinear, " in err
    assert "no kernel multiplies rows in fp8 e4m3 per-row yet: expected blocks of 1x128 values" in err
    assert "takes no " not in err, "the reason of a rule for quantized operands says more"
    assert err.endswith("strict: everything else is fused\n")


def test_an_architecture_without_kernels(capsys):
    assert main([*LAYER, "--arch", "sm_80"]) == 0
    assert main([*LAYER, "--arch", "80", "--strict"]) == 1
    assert "there are no kernels for these ops on sm_80 yet" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["explain"], "expected CONFIG, or the sizes of a layer: --hidden, --intermediate, --experts, --top-k"),
    (["explain", "--hidden", "8"], "or the missing sizes of a layer: --intermediate, --experts, --top-k"),
    (["explain", "config.json", "--hidden", "8"], "--hidden: expected without CONFIG, got config.json"),
    ([*LAYER, "--arch", "h100"], "arch: expected a number such as 90, for sm_90 (H100, H200), got 'h100'"),
    ([*LAYER, "--recipe", "fp7"], "fp7"),
    ([*LAYER, "--top-k", "200"], "top_k: expected 1 to num_experts=128, got 200"),
    ([*LAYER, "--tokens", str(1 << 62)], f"--tokens {1 << 62}: must be at most 2^40"),
    ([*LAYER, "--tokens", str(1 << 40), "--hidden", str(1 << 20)], "tensors of more than 2^56 numbers"),
])  # fmt: skip
def test_wrong_options(capsys, arguments, message):
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
