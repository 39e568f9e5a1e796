"""The picture of the experts' load: what is drawn of which loads."""

import importlib.util
import sys

import pytest
import torch

import fusedmoe as fm

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def picture(figure):
    """The numbers that are drawn."""
    (image,) = figure.axes[0].get_images()
    return torch.as_tensor(image.get_array().filled())


@needs_matplotlib
def test_one_step_is_a_row_for_each_layer():
    _, stats = fm.MoE(8, 4, num_experts=4, top_k=2)(torch.randn(6, 8), return_stats=True)
    for loads in (stats, stats.load, [stats], [[stats]]):
        torch.testing.assert_close(picture(fm.plot_expert_load(loads))[0], stats.load.double() / 3)
    figure = fm.plot_expert_load([torch.tensor([4, 0, 2, 2]), torch.tensor([0, 0, 0, 8])])
    assert picture(figure).tolist() == [[2, 0, 1, 1], [0, 0, 0, 4]]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["layer 0", "layer 1"]
    assert figure.axes[0].get_xlabel() == "expert"


@needs_matplotlib
def test_several_steps_are_a_column_each():
    """Experts of all layers below each other, as the demo draws them."""
    loads = [torch.tensor([[3, 1], [2, 2]]), torch.tensor([[0, 4], [4, 0]]), torch.tensor([[2, 2], [0, 0]])]
    figure = fm.plot_expert_load(loads)
    assert picture(figure).tolist() == [[1.5, 0, 1], [0.5, 2, 1], [1, 2, 0], [1, 0, 0]]
    assert figure.axes[0].get_xlabel() == "step"
    many = torch.tensor([[1, 3], [3, 1]]).repeat(500, 1).view(1000, 1, 2)
    means = picture(fm.plot_expert_load(many))
    assert means.shape == (2, 200)
    torch.testing.assert_close(means, torch.ones_like(means), rtol=0, atol=0.11)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"fusedmoe\[demo\]"):
        fm.plot_expert_load(torch.tensor([1, 1]))
