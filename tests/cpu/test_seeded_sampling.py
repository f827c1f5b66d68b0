"""Seeded sampling draws from the probabilities it is given, and from nothing else than (seed, position, token)."""

import math
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.exploring import examples
from verl_mux_cpu.seeded_sampling import add_seeds, gumbel, sample

# Upper 0.1 % points of chi-square, from any table: with fixed seeds these tests cannot flicker.
CHI_SQUARE = {1: 10.83, 3: 16.27, 7: 24.32, 15: 37.70, 63: 103.44}


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draw(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return sample(probabilities.expand(len(seeds), -1), seeds, positions)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class TestDistribution:
    @pytest.mark.parametrize("weights", [[1, 1], [1, 2, 3, 4], [5, 1, 1, 1, 1, 1, 1, 9], list(range(1, 17))])
    @pytest.mark.parametrize("across", ["positions", "seeds"])
    def test_tokens_come_as_often_as_their_probability_says(self, weights, across):
        probabilities = torch.tensor(weights, dtype=torch.float32) / sum(weights)
        many, one = torch.arange(20_000), torch.full((20_000,), 7)
        tokens = draw(probabilities, *((one, many) if across == "positions" else (many, one)))
        counts = torch.bincount(tokens.long(), minlength=len(weights)).double()
        assert chi_square(counts, probabilities.double()) < CHI_SQUARE[len(weights) - 1]

    @pytest.mark.parametrize("beside", ["positions", "seeds"])
    def test_neighbours_are_independent(self, beside):
        probabilities, positions = torch.full((8,), 1 / 8), torch.arange(40_001)
        first = draw(probabilities, torch.full((40_001,), 100), positions).long()
        other = first[1:] if beside == "positions" else draw(probabilities, torch.full((40_000,), 101), positions[:-1]).long()
        pairs = torch.bincount(first[:-1] * 8 + other, minlength=64).double()
        assert chi_square(pairs, torch.full((64,), 1 / 64)) < CHI_SQUARE[63]

    @pytest.mark.parametrize(("probabilities", "drawn"), [((0.0, 0.5, 0.0, 0.5), {1, 3}), ((0.0, 0.0, 1.0), {2})])
    def test_a_token_without_probability_is_never_drawn(self, probabilities, drawn):
        assert set(draw(torch.tensor(probabilities), torch.arange(5000), torch.zeros(5000)).tolist()) == drawn

    def test_the_noise_is_gumbels(self):
        noise = gumbel(numbers(5), numbers(0), 200_000).flatten()
        assert noise.isfinite().all()
        assert noise.mean() == pytest.approx(0.57722, abs=0.01)
        assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.03)


MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """As published (Steele, Lea and Flood 2014), in Python's own integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (2**31 - 1, 131_072), (987654321, 77)])
def test_the_hash_under_the_noise_is_splitmix64(seed, position):
    row = splitmix64((seed * 0xBF58476D1CE4E5B9 + position) & MASK)
    cells = [splitmix64((row + token * 0x9E3779B97F4A7C15) & MASK) for token in range(64)]
    uniform = [((cell >> 11) + 0.5) * 2.0**-53 for cell in cells]
    expected = [-math.log(-math.log(u)) for u in uniform]
    assert gumbel(numbers(seed), numbers(position), 64)[0].tolist() == pytest.approx(expected, rel=1e-12)


class TestWhatATokenDependsOn:
    @settings(max_examples=examples(50))
    @given(data=st.data(), size=st.integers(1, 12))
    def test_a_request_gets_the_same_token_in_any_company_and_place(self, data, size):
        generator = torch.Generator().manual_seed(size)
        probabilities = torch.rand(size, 50, generator=generator).softmax(dim=1)
        seeds = numbers(*data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)))
        positions = numbers(*data.draw(st.lists(st.integers(0, 10_000), min_size=size, max_size=size)))
        together = sample(probabilities, seeds, positions)
        order = torch.tensor(data.draw(st.permutations(range(size))))
        assert sample(probabilities[order], seeds[order], positions[order]).equal(together[order])
        alone = [sample(probabilities[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(size)]
        assert torch.cat(alone).equal(together)

    def test_other_seeds_and_other_positions_give_other_tokens(self):
        probabilities = torch.full((1, 1000), 1 / 1000)
        tokens = {(s, p): int(sample(probabilities, numbers(s), numbers(p))) for s in range(20) for p in range(20)}
        assert len(set(tokens.values())) > 300  # of 400 draws among 1000; about 330 are expected
        assert tokens[3, 4] != tokens[4, 3]

    def test_the_tokens_of_a_seed_are_the_same_in_every_version(self):
        # Written down once: a change here changes every run that is meant to be repeated.
        probabilities = torch.full((4, 32000), 1 / 32000)
        tokens = sample(probabilities, numbers(0, 1, 2**31 - 1, 42), numbers(0, 1, 100, 4096))
        assert tokens.tolist() == [22783, 27362, 31565, 18072] and tokens.dtype == torch.int32

    def test_without_seeds_it_is_torchs_own_sampling(self):
        probabilities = torch.rand(6, 30).softmax(dim=1)
        torch.manual_seed(4)
        tokens = sample(probabilities)
        torch.manual_seed(4)
        assert tokens.equal(torch.multinomial(probabilities, 1).view(-1).to(torch.int32))

    def test_each_request_brings_its_seed_into_the_batch(self):
        requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in (5, None, 2**31 - 1)]
        info, batch = SimpleNamespace(), SimpleNamespace(reqs=requests, device="cpu")
        assert add_seeds(info, batch, 32000) is info
        assert info.sampling_seed.tolist() == [5, 0, 2**31 - 1] and info.sampling_seed.dtype == torch.int64
