"""The scripts of examples/: each runs on a CPU, and does what its text says."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.expert_parallel_ranks import compared
from kit.two_ranks import in_ranks
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmoe as fm
from fusedmoe.base.log import forget_said

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)  # dataclasses look their annotations up there
        spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh():
    forget_said()
    registered = fm.rules()
    yield
    assert fm.rules() == registered, "rules of the example are still registered"


@pytest.fixture
def on_cpu(monkeypatch):
    """The examples find no GPU: what they print and compute is that of a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


pytestmark = pytest.mark.usefixtures("on_cpu")


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text("utf-8"), (ROOT / "docs" / "index.md").read_text("utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix == ".py" or (path.is_dir() and (path / "README.md").exists()):
            assert all(path.name in text for text in listed), path.name


@pytest.mark.usefixtures("without_transformer_engine")
def test_the_trainer_learns_the_same_with_either_experts(capsys):
    pytest.importorskip("accelerate")
    main = example("qwen3_moe_trainer").main
    ours = main(["--steps", "24"])
    printed = capsys.readouterr().out
    eager = main(["--steps", "24", "--experts", "eager"])
    assert len(ours.losses) == 24
    assert ours.before > 5.5  # about log(256): it knows nothing yet
    assert ours.after < ours.before - 2
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(eager.losses), rtol=1e-4, atol=0)
    torch.testing.assert_close(ours.before, eager.before, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.after, eager.after, rtol=1e-4, atol=0)
    # each ran the experts that it was asked for
    (group,) = ours.explanation.groups
    assert (group.kind, len(group.names)) == ("Qwen3MoeExperts", 2)
    assert eager.explanation.groups == ()
    assert printed.count(str(ours.explanation)) == 1


def test_gpt_oss_is_the_same_but_for_rounding(capsys):
    pytest.importorskip("transformers")
    result = example("gpt_oss_logits").main([])
    for dtype, most in [("float32", 3e-6), ("bfloat16", 3e-2)]:
        ours, own = result.relative[dtype, "fusedmoe"], result.relative[dtype, "eager"]
        assert most / 100 < ours < most  # of this dtype, and no other
        assert ours < 1.3 * own  # and no worse than without
    assert result.largest["float32", "fusedmoe"] < 3e-5  # of any token
    assert result.generated["fusedmoe"] == result.generated["eager"]
    assert len(set(result.generated["eager"][-12:])) > 2  # it wrote something
    (group,) = result.explanation.groups
    assert (group.kind, len(group.names)) == ("GptOssExperts", 3)
    assert "\nthe same\n" in capsys.readouterr().out


def rules_of(explanation):
    return {step.rule: step.ops for step in explanation.steps if step.rule}


def test_the_activation_and_its_rules():
    result = example("custom_activation").main(["--cap", "0.3"])
    assert rules_of(result["before"]) == {}
    assert rules_of(result["after"]) == {
        "example.softcap_swiglu_scale": ("1.SoftcapSwiGLU", "2.Scale"),
        "example.softcap_swiglu_scale_backward": ("2.ScaleGrad", "2.DScale", "1.DSoftcapSwiGLU"),
    }
    assert max(result["errors"]) < 1e-13
    assert len(result["norms"]) == 5
    assert min(result["norms"]) > 0.1  # zeros would be as far off as they are long


def test_the_story(capsys):
    told = example("reading_explain").main([])
    printed = capsys.readouterr().out
    assert [bool(chapter.strict_error) for chapter in told] == [True, True, False, False, False, False]
    assert "0.GroupedLinear" in told[0].strict_error
    explained = [chapter.explanation for chapter in told]
    assert not rules_of(explained[0])
    assert all(rule.startswith("sm90.") for explanation in explained for rule in rules_of(explanation))
    assert [sum(step.rule is None for step in e.steps) for e in explained[1:]] == [8, 3, 3, 3, 0]
    assert len(explained[-1].steps) == 6
    assert "raise_if_missed() raises:" in printed
    assert told[0].strict_error in printed
    assert printed.endswith(f"{explained[-1]}\n")


needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def on_two_ranks(name, *options):
    """The output of an example under torchrun."""
    return printed_by(name, *options, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))


def printed_by(name, *options, launcher=()):
    """The output of an example in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    script = [str(EXAMPLES / f"{name}.py"), *options]
    command = [sys.executable, *launcher, *script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
@needs_distributed
@pytest.mark.distributed
def test_two_ranks_share_the_experts():
    printed = on_two_ranks("expert_parallel")
    assert "rank 0 of 2" in printed
    assert "on cpu: 4 of 8 experts per rank" in printed
    steps = re.findall(r"step +\d+: loss (\S+), rows per expert \[(.*)\]", printed)
    losses, loads = [float(loss) for loss, _ in steps], [[int(n) for n in load.split(",")] for _, load in steps]
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 3
    assert sum(loads[0]) == 2 * (96 + 112)  # two experts for each token of both ranks
    last = re.search(r"one process with all tokens: loss (\S+), difference (\S+)", printed)
    assert float(last[1]) == pytest.approx(losses[-1], abs=2e-4)
    assert float(last[2]) < 1e-4


def losses_in(printed):
    return [float(loss) for loss in re.findall(r"^step +\d+: loss (\S+), busiest expert \S+x its share", printed, re.M)]


def test_a_step_for_a_cuda_graph(capsys, monkeypatch):
    module = example("cuda_graph_training")
    assert module.main(["--steps", "40", "--layers", "1"]) == 0
    losses = losses_in(capsys.readouterr().out)
    assert losses[0] > 5.5  # about log(256)
    assert losses[-1] < losses[0] - 2
    assert module.main(["--compare", "3", "--layers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 3 steps differ" in printed
    first, second = losses_in(printed)[:3], losses_in(printed)[3:]
    assert first == second
    assert len({*first}) == 3
    monkeypatch.setattr(module.Trainer, "begin_again", lambda _: None)
    assert module.main(["--compare", "2", "--layers", "1"]) == 1
    assert "2 of 2 steps differ" in capsys.readouterr().out


@needs_distributed
@pytest.mark.distributed
def test_a_step_for_a_cuda_graph_on_two_ranks():
    printed = on_two_ranks("cuda_graph_training", "--compare", "2")
    assert "0 of 2 steps differ" in printed
    assert len(losses_in(printed)) == 4


@needs_distributed
@pytest.mark.distributed
@in_ranks("ranks")
def test_gradients_for_a_cuda_graph_are_those_of_one_process(rank):
    module = example("cuda_graph_training")
    module.BALANCE = 0.0  # the mean of this loss over ranks is not that of all tokens
    ep = fm.ExpertParallel(engine="allgather", max_tokens=module.BATCH * module.CONTEXT)
    ours, whole = (module.Trainer(1, 8, torch.device("cpu"), ranks) for ranks in (ep, None))
    generator = torch.Generator().manual_seed(0)
    whole.ids = torch.randint(256, (2, 2 * module.BATCH, module.CONTEXT), generator=generator)
    ours.ids = whole.ids.chunk(2, dim=1)[rank]
    loads = [trainer.gradients()[1] for trainer in (ours, whole)]
    experts = fm.expert_parallel.shards(ours.model)
    assert len(experts) == 2
    want = {name: p.grad.chunk(2)[rank] if name in experts else p.grad for name, p in whole.model.named_parameters()}
    compared({name: p.grad for name, p in ours.model.named_parameters()}, want, within=1e-5)
    assert all(grad.any() for grad in want.values())
    assert torch.equal(ep.sum_over_ranks(loads[0]), loads[1])


# ---- qwen3_moe_expert_parallel: a checkpoint of transformers on several ranks ----------------------------------------

NAME, FLAGS = "qwen3_moe_expert_parallel", ["--batch", "8", "--length", "32", "--lr", "2e-3"]


@pytest.fixture
def qwen3_moe(tmp_path):
    """The folder of a checkpoint in several files, whose tokenizer has one token for each byte of ASCII."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**example(NAME).TINY, norm_topk_prob=True)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 5
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(byte_level)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained(rank, *arguments):
    """The losses of a run of the example, of which this process is a rank."""
    module = example(NAME)
    return module.train(module.parsed([*FLAGS, *arguments]), torch.device("cpu"))["losses"]


def trained_by_transformers(folder, steps, layers):
    """The losses and the model of one process that has all ranks' text, with the eager experts of transformers."""
    import transformers

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, num_hidden_layers=layers, experts_implementation="eager", output_router_logits=True
    )
    text = example(NAME).TEXT.read_text("utf-8")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for ids in tokens[: steps * 8 * 32].view(steps, 8, 32):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def same_losses(losses, wanted):
    """In fp32 they differ by 3e-7; after --resume without the state of AdamW, by 2e-2."""
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0)


@needs_distributed
@pytest.mark.distributed
@pytest.mark.parametrize("experts", ["fusedmoe", "stock"])
@pytest.mark.parametrize("layers", [1, 2])
def test_ranks_train_a_checkpoint_as_transformers_does(ranks, qwen3_moe, experts, layers):
    wanted, _ = trained_by_transformers(qwen3_moe, 6, layers)
    assert wanted[-1] < wanted[0] - 0.5
    options = "--model", str(qwen3_moe), "--steps", "6", "--experts", experts, "--layers", str(layers)
    for losses in ranks.run(trained, *options):
        same_losses(losses, wanted)


def drawn(rank, *arguments):
    """The losses of a run with drawn experts, their largest share over the mean, and the imbalance of the ranks."""
    module, indices = example(NAME), []
    imbalance = module.imbalance
    module.imbalance = lambda chosen, count: indices.extend(chosen) or imbalance(chosen, count)
    options = "--draw-experts", "--steps", "6", *arguments
    result = module.train(module.parsed([*FLAGS, *options]), torch.device("cpu"))
    loads = torch.stack([index.flatten().bincount(minlength=8) for index in indices]).float()
    assert all((index.sort(1).values.diff(dim=1) > 0).all() for index in indices)
    return result["losses"], (loads.amax() / loads.mean()).item(), result["imbalance"]


@needs_distributed
@pytest.mark.distributed
def test_experts_may_be_drawn(ranks):
    pytest.importorskip("transformers")
    (losses, most, imbalance), (_, other, _) = ranks.run(drawn)
    assert losses[-1] < losses[0] - 0.3
    assert max(most, other) < 1.5  # 32 slots per layer, rank and expert, with a deviation of 5
    assert 1 <= imbalance < 1.3
    (stock, *_), _ = ranks.run(drawn, "--experts", "stock")
    same_losses(losses, stock)


@needs_distributed
@pytest.mark.distributed
def test_a_capacity_that_suffices_changes_nothing(ranks):
    pytest.importorskip("transformers")
    (losses, *_), _ = ranks.run(drawn)
    (limited, *_), _ = ranks.run(drawn, "--capacity", "1.5")
    same_losses(limited, losses)
    with pytest.raises(AssertionError, match="capacity"):
        ranks.run(drawn, "--capacity", "0.5")


def tensors_read(rank, folder):
    """The names of the tensors that this rank reads from a checkpoint."""
    module, names = example(NAME), []
    stored = module.checkpoint(Path(folder))
    module.checkpoint = lambda _: lambda name, shape: names.append(name) or stored(name, shape)
    module.train(module.parsed([*FLAGS, "--model", folder, "--layers", "1", "--steps", "1"]), torch.device("cpu"))
    return names


@needs_distributed
@pytest.mark.distributed
def test_a_rank_reads_its_experts_only(ranks, qwen3_moe):
    expert = re.compile(r"model\.layers\.0\.mlp\.experts\.(\d)\.\w+\.weight")
    for rank, names in enumerate(ranks.run(tensors_read, str(qwen3_moe))):
        numbers = [int(found[1]) for name in names if (found := expert.fullmatch(name))]
        assert sorted(numbers) == sorted(3 * [4 * rank + i for i in range(4)])
        assert not any(".layers.1." in name for name in names)


@needs_distributed
@pytest.mark.distributed
def test_a_run_on_four_ranks_goes_on_with_two_and_one(ranks, four, qwen3_moe, tmp_path):
    wanted, model = trained_by_transformers(qwen3_moe, 6, 2)
    saved, exported = str(tmp_path / "saved"), tmp_path / "exported"
    first, *_ = four.run(trained, "--model", str(qwen3_moe), "--steps", "3", "--save", saved)
    same_losses(first, wanted[:3])
    later = "--model", str(qwen3_moe), "--steps", "6", "--resume", saved
    same_losses(json.loads(printed_by(NAME, *FLAGS, *later).splitlines()[-1])["losses"], wanted[3:])
    on_two, *_ = ranks.run(trained, *later, "--export", str(exported))
    same_losses(on_two, wanted[3:])
    assert len([*exported.glob("*.safetensors")]) == 2
    before, got = (type(model).from_pretrained(folder).state_dict() for folder in (qwen3_moe, exported))
    for name, parameter in model.state_dict().items():
        change = parameter - before[name]
        assert (got[name] - parameter).norm() < 1e-3 * change.norm(), name


class ReadsOfValues(TorchDispatchMode):
    """Counts the ops after which a host has a value: on a GPU, it waits for the device there."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.ops.append(op)
        return op(*args, **kwargs or {})


def reads_in_two_steps(rank, experts, patch):
    """The ops that read values in the third and fourth step of five. Only the last one prints."""
    module, mode, done, step = example(NAME), ReadsOfValues(), [], torch.optim.AdamW.step

    def counted(optimizer, *args):
        step(optimizer, *args)
        done.append(optimizer)
        if len(done) == 2:
            mode.__enter__()
        elif len(done) == 4:
            mode.__exit__(None, None, None)

    torch.optim.AdamW.step = counted
    try:
        if patch:  # a step with transformers' mask reads a value
            module.AttentionInterface = type("Unregistered", (), {"register": lambda name, function: None})
            module.Qwen3MoeForCausalLM = lambda config, make=module.Qwen3MoeForCausalLM: (
                setattr(config, "_attn_implementation", "sdpa") or make(config)
            )
        module.train(module.parsed([*FLAGS, "--steps", "5", "--experts", experts]), torch.device("cpu"))
    finally:
        torch.optim.AdamW.step = step
    return len(mode.ops)


@needs_distributed
@pytest.mark.distributed
@pytest.mark.parametrize("experts", ["fusedmoe", "stock"])
def test_no_host_waits_in_a_step(ranks, experts):
    pytest.importorskip("transformers")
    assert ranks.run(reads_in_two_steps, experts, False) == [0, 0]


@needs_distributed
@pytest.mark.distributed
def test_the_mask_of_transformers_lets_the_host_wait(ranks):
    """So the test above can fail."""
    pytest.importorskip("transformers")
    assert ranks.run(reads_in_two_steps, "fusedmoe", True) == [2, 2]


@needs_distributed
def test_the_last_line_of_a_run_is_its_result():
    """In a process of its own: torch does not free a model under FSDP2 that was trained."""
    pytest.importorskip("transformers")
    options = "--steps", "5", "--every", "2", "--recipe", "fp8_block"
    *printed, loads, last = printed_by(NAME, *options).splitlines()
    result = json.loads(last)
    assert loads == "the busiest rank has 1.00 times the mean of the chosen slots"
    assert result["imbalance"] == 1
    assert len(result["losses"]) == 5
    assert result["losses"][-1] < result["losses"][0] - 1
    assert result["tokens_per_s"] > 0
    steps = [re.match(r"step (\d): loss (\S+), \S+ tokens/s per rank, GiB 0.0$", line) for line in printed[-3:]]
    assert [int(step[1]) for step in steps] == [2, 4, 5]
    assert float(steps[-1][2]) == pytest.approx(result["losses"][-1], abs=1e-6)


def test_lora_learns(capsys):
    pytest.importorskip("transformers")
    example("olmoe_lora").main(["--steps", "8"])
    printed = capsys.readouterr().out
    # 2 layers of 8 experts; A and B of gate_up (128, 64) and of down (64, 64)
    trained = 2 * 8 * 8 * ((64 + 128) + (64 + 64))
    assert f"trainable parameters: {trained:,} of " in printed
    before, after = (float(re.search(rf"loss {when}: +([0-9.]+)", printed)[1]) for when in ("before", "after"))
    assert after < before - 0.5
