"""Random bits: the published vectors, and independence of how they are asked for."""

from __future__ import annotations

import pytest
import torch
from llmcore.ops.philox import bits, gumbel, philox4x32

# kat_vectors of Random123 1.14 (philox4x32 10 rounds): counter, key, expected words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    a, b, c, d = (word(value) for value in counter)
    words = philox4x32((a, b, c, d), (word(key[0]), word(key[1])))
    assert tuple(int(w) for w in words) == expected


def test_an_index_takes_its_lane_of_the_shared_counter() -> None:
    seed, choice, position = word(-2), word(3), word(77)
    words = philox4x32((word(5), position, choice, word(1)), (word(0xFFFFFFFE), word(0xFFFFFFFF)))
    drawn = bits(seed, choice, position, torch.arange(20, 24), 1)
    assert drawn.tolist() == [int(w) for w in words]


def test_every_part_of_the_key_matters() -> None:
    indices = torch.arange(64)
    base = bits(word(1), word(0), word(0), indices, 0)
    for seed, choice, position, level in (
        (2, 0, 0, 0),
        (1, 1, 0, 0),
        (1, 0, 1, 0),
        (1 + (1 << 32), 0, 0, 0),
        (1, 0, 0, 1),
    ):
        other = bits(word(seed), word(choice), word(position), indices, level)
        assert (other == base).sum() == 0


def test_gumbel_is_finite_at_both_ends() -> None:
    ends = gumbel(torch.tensor([0, 0xFFFFFFFF]))
    assert -2.82 < float(ends[0]) < -2.81
    assert 16.63 < float(ends[1]) < 16.64


def test_gumbel_has_the_mean_of_its_distribution() -> None:
    numbers = gumbel(bits(word(9), word(0), word(0), torch.arange(200_000), 0))
    assert abs(float(numbers.mean()) - 0.57722) < 0.01
    assert abs(float(numbers.var()) - 1.64493) < 0.03
