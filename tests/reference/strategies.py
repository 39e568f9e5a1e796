"""Strategies of hypothesis: rows per expert, and routings."""

import torch
from hypothesis import strategies as st


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
