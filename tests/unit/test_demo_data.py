"""The text of the demo: what is held out is unseen, batches follow from the seed, and the bigram model is one."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from fusedmoe.commands.demo.data import (
    batches,
    bigram_bits_per_byte,
    chunks_of,
    load_split,
    unique_paragraphs,
    windows,
)
from fusedmoe.commands.demo.options import job_of

GIVEN = {"device": "cpu", "steps": 7, "batch": 4}
TEXT = torch.arange(200, dtype=torch.uint8)


def words_of(paragraphs):
    return {" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()}


def paragraphs_of(text):
    return bytes(text.tolist()).decode().split("\n\n")


@pytest.fixture(scope="module")
def split():
    return load_split()


def test_a_paragraph_that_occurs_twice_is_kept_once_and_pages_are_in_sorted_order():
    pages = {"b": "two\n\none  more\n", "a": "one\nmore\n\n\n\n   indented\n"}
    assert unique_paragraphs(pages) == ["one\nmore", "   indented", "two"]


def test_chunks_are_whole_paragraphs_in_order():
    chunks = chunks_of(["a" * 10, "b" * 10, "ü" * 30, "d"], chunk_bytes=20)
    assert chunks == [b"a" * 10 + b"\n\n" + b"b" * 10 + b"\n\n", "ü".encode() * 30 + b"\n\n", b"d\n\n"]


def test_no_paragraph_is_on_both_sides_of_the_split(split):
    train, held_out = words_of(paragraphs_of(split.train)), words_of(paragraphs_of(split.held_out))
    assert len(held_out) > 100
    assert not train & held_out


def test_the_split_keeps_every_distinct_paragraph_and_a_tenth_is_held_out(split):
    from pydoc_data.topics import topics

    everything = words_of(paragraph for page in topics.values() for paragraph in page.split("\n\n"))
    assert words_of(paragraphs_of(split.train)) | words_of(paragraphs_of(split.held_out)) == everything
    assert len(split.held_out) / (len(split.held_out) + len(split.train)) == pytest.approx(0.1, abs=0.02)
    assert len(split.train) > 250_000


def test_the_split_is_the_same_each_time_and_whatever_the_order_of_the_pages(split):
    from pydoc_data.topics import topics

    again = load_split(dict(reversed(list(topics.items()))))
    assert torch.equal(split.train, again.train)
    assert torch.equal(split.held_out, again.held_out)


def test_targets_are_the_inputs_one_byte_on():
    inputs, targets = windows(TEXT, torch.tensor([0, 7, 183]), 16)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs + 1, targets)
    assert inputs[:, 0].tolist() == [0, 7, 183]
    assert inputs.dtype == targets.dtype == torch.int64


def test_every_window_of_the_text_can_come_up():
    starts = batches(TEXT[:12], job_of(GIVEN | {"context": 8, "batch": 64}))
    assert set(starts.flatten().tolist()) == {0, 1, 2, 3}


def test_batches_depend_on_the_seed_and_are_a_prefix_of_those_of_more_steps():
    torch.randn(10)  # the global generator is another one
    job = GIVEN | {"context": 8}
    starts = batches(TEXT, job_of(job))
    assert starts.shape == (GIVEN["steps"], GIVEN["batch"])
    assert torch.equal(starts, batches(TEXT, job_of(job | {"steps": 50}))[: GIVEN["steps"]])
    assert not torch.equal(starts, batches(TEXT, job_of(job | {"seed": 1})))


def test_bigram_agrees_with_counting_in_plain_python(split):
    train, held_out = split.train.tolist(), split.held_out.tolist()
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    total = 0.0
    for a, b in pairwise(held_out):
        total -= math.log2((pairs[a, b] + 0.05) / (firsts[a] + 256 * 0.05))
    assert bigram_bits_per_byte(split.train, split.held_out) == pytest.approx(total / (len(held_out) - 1), rel=1e-12)


def test_bigram_of_a_text_without_pairs_is_eight_bits_and_of_a_sure_one_almost_none():
    empty = torch.zeros(1, dtype=torch.uint8)
    assert bigram_bits_per_byte(empty, TEXT) == pytest.approx(8.0)
    cycle = torch.tensor([1, 2, 3] * 1000, dtype=torch.uint8)
    assert bigram_bits_per_byte(cycle, cycle, smoothing=1e-6) == pytest.approx(0.0, abs=1e-3)


def test_the_bar_is_about_as_low_as_a_bigram_model_can_put_it(split):
    bar = bigram_bits_per_byte(split.train, split.held_out)
    best = min(bigram_bits_per_byte(split.train, split.held_out, s) for s in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003))
    assert bar < best + 0.005
    assert 3.0 < bar < 4.0
