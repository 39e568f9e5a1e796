"""How clusters draw their tiles from a counter: a model of `tiles.next_tile` and `tiles.finish_drawing` in Python."""

import random

import pytest

CHUNK = 32  # experts that a scheduler warp reads at once


def walk(number, clusters, tiles_of, counter, computed):
    """A cluster's walk over the experts, as in `tiles.schedule_ragged_m`. It pauses where others may draw."""
    tile, turn, chunk, before = number, 0, 0, 0
    while chunk < len(tiles_of):
        total = sum(tiles_of[chunk : chunk + CHUNK])
        if tile >= before + total:
            chunk += CHUNK
            before += total
        else:
            computed.append(tile)
            yield
            tile = clusters + counter[0]
            counter[0] += 1
            turn += 1
        yield
    if turn > 0 and tile == clusters + before - 1:
        assert counter[0] == before, "the others have drawn"
        counter[0] = 0
        computed.append("reset")


def launch(clusters, tiles_of, counter, rng):
    """One launch in a random order: each step is that of any cluster, and some clusters are slow."""
    computed = []
    running = [walk(number, clusters, tiles_of, counter, computed) for number in range(clusters)]
    weights = [rng.choice([1, 1, 30]) for _ in running]
    while running:
        (i,) = rng.choices(range(len(running)), weights)
        try:
            next(running[i])
        except StopIteration:
            del running[i], weights[i]
    return computed


def uneven(tiles, experts, rng):
    """Tiles per expert that add up to a number; some experts have none."""
    tiles_of = [0] * experts
    for _ in range(tiles):
        tiles_of[int(experts * rng.random() ** 3)] += 1
    rng.shuffle(tiles_of)
    return tiles_of


@pytest.mark.parametrize("experts", [1, 9, 32, 33, 129])
@pytest.mark.parametrize("clusters", [1, 2, 5, 66])
def test_every_tile_is_computed_once_and_the_counter_returns_to_zero(clusters, experts):
    rng = random.Random(clusters * experts)
    counter = [0]  # of all launches, as on a stream
    for tiles in [*range(clusters + 5), 4 * clusters + 1, 0, 3 * clusters]:
        for _ in range(3):
            computed = launch(clusters, uneven(tiles, experts, rng), counter, rng)
            assert counter == [0]
            assert computed.count("reset") == (tiles > 0)
            assert sorted(tile for tile in computed if tile != "reset") == list(range(tiles))


@pytest.mark.parametrize("clusters", [1, 2, 66])
def test_a_launch_without_tiles_does_not_touch_the_counter(clusters):
    counter = [7]
    assert launch(clusters, [0] * 40, counter, random.Random(0)) == []
    assert counter == [7]
