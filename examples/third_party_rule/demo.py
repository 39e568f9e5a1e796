"""Explain the same experts without and with the rules of this package, and compare their results."""

import torch
from fusedmoe_softcap import RULES, Softcap

import fusedmoe as fm


def call(experts: fm.Sequential, x: torch.Tensor, splits: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    y = experts(x, splits=splits)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *experts.parameters()])]


def main() -> None:
    torch.manual_seed(0)
    experts = fm.Sequential(fm.GroupedLinear(4, 32, 48), Softcap(5.0), fm.GroupedLinear(4, 48, 32))
    x, splits = torch.randn(20, 32), torch.tensor([6, 0, 9, 3])  # the last two rows belong to no expert

    with fm.disabled(*(rule.name for rule in RULES)):
        print("without the rules:", experts.explain(x, splits=splits), sep="\n")
        expected = call(experts, x, splits)

    found = [rule.name for rule in fm.rules() if rule in RULES]
    print("\nfound through the entry point:", ", ".join(found) or "nothing: this package is not installed")
    print(experts.explain(x.clone().requires_grad_(), splits=splits))
    got = call(experts, x, splits)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    print("\nsame output and gradients, zeros after the last expert's rows:", bool((got[0][18:] == 0).all()))


if __name__ == "__main__":
    main()
