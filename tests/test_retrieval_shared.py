"""BM25 and dense on the public data sets: agreement with bm25s called directly, and the figures that broken tokens or vectors would spoil."""
import json
from pathlib import Path

import numpy as np
import pytest

from ragbench.core.model import Chunk, chunk_id
from ragbench.core.spec import Call
from ragbench.pipeline.retrieve import corpus_of, queries_of, search_source

DATA = Path(__file__).parents[2] / "shared" / "data"
USE = Call("use")
pytestmark = [pytest.mark.shared, pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the project")]


def squad(name):
    "Paragraphs as chunks, questions, and the row of the paragraph each was asked about."
    chunks, questions, gold = [], [], []
    for a, article in enumerate(json.loads((DATA / name).read_text(encoding="utf-8"))["data"]):
        for p, paragraph in enumerate(article["paragraphs"]):
            text, doc = paragraph["context"], f"a{a:03}-p{p:03}"
            for qa in paragraph["qas"]:
                questions.append(qa["question"])
                gold.append(len(chunks))
            chunks.append(Chunk(chunk_id(doc, 0, len(text)), doc, 0, len(text), text))
    return chunks, questions, np.array(gold)


@pytest.fixture(scope="module")
def sets():
    made = {}
    def get(name, vectors=False):
        if (name, vectors) not in made:
            chunks, questions, gold = squad(name)
            made[name, vectors] = corpus_of(chunks, USE if vectors else None), queries_of(questions, USE if vectors else None), gold
        return made[name, vectors]
    return get


def recall(found, gold, k=10):
    start = np.searchsorted(found.query, np.arange(len(gold)))
    rank = np.arange(len(found)) - start[found.query]
    return float(np.mean(np.bincount(found.query[(found.chunk == gold[found.query]) & (rank < k)], minlength=len(gold)) > 0))


@pytest.mark.parametrize("name, least", [("xquad/xquad.zh.json", .98), ("xquad/xquad.en.json", .98), ("drcd/DRCD_dev.json", .98)])
def test_bm25_agrees_with_bm25s(sets, name, least):
    import bm25s
    corpus, queries, gold = sets(name)
    found = search_source(Call("bm25"), corpus, np.arange(len(corpus.chunks)), queries, 100)
    mine = recall(found, gold)
    model = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    model.index([list(t) for t in corpus.tokens], show_progress=False)
    rows, scores = model.retrieve([list(dict.fromkeys(t)) or [""] for t in queries.tokens], k=10, show_progress=False)
    theirs = float(np.mean([(g == r[s > 0]).any() for g, r, s in zip(gold, rows, scores)]))
    assert abs(mine - theirs) <= .001
    assert mine >= least
    top = found.score[np.searchsorted(found.query, np.arange(len(gold)))]
    np.testing.assert_allclose(top, scores[:, 0], rtol=1e-5)


@pytest.mark.parametrize("asked, held, least", [("zh", "en", .95), ("en", "zh", .95), ("zh", "zh", .95), ("en", "en", .95)])
def test_dense_crosses_languages(sets, asked, held, least):
    corpus, _, _ = sets(f"xquad/xquad.{held}.json", True)
    _, queries, gold = sets(f"xquad/xquad.{asked}.json", True)
    found = search_source(Call("dense"), corpus, np.arange(len(corpus.chunks)), queries, 100)
    assert recall(found, gold) >= least


@pytest.mark.parametrize("spec", ["bm25", "dense"])
def test_deletion_on_real_text(sets, spec):
    corpus, queries, _ = sets("xquad/xquad.zh.json", True)
    rows = np.flatnonzero(np.random.default_rng(7).random(len(corpus.chunks)) < .6)
    left_out = search_source(Call(spec), corpus, rows, queries, 50)
    deleted = search_source(Call(spec), corpus_of([corpus.chunks[i] for i in rows], USE), np.arange(len(rows)), queries, 50)
    assert left_out.score.tobytes() == deleted.score.tobytes()
    assert (left_out.chunk == rows[deleted.chunk]).all()
