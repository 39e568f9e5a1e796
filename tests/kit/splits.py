"""Rows per expert, and routings: fixed ones, and strategies of hypothesis."""

import torch
from hypothesis import strategies as st

SPLITS, ROWS = torch.tensor([2, 0, 3]), 6  # an expert without rows, and a row of no expert
UNEVEN, UNEVEN_ROWS, TAIL = torch.tensor([37, 0, 50, 1]), 93, 5  # no whole blocks of any format; five rows of no expert
ROUTING = torch.tensor([[0, 1], [1, 2], [2, 5], [1, -1]])  # of 3 experts, with sentinels


def ends(*counts):
    """The offsets that `quantize` and kernels take: int32, the end of each expert's rows."""
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def expert_rows(splits):
    """(expert, first row, end) of every expert, those without rows too."""
    first = 0
    for expert, count in enumerate(splits.tolist()):
        yield expert, first, first + count
        first += count


def slots_by_expert(expert_index, num_experts):
    """Slots (token, k) in the order of their rows: by expert, then by token, then by k. Sentinels are left out."""
    slots = [(t, k) for t in range(expert_index.shape[0]) for k in range(expert_index.shape[1])]
    ids = expert_index.tolist()
    return [(t, k) for e in range(num_experts) for t, k in slots if ids[t][k] == e]


@st.composite
def splits_and_rows(draw, max_experts=5, max_rows=6):
    """``(splits, R)``: experts without rows, with one, with all of them; R may be larger than the sum."""
    experts = draw(st.integers(1, max_experts))
    kind = draw(st.sampled_from(["any", "any", "one expert has all", "at most one row", "no rows"]))
    if kind == "any":
        counts = draw(st.lists(st.integers(0, max_rows), min_size=experts, max_size=experts))
    elif kind == "one expert has all":
        counts = [0] * experts
        counts[draw(st.integers(0, experts - 1))] = draw(st.integers(1, 2 * max_rows))
    elif kind == "at most one row":
        counts = draw(st.lists(st.integers(0, 1), min_size=experts, max_size=experts))
    else:
        counts = [0] * experts
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return torch.tensor(counts, dtype=dtype), sum(counts) + draw(st.sampled_from([0, 0, 1, 3]))


@st.composite
def routings(draw, max_tokens=5, max_chosen=3, max_experts=4):
    """``(expert_index, E)``: ids of experts, the same one twice at times, and sentinels on either side of them."""
    experts = draw(st.integers(1, max_experts))
    tokens, chosen = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_chosen))
    one_id = st.one_of(st.integers(0, experts - 1), st.sampled_from([experts, -1, 99]))
    ids = draw(st.lists(one_id, min_size=tokens * chosen, max_size=tokens * chosen))
    return torch.tensor(ids, dtype=torch.int64).view(tokens, chosen), experts
