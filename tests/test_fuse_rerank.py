"""Fusion against a slow reference, its speed, a reranker that cannot leak, and both on public parallel questions."""
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings as hyp, strategies as st

from ragbench.core.errors import BadInput
from ragbench.core.model import Chunk
from ragbench.core.spec import Call, canonical_retriever
from ragbench.pipeline import rerank as room
from ragbench.pipeline.fuse import NORMS, FusionTable, fuse, sources_of
from ragbench.pipeline.rerank import features, fit, rerank, score, score_out_of_fold
from ragbench.pipeline.retrieve import Candidates, corpus_of, queries_of, search_source

XQUAD = Path(__file__).parents[2] / "shared" / "data" / "xquad"


def found(rows):
    q, c, s = np.array(list(rows), dtype=float).reshape(-1, 3).T
    return Candidates(q.astype(np.int32), c.astype(np.int32), s)


# ---- a reference in plain Python

def reference(parts, weights, norm, depth):
    """{query: [(chunk, score)]} by loops over dicts."""
    out = {}
    for q in sorted({r[0] for rows in parts.values() for r in rows}):
        total, wanted = {}, set()
        lists = {n: sorted(((s, c) for qq, c, s in rows if qq == q), key=lambda x: (-x[0], x[1])) for n, rows in parts.items()}
        everything = {c for hits in lists.values() for _, c in hits}
        for n in sorted(parts):
            hits, w = lists[n], weights.get(n, 0)
            if not hits or not w: continue
            values = [s for s, _ in hits]
            mean = math.fsum(values) / len(values)
            sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
            low, high = min(values), max(values)
            normed = {"zscore": {c: (s - mean) / sd if low < high else 0.0 for s, c in hits},
                      "minmax": {c: (s - low) / (high - low) if low < high else 1.0 for s, c in hits},
                      "rrf": {c: 1 / (60 + i) for i, (_, c) in enumerate(hits, 1)}}[norm]
            absent = min(normed.values()) if norm == "zscore" else 0.0
            for c in everything: total[c] = total.get(c, 0.0) + w * normed.get(c, absent)
            wanted |= set(normed)
        out[q] = sorted(((c, total[c]) for c in wanted), key=lambda x: (-x[1], x[0]))[:depth]
    return out


SCORES = st.integers(-40, 40).map(lambda i: i / 8) | st.floats(-100, 100).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15), SCORES), max_size=30, unique_by=lambda r: r[:2])


@hyp(deadline=None, max_examples=150)
@given(parts=st.fixed_dictionaries({"a": ROWS, "b": ROWS, "c": ROWS}), norm=st.sampled_from(NORMS), depth=st.integers(1, 20),
       weights=st.fixed_dictionaries({n: st.sampled_from([0, .25, .7, 1, 3]) for n in "abc"}).filter(lambda w: any(w.values())))
def test_equals_the_slow_reference(parts, norm, depth, weights):
    got = FusionTable.build({n: found(r) for n, r in parts.items()}, 4).fuse(weights, norm, depth)
    full = reference(parts, weights, norm, 10**6)
    for q in range(4):
        rows, want = got.rows(q), dict(full.get(q, []))
        assert len(got.chunk[rows]) == min(depth, len(want))
        assert np.allclose(got.score[rows], [s for _, s in full.get(q, [])[:depth]], rtol=1e-9, atol=1e-9)
        assert np.allclose(got.score[rows], [want[c] for c in got.chunk[rows].tolist()], rtol=1e-9, atol=1e-9)
        assert got.rank[rows].tolist() == list(range(1, rows.stop - rows.start + 1))
        for name, raw in got.parts.items():
            own = {c: s for qq, c, s in parts[name] if qq == q}
            assert np.array_equal(raw[rows], [own.get(c, math.nan) for c in got.chunk[rows].tolist()], equal_nan=True)


@hyp(deadline=None, max_examples=100)
@given(ROWS, ROWS, st.sampled_from(["0.7*dense + 0.3*bm25", "minmax(dense + bm25)", "rrf(dense, bm25)", "rrf(0.2*dense + bm25, k=1)"]),
       st.permutations(range(4)))
def test_a_query_does_not_depend_on_the_others(a, b, spec, numbers):
    expr = canonical_retriever(spec)
    one = fuse(expr, {"dense": found(a), "bm25": found(b)}, 4)
    move = lambda rows: found([(numbers[q], c, s) for q, c, s in rows])
    two = fuse(expr, {"bm25": move(b), "dense": move(a)}, 4)
    for q in range(4):
        for field in ("chunk", "rank", "score"):
            assert getattr(one, field)[one.rows(q)].tobytes() == getattr(two, field)[two.rows(numbers[q])].tobytes()


def test_edges_single_equal_disjoint_empty():
    expr = canonical_retriever("0.7*dense + 0.3*bm25")
    single = fuse(expr, {"dense": found([(0, 5, .9)]), "bm25": found([])}, 1)
    assert single.chunk.tolist() == [5] and single.score.tolist() == [0.0] and np.isnan(single.parts["bm25"]).all()
    equal = fuse(expr, {"dense": found([(0, c, .1) for c in (9, 4, 7)]), "bm25": found([(0, 4, 2.0)])}, 1)
    assert equal.chunk.tolist() == [4, 7, 9] and equal.score.tolist() == [0.0] * 3
    disjoint = fuse(expr, {"dense": found([(0, 1, .9), (0, 2, .1)]), "bm25": found([(0, 3, 9.), (0, 4, 1.)])}, 1)
    assert disjoint.chunk.tolist() == [1, 3, 2, 4] and np.allclose(disjoint.score, [.4, -.4, -1, -1])
    none = fuse(expr, {"dense": found([]), "bm25": found([])}, 3)
    assert len(none) == 0 and none.query.dtype == none.chunk.dtype == none.rank.dtype == np.int32


def test_huge_and_tiny_scores_stay_finite():
    rows = [(0, 0, 1.7e308), (0, 1, -1.7e308), (0, 2, 5e-324), (1, 0, 5e-324), (1, 1, 1e-323), (1, 2, 0.0)]
    for norm in NORMS:
        got = FusionTable.build({"a": found(rows)}, 2).fuse({"a": 1}, norm)
        assert np.isfinite(got.score).all() and got.chunk.tolist() == [0, 2, 1, 1, 0, 2]


def test_canonical_forms():
    for spec in ("minmax(0.7*dense + 0.3*bm25)", "rrf(dense, bm25)", "rrf(dense, bm25, k=10)", "zscore(dense + 2*bm25)",
                 "0.7*dense + 0.3*bm25 >> ltr(top_n=5)"):
        assert str(canonical_retriever(spec)) == spec
        assert [str(c) for c in sources_of(canonical_retriever(spec))] == ["dense", "bm25"]
    assert str(canonical_retriever("rrf(dense,bm25,k=60) >> ltr(top_n=20)")) == "rrf(dense, bm25) >> ltr"


def test_refusing_at_a_new_weight_takes_less_than_ten_milliseconds():
    rng = np.random.default_rng(7)
    rows = lambda: np.concatenate([rng.permutation(300)[:100] for _ in range(1000)])
    many = lambda: Candidates(np.repeat(np.arange(1000), 100), rows(), rng.random(100_000))
    table, took = FusionTable.build({"dense": many(), "bm25": many()}, 1000), []
    for w in np.linspace(.05, .95, 19):
        start = time.process_time()
        table.fuse({"dense": w, "bm25": 1 - w})
        took.append(time.process_time() - start)
    assert min(took) < .010, f"{1000 * min(took):.1f} ms"


# ---- reranking

def toy(n_queries=40, seed=7):
    """Features with one signal, labels, query of each row, family of each row."""
    rng = np.random.default_rng(seed)
    query, relevant = np.repeat(np.arange(n_queries), 8), np.tile([1] + [0] * 7, n_queries)
    X = np.column_stack([relevant + rng.normal(0, .8, len(query)), rng.random((len(query), 3)) * [1, 100, 1e-3]])
    return X, relevant, query, [f"family-{q % 7}" for q in query.tolist()]


def test_no_model_scores_a_family_it_saw(monkeypatch):
    X, relevant, query, family = toy()
    X = np.column_stack([X, query])                          # an id column tells which queries a model was given
    seen = []
    def watched(X, *rest, **named):
        seen.append({family[int(q) * 8] for q in X[:, -1]})
        return fit(X, *rest, **named)
    def judged(model, X):
        assert not seen[-1] & {family[int(q) * 8] for q in X[:, -1]}
        return score(model, X)
    monkeypatch.setattr(room, "fit", watched)
    monkeypatch.setattr(room, "score", judged)
    assert np.isfinite(score_out_of_fold(X, relevant, query, family)).all() and len(seen) == 5


def test_labels_of_a_family_cannot_reach_its_own_scores():
    X, relevant, query, family = toy()
    before = score_out_of_fold(X, relevant, query, family)
    mine = np.array(family) == "family-3"
    after = score_out_of_fold(X, np.where(mine, 1 - relevant, relevant), query, family)
    assert before[mine].tobytes() == after[mine].tobytes() and (before[~mine] != after[~mine]).any()


def test_scores_do_not_depend_on_the_order_of_rows():
    X, relevant, query, family = toy()
    order = np.random.default_rng(1).permutation(len(X))
    again = score_out_of_fold(X[order], relevant[order], query[order], [family[i] for i in order])
    assert again.tobytes() == score_out_of_fold(X, relevant, query, family)[order].tobytes()


def test_the_model_is_the_same_on_any_number_of_threads_and_hash_seed():
    code = ("import json, sys; sys.path.insert(0, sys.argv[1]); from test_fuse_rerank import toy\n"
            "from ragbench.pipeline.rerank import fit\n"
            "print(json.dumps(fit(*toy(200)[:3]).to_dict()))")
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    numbered = lambda n: os.environ | {"OPENBLAS_NUM_THREADS": n, "OMP_NUM_THREADS": n, "PYTHONHASHSEED": n}
    made = {subprocess.run(command, capture_output=True, text=True, check=True, env=numbered(n)).stdout for n in ("1", "2")}
    assert len(made) == 1 and json.loads(made.pop())["queries"] == 200


def test_nothing_to_learn_from_is_said():
    X, relevant, query, family = toy()
    with pytest.raises(BadInput, match="is relevant"): score_out_of_fold(X, 0 * relevant, query, family)
    with pytest.raises(BadInput, match="one family"): score_out_of_fold(X, relevant, query, ["refund"] * len(X))


def test_features_ignore_what_is_outside_the_list():
    rng = np.random.default_rng(7)
    words = "refund earphone 8 days quality fault wh-1000xm4 accept term the a of".split()
    chunks = [Chunk(f"d{i:02d}:0-9", f"d{i:02d}", 0, 9, " ".join(rng.choice(words, 12)), section=("Refunds",)) for i in range(30)]
    rows = lambda q: [(q, c, s) for c, s in zip(rng.permutation(20)[:8].tolist(), rng.random(8).tolist())]
    a, b, others = rows(0), rows(0), rows(1) + rows(2)
    expr, queries = canonical_retriever("0.7*dense + 0.3*bm25"), ["refund of an earphone after 8 days", "term", "fault"]
    alone = fuse(expr, {"dense": found(a), "bm25": found(b)}, 1)
    X, at = features(alone, queries, chunks, {"d01": "Refund of earphones"}, 20)
    changed = [c if i in set(alone.chunk.tolist()) else replace(c, text="earphone " * 9) for i, c in enumerate(chunks)]
    among = fuse(expr, {"dense": found(a + others), "bm25": found(b + rows(2))}, 3)
    Y, _ = features(among, queries, changed, {"d01": "Refund of earphones"}, 20)
    assert X.tobytes() == Y[:len(X)].tobytes() and np.isfinite(Y).all()
    assert at.tolist() == list(range(min(20, len(alone))))


# ---- on public data: control matrix A-D, D out of fold

def load_xquad(lang):
    """Chunks (one a paragraph), questions, gold doc_id and family of each question, titles."""
    chunks, asked, gold, family, titles = [], [], [], [], {}
    for article in json.loads((XQUAD / f"xquad.{lang}.json").read_text(encoding="utf-8"))["data"]:
        for i, p in enumerate(article["paragraphs"]):
            doc_id = f"{article['title']}-{i}"
            chunks.append(Chunk(f"{doc_id}:0-{len(p['context'])}", doc_id, 0, len(p["context"]), p["context"]))
            titles[doc_id] = article["title"].replace("_", " ")
            for q in p["qas"]: asked.append(q["question"]); gold.append(doc_id); family.append(article["title"])
    return chunks, asked, gold, family, titles


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_reranking_helps_on_parallel_questions(lang):
    if not XQUAD.is_dir(): pytest.skip("the public data sets are not beside the project")
    chunks, asked, gold, family, titles = load_xquad(lang)
    corpus, queries = corpus_of(chunks, Call("use")), queries_of(asked, Call("use"))
    parts = {n: search_source(Call(n), corpus, np.arange(len(chunks)), queries, 100) for n in ("dense", "bm25")}
    right = lambda f: np.array([corpus.chunks[c].doc_id == gold[q] for q, c in zip(f.query.tolist(), f.chunk.tolist())])
    first = lambda f: right(f)[f.rank == 1].sum() / len(asked)
    specs = {"A": "bm25", "B": "dense", "C": "0.7*dense + 0.3*bm25"}
    lists = {n: fuse(canonical_retriever(s), parts, len(asked)) for n, s in specs.items()}
    X, rows = features(lists["C"], asked, corpus.chunks, titles, 20)
    query = lists["C"].query[rows]
    lists["D"] = rerank(lists["C"], rows, score_out_of_fold(X, right(lists["C"])[rows], query, [family[q] for q in query]), 20)
    r1 = {n: round(float(first(f)), 4) for n, f in lists.items()}
    assert r1["D"] >= r1["C"] + .015, r1                     # measured: en .940 to .960, zh .901 to .945
