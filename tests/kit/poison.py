"""Memory that may not be read, or that a kernel forgets to write, shows."""

from contextlib import contextmanager

import torch


@contextmanager
def nan_in_new_tensors():
    """What `torch.empty` returns is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def inside_nan(t, margin=None):
    """The same values, with NaN on all sides. By default, rows begin at multiples of 16 bytes, and vectors do not."""
    margin = margin or (1 if t.dim() == 1 else 16 // t.element_size())
    margins = (*[1] * (t.dim() - 1), margin)
    shape = [extent + 2 * beside for extent, beside in zip(t.shape, margins, strict=True)]
    around = torch.full(shape, torch.nan, device=t.device).to(t.dtype)
    inside = tuple(slice(beside, beside + extent) for extent, beside in zip(t.shape, margins, strict=True))
    return around[inside].copy_(t)


def guarded_tensors(monkeypatch, owner, name, margin=8):
    """Whatever ``owner.name`` makes has rows of 7 around it. Returns a function that checks them, and the shapes. The
    ``new_empty`` of tensors stands for their ``new_empty_strided`` of transposed matrices, too.
    """
    made, original = [], getattr(owner, name)

    def within(*arguments, **how):
        *of, shape = [arguments[0], arguments[1:]] if owner is torch.Tensor else [arguments[0]]
        if len(shape) != 2:
            return original(*arguments, **how)
        around = original(*of, (shape[0] + 2 * margin, *shape[1:]), **how)
        around.view(torch.uint8).fill_(7)
        made.append(around)
        return around[margin:-margin]

    def check():
        for around in made:
            for edge in (around[:margin], around[-margin:]):
                assert (edge.contiguous().view(torch.uint8) == 7).all()
        return [(len(t) - 2 * margin, *t.shape[1:]) for t in made]

    def transposed(like, shape, strides, **how):
        assert strides == (1, shape[0])
        return within(like, *shape[::-1], **how).mT

    monkeypatch.setattr(owner, name, within)
    if (owner, name) == (torch.Tensor, "new_empty"):
        monkeypatch.setattr(torch.Tensor, "new_empty_strided", transposed)
    return check
