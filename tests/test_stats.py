"""Statistics: agreement with scipy, invariances, and small seeded simulations of what MEASURES promises."""
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats as reference

from ragbench.core.errors import BadInput
from ragbench.measures.flips import sign_flip
from ragbench.measures.intervals import cluster_sums
from ragbench.measures.stats import (
    _test_binary, all_pairs, benjamini_hochberg, cases_needed, comparison_sentence, explored, holm, mcnemar_power, mean_interval,
    minimum_detectable, one_sided_bound, pair_ps, paired, percentiles, standings, weakest_stratum)


def correlated(rng, n, rates, correlation=.6):
    """0/1 scores, systems x cases: a normal shared by the systems of a case, cut at each system's rate."""
    z = math.sqrt(correlation) * rng.standard_normal(n) + math.sqrt(1 - correlation) * rng.standard_normal((len(rates), n))
    return (z < reference.norm.ppf(rates)[:, None]).astype(float)


def clustered(rng, icc, rate=.7, groups=36, size=25):
    """Two exchangeable systems with 0/1 scores whose rate differs by cluster."""
    rates = rng.beta(rate * (1 - icc) / icc, (1 - rate) * (1 - icc) / icc, (2, groups))
    return (rng.random((2, groups * size)) < np.repeat(rates, size, axis=1)).astype(float)


def within(bound, runs):
    """A bound on an error rate plus three standard errors of a small simulation."""
    return bound + 3 * math.sqrt(bound * (1 - bound) / runs)


# agreement

@pytest.mark.parametrize(("win", "loss", "tie"), [(16, 4, 110), (1, 0, 20), (7, 0, 3), (5, 5, 5), (40, 61, 500)])
def test_mcnemar_is_scipys_binomial_test(win, loss, tie):
    a = np.r_[np.zeros(win), np.ones(loss), np.ones(tie)]
    b = np.r_[np.ones(win), np.zeros(loss), np.ones(tie)]
    assert paired(a, b, range(len(a))).p == pytest.approx(reference.binomtest(win, win + loss, .5).pvalue, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_sign_flip_is_scipys_permutation_test(seed):
    rng = np.random.default_rng(seed)
    a, b, c = rng.random(40).round(1), rng.random(40).round(1), rng.integers(0, 9, 40)
    sums = np.bincount(c, b - a)
    expected = reference.permutation_test((sums,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    assert paired(a, b, c).p == pytest.approx(expected, abs=1e-12)
    assert pair_ps(np.column_stack([a, b]), [(0, 1)], c)[0] == pytest.approx(expected, abs=1e-12)


def test_drawn_flips_come_near_the_exact_p():
    rng = np.random.default_rng(3)
    a, b = rng.random(15), rng.random(15) + .15
    every = np.array(list(product((-1, 1), repeat=15))) @ (b - a)
    exact = np.mean(np.abs(every) >= abs((b - a).sum()) - 1e-9)
    assert paired(a, b, range(15)).p == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))
    assert pair_ps(np.column_stack([a, b]), [(0, 1)], range(15), flips=100_000)[0] == pytest.approx(exact, abs=.006)


@pytest.mark.parametrize("groups", [9, 12, 40])
def test_the_interval_holds_what_the_test_does_not_reject(groups):
    rng = np.random.default_rng(groups)
    c = np.r_[np.arange(groups), rng.integers(0, groups, 60)]
    sums = cluster_sums(np.column_stack([rng.normal(.1, .3, len(c)), np.ones(len(c))]), c)
    _, low, high = sign_flip(sums, 7, .05)
    for theta, inside in ((low - 1e-4, False), (low + 1e-4, True), (high - 1e-4, True), (high + 1e-4, False)):
        moved = np.column_stack([sums[:, 0] - theta * sums[:, 1], sums[:, 1]])
        p = sign_flip(moved[np.lexsort(moved.T[::-1])], 7, .05)[0]
        assert (p > .05) == inside or (groups > 12 and p == pytest.approx(.05, abs=.006))


def test_step_down_is_the_plain_algorithm():
    rng = np.random.default_rng(11)
    x, pairs = rng.random((10, 4)) + [0, 0, .2, .5], [(i, j) for j in range(4) for i in range(j)]
    d = np.array([x[:, j] - x[:, i] for i, j in pairs])
    t = lambda signs: np.abs(d @ signs) / np.sqrt((d ** 2).sum(1))
    flipped = np.array([t(np.array(s)) for s in product((-1, 1), repeat=10)])
    observed, expected, floor = t(np.ones(10)), np.zeros(len(pairs)), 0.0
    left = list(np.argsort(-observed))
    while left:
        floor = max(floor, np.mean(flipped[:, left].max(1) >= observed[left[0]] - 1e-4))
        expected[left.pop(0)] = floor
    assert pair_ps(x, pairs, range(10), step_down=True) == pytest.approx(expected)


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (25, 25), (88, 100), (3, 7)])
def test_one_sided_bound_is_clopper_pearson(hits, n):
    x, exact = np.r_[np.ones(hits), np.zeros(n - hits)], reference.binomtest(hits, n).proportion_ci(.9, "exact")
    assert one_sided_bound(x, range(n)) == pytest.approx(exact.low, abs=1e-9)
    assert one_sided_bound(x, range(n), side="upper") == pytest.approx(exact.high, abs=1e-9)


def test_the_interval_of_a_0_1_mean_is_nearly_wilsons():
    for hits, n in ((70, 100), (290, 300), (0, 50), (20, 20)):
        wilson = reference.binomtest(hits, n).proportion_ci(.95, "wilson")
        i = mean_interval(np.r_[np.ones(hits), np.zeros(n - hits)], range(n))
        assert (i.low, i.high) == pytest.approx((wilson.low, wilson.high), abs=.03)


def test_benjamini_hochberg_is_scipys_and_holm_is_larger():
    ps = np.random.default_rng(0).random(40) ** 3
    assert benjamini_hochberg(ps) == pytest.approx(reference.false_discovery_control(ps))
    assert (holm(ps) >= benjamini_hochberg(ps) - 1e-12).all() and (holm(ps) >= ps).all()


def test_no_mcnemar_rejects_while_agresti_min_holds_zero():
    for level, win, loss in product((.8, .9, .95, .99, .999), (*range(0, 30, 2), 60, 150), (*range(12), 60)):
        for tie in (0, 5, 900):
            if not win + loss: continue
            p, low, high = _test_binary(np.r_[np.ones(win), -np.ones(loss), np.zeros(tie)], level)
            assert p > 1 - level or not low <= 0 <= high


# invariances and edges

values = st.floats(0, 1) | st.sampled_from([0., .5, 1., math.nan])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(values, values, values, st.integers(0, 25)), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_neither_row_order_nor_names_matter(rows, random):
    a, b, x, c = zip(*rows)
    mixed = list(rows); random.shuffle(mixed)
    a2, b2, x2, c2 = zip(*mixed)
    names = [f"family {99 - i}" for i in c2]
    assert repr(paired(a, b, c)) == repr(paired(a2, b2, names))
    assert repr(mean_interval(a, c)) == repr(mean_interval(a2, names))
    assert standings([a, b, x], c) == standings([a2, b2, x2], names)
    assert one_sided_bound(a, c) == pytest.approx(one_sided_bound(a2, names), abs=1e-9, nan_ok=True)


def test_labels_may_be_anything_and_inputs_stay_as_they_were():
    a, b = np.array([0, 1, .5, math.nan]), np.array([1, 1, 0, 1.])
    kept = a.copy(), b.copy()
    assert paired(a, b, ["表", None, ("x", 1), 3]).clusters == 3
    standings(np.array([a, b]), [1, 2, 3, 4]); mean_interval(a, [1, 2, 3, 4])
    assert np.array_equal(a, kept[0], equal_nan=True) and np.array_equal(b, kept[1])


def test_float_dust_is_a_tie():
    d = paired([.1 + .2] * 12, [.3] * 12, range(12))
    assert (d.tie, d.p, d.verdict) == (12, 1.0, "undecided") and "no case differed" in d.method


def test_few_clusters_are_inconclusive_unless_unanimous():
    c = np.repeat(np.arange(8), 20)
    assert paired(np.zeros(160), np.ones(160), c).verdict == "better"
    assert paired(np.ones(160), np.zeros(160), c).verdict == "worse"
    d = paired(np.full(160, .2), np.where(c == 0, .15, 1.), c)
    assert d.verdict == "inconclusive" and d.low <= 0 <= d.high
    assert standings([np.full(160, .2), np.where(c == 0, .15, 1.)], c) == ["in_play"] * 2


@pytest.mark.parametrize("level", [0, 0.5, 1])
def test_agreeing_cases_never_make_a_point(level):
    for n in (1, 2, 30, 900):
        i = mean_interval(np.full(n, level), range(n))
        assert i.low <= level <= i.high and i.high - i.low > 1 / (2 * n)
    d = paired(np.full(30, .5), np.full(30, .6), range(30))
    assert d.low < .1 < d.high and d.verdict == "better"


def coherent(d):
    "Verdict, interval and adjusted p say the same."
    decided = (d.low > 0) - (d.high < 0)
    assert decided == {"better": 1, "worse": -1}.get(d.verdict, 0) and d.low <= d.difference <= d.high
    return not decided or d.p_adjusted <= .05 + 1e-9


def test_exploratory_pairs_keep_their_inconclusive_members():
    nan = np.full(38, math.nan)
    x = np.array([np.zeros(40), np.ones(40), np.r_[0, 1, nan], np.r_[1, 1, nan], np.full(40, math.nan)])
    clear, weak, none = judged = explored(x, [(0, 1), (2, 3), (0, 4)], range(40))
    assert [d.verdict for d in judged] == ["better", "inconclusive", "inconclusive"] and none.n == 0 and math.isnan(none.p_adjusted)
    assert clear.p_adjusted == 2 * paired(x[0], x[1], range(40)).p and "exploratory: corrected for 2 pairs by Benjamini-Hochberg" in clear.method


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 9, 11, 15, 40]), st.booleans(), st.sampled_from([0, .1, .4]))
def test_standing_test_and_interval_never_contradict(seed, groups, binary, gone):
    rng = np.random.default_rng(seed)
    c = np.r_[np.arange(groups), rng.integers(0, groups, rng.integers(0, 60))]
    x = np.clip(rng.random(len(c)) + rng.normal([[0], [0], [.15], [.3]], .25, (4, len(c))), 0, 1).round(0 if binary else 2)
    x[0] = x[1] if seed % 5 == 0 else x[0]
    x[rng.random(x.shape) < gone] = math.nan
    board = all_pairs(x, c)
    beaten = board.beaten_by()
    for (i, j), p in zip(board.pairs.tolist(), board.p):
        d = board.difference(i, j)
        assert coherent(d) and (d.verdict == "better") == (j in beaten[i]) and (d.verdict == "worse") == (i in beaten[j])
        assert d.p_adjusted == p or math.isnan(p) and not d.n
    assert all(coherent(d) for d in explored(x, board.pairs.tolist(), c))


def test_a_boards_intervals_hold_together():
    rng, runs, missed, rates = np.random.default_rng(4), 60, 0, [.6, .65, .7]
    for r in range(runs):
        board = all_pairs(correlated(rng, 60, rates), range(60), seed=r)
        missed += any(not d.low <= rates[j] - rates[i] <= d.high for i, j in board.pairs.tolist() for d in [board.difference(i, j)])
    assert missed / runs <= within(.055, runs)


def test_weakest_stratum_of_equals_is_not_distinguishable():
    x = np.tile([1, 1, 0, 1], 30)
    w = weakest_stratum(x, np.repeat(["fact", "table", "numeric"], 40), range(120))
    assert set(w.not_distinguishable_from) | {w.stratum} == {"fact", "table", "numeric"}
    with pytest.raises(BadInput): weakest_stratum([1], [], ["a"])


def test_the_sentence_names_everything():
    d = paired([0, 1] * 40, [0, 1] * 40, range(80))
    said = comparison_sentence(d, "Recall@5", "fixed", "sentence", True)
    for part in ("Recall@5", "first 5 hits", "n = 80 cases in 80 clusters", "undecided", "order at equal k may differ", "no case differed; up to 0.037 (3/n) is not excluded"):
        assert part in said
    assert percentiles([1, 2, 3]).p50 == 2


def test_what_the_minimum_detectable_says():
    for n, d in ((60, .1), (130, .2), (600, .15)):
        g = minimum_detectable(n, d)
        assert mcnemar_power(n, d, g) == pytest.approx(.8, abs=1e-3)
        assert mcnemar_power(cases_needed(g, d), d, g) >= .8


# simulations: small here, `make simulate` runs the large ones

def test_power_at_the_minimum_detectable_difference():
    rng, n, d = np.random.default_rng(1), 200, .16
    g = minimum_detectable(n, d)
    counts = rng.multinomial(n, [d / 2 + g, d / 2, 1 - d - g], 4000)
    called = 2 * reference.binom.cdf(counts[:, :2].min(1), counts[:, :2].sum(1), .5) <= .05
    assert .75 <= called.mean() <= .85


@pytest.mark.parametrize("icc", [.1, .5])
def test_null_with_clusters(icc):
    rng, runs, c = np.random.default_rng(2), 500, np.repeat(np.arange(36), 25)
    wrong = np.mean([paired(*clustered(rng, icc), c, seed=r).verdict in ("better", "worse") for r in range(runs)])
    assert wrong <= within(.055, runs)


@pytest.mark.parametrize("n", [20, 50, 130])
def test_wrong_statements_on_a_board(n):
    rng, runs, wrong = np.random.default_rng(n), 80, 0
    for r in range(runs):
        board = standings(correlated(rng, n, [.75] * 4 + [.5]), range(n), seed=r)
        wrong += "best" in board or "ruled_out" in board[:4]
    assert wrong / runs <= within(.055, runs)


def test_power_on_a_board():
    rng, runs = np.random.default_rng(5), 80
    best = np.mean([standings(correlated(rng, 130, [.9] + [.75] * 4), range(130), seed=r)[0] == "best" for r in range(runs)])
    out = np.mean([standings(correlated(rng, 130, [.7] + [.85] * 4), range(130), seed=r)[0] == "ruled_out" for r in range(runs)])
    assert best >= .68 - 3 * math.sqrt(.68 * .32 / runs) and out >= .9 - 3 * math.sqrt(.9 * .1 / runs)


MEASURES = {"binary": ([0, 1], [.2, .8]), "half": ([0, .5, 1], [.2, .3, .5]), "tied": ([0, .25, .5, 1], [.05, .05, .8, .1]),
            "reciprocal": ([1, .5, 1 / 3, .25, .1], [.5, .2, .1, .1, .1])}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("n", [30, 100, 300])
def test_coverage_of_a_mean(name, n):
    rng, runs, (v, w) = np.random.default_rng(n), 600, MEASURES[name]
    found = [mean_interval(rng.choice(v, n, p=w), range(n)) for _ in range(runs)]
    covered, error = np.mean([i.low <= np.dot(v, w) <= i.high for i in found]), 3 * math.sqrt(.95 * .05 / runs)
    assert (.92 if n == 30 else .93) - error <= covered <= (.999 if n == 30 else .97) + error


@pytest.mark.parametrize("rate", [.88, .92, .95, .98])
def test_one_sided_bounds_err_rarely(rate):
    rng, runs = np.random.default_rng(int(rate * 100)), 300
    draws = {"binary": lambda: rng.random(100) < rate, "half": lambda: 1 - rng.choice([0, .5, 1], 100, p=[1 - 1.5 * (1 - rate), 1 - rate, .5 - .5 * rate])}
    for draw in draws.values():
        assert np.mean([one_sided_bound(draw(), range(100)) > rate for _ in range(runs)]) <= within(.05, runs)


@pytest.mark.slow
@pytest.mark.parametrize("icc", [.1, .3, .5])
def test_null_with_clusters_at_length(icc):
    rng, runs, c = np.random.default_rng(12), 5000, np.repeat(np.arange(36), 25)
    assert np.mean([paired(*clustered(rng, icc), c, seed=r).verdict in ("better", "worse") for r in range(runs)]) <= within(.055, runs)


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 50, 130])
def test_boards_at_length(n):
    rng, runs, wrong = np.random.default_rng(n), 1500, np.zeros(2)
    for r in range(runs):
        equal, worse = standings(correlated(rng, n, [.75] * 5), range(n), seed=r), standings(correlated(rng, n, [.75] * 4 + [.5]), range(n), seed=r)
        wrong += (set(equal) != {"in_play"}, "best" in worse or "ruled_out" in worse[:4])
    assert (wrong / runs <= within(.055, runs)).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 100, 300])
def test_coverage_of_a_difference(n):
    rng, runs = np.random.default_rng(n), 1000
    for v, w in MEASURES.values():
        harder = np.r_[w[0] + .1, np.array(w[1:]) * (1 - w[0] - .1) / (1 - w[0])]
        truth, hit = np.dot(v, harder) - np.dot(v, w), 0
        for r in range(runs):
            u = rng.random(n)
            u2 = np.where(rng.random(n) < .6, u, rng.random(n))
            a, b = np.array(v)[np.searchsorted(np.cumsum(w)[:-1], u)], np.array(v)[np.searchsorted(np.cumsum(harder)[:-1], u2)]
            d = paired(a, b, range(n), seed=r)
            hit += d.low <= truth <= d.high
        assert .92 <= hit / runs <= (.999 if n == 30 else .98)
