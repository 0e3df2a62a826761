"""What retrieval, fusion and scoring cost beside their peers and floors, as ratios of CPU time in one run.

    python benchmarks/bench_pipeline.py [--rounds 7]

BM25 beside bm25s alone on the same tokens (XQuAD's Chinese half where it lies in ../shared/data, else made text of that size), dense
search beside the bare matrix product, re-fusing at a new weight beside sorting a matrix of that size, `evaluate` beside pytrec_eval.
Every pair is first shown to give the same answer.
"""
import argparse
import json
from pathlib import Path

import bm25s
import numpy as np
import pandas as pd
import pytrec_eval
from threadpoolctl import threadpool_limits
from timing import Laps, environment, report, take_turns

import ragbench as rb
from ragbench.core.model import Chunk
from ragbench.core.spec import Call
from ragbench.pipeline.fuse import FusionTable
from ragbench.pipeline.retrieve import Candidates, Corpus, Queries, search_source, tokenise

XQUAD = Path(__file__).parents[2] / "shared" / "data" / "xquad" / "xquad.zh.json"
DEPTH = 100


def chunk_names(n: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(f"d{i:06}", f"d{i:06}", 0, 1, "x") for i in range(n))


def texts_and_questions(rng: np.random.Generator) -> tuple[list[list[str]], list[list[str]], str]:
    "Tokens of paragraphs and of questions."
    if XQUAD.is_file():
        paragraphs = [p for a in json.loads(XQUAD.read_text(encoding="utf-8"))["data"] for p in a["paragraphs"]]
        return [tokenise(p["context"]) for p in paragraphs], [tokenise(q["question"]) for p in paragraphs for q in p["qas"]], "XQuAD, Chinese"
    chance = 1 / np.arange(2, 20_002)
    draw = lambda n: [f"w{i}" for i in rng.choice(20_000, n, p=chance / chance.sum())]  # noqa: E731
    documents = [draw(260) for _ in range(240)]
    return documents, [rng.choice(documents[int(rng.integers(240))], 18).tolist() for _ in range(1190)], "made text"


def bm25(rng: np.random.Generator, rounds: int) -> tuple[str, Laps, str]:
    documents, questions, name = texts_and_questions(rng)
    corpus, rows = Corpus(chunk_names(len(documents)), tuple(map(tuple, documents))), np.arange(len(documents))
    queries = Queries(("",) * len(questions), tuple(map(tuple, questions)))
    distinct = [sorted(set(q)) for q in questions]

    def ours() -> Candidates: return search_source(Call("bm25"), corpus, rows, queries, DEPTH)

    def theirs() -> tuple[np.ndarray, np.ndarray]:
        model = bm25s.BM25(k1=1.2, b=0.75, method="lucene", backend="numpy")
        model.index(documents, show_progress=False)
        return model.retrieve(distinct, k=DEPTH, show_progress=False)
    found, (_, scores) = ours(), theirs()
    first = np.searchsorted(found.query, np.arange(len(questions)))
    np.testing.assert_allclose(found.score[first], scores[:, 0], rtol=1e-5)
    return f"BM25, index and {len(questions):,} queries over {len(documents):,} chunks ({name})", take_turns({"bm25s": theirs, "ragbench": ours}, rounds), "bm25s"


def dense(rng: np.random.Generator, rounds: int, n: int = 10_000, asked: int = 1_000, width: int = 512) -> tuple[str, Laps, str]:
    def unit(rows: int) -> np.ndarray:
        x = rng.standard_normal((rows, width), np.float32)
        return x / np.linalg.norm(x, axis=1, keepdims=True)
    x, q = unit(n), unit(asked)
    corpus, rows, queries = Corpus(chunk_names(n), (), x), np.arange(n), Queries(("",) * asked, (), q)

    def ours() -> Candidates: return search_source(Call("dense"), corpus, rows, queries, DEPTH)

    def sorted_product() -> np.ndarray:
        scores = q @ x.T
        best = np.argpartition(scores, n - DEPTH, axis=1)[:, n - DEPTH:]
        return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)
    assert (ours().chunk.reshape(asked, DEPTH) == sorted_product()).mean() > .999
    return (f"Dense search, {asked:,} queries over {n:,} chunks of {width} dimensions, best {DEPTH}",
            take_turns({"matrix product": lambda: q @ x.T, "product, argpartition, sort": sorted_product, "ragbench": ours}, rounds), "matrix product")


def fusion(rng: np.random.Generator, rounds: int, asked: int = 1_000) -> tuple[str, Laps, str]:
    def candidates() -> Candidates:
        chunk = np.argsort(rng.random((asked, 250)), axis=1)[:, :DEPTH]
        return Candidates.of((i, chunk[i], s) for i, s in enumerate(-np.sort(-rng.random((asked, DEPTH)), axis=1)))
    table = FusionTable.build({"bm25": candidates(), "dense": candidates()}, asked)
    matrix, weights = rng.random((asked, 2 * DEPTH)), iter(rng.random(10_000))

    def ours() -> object:
        w = next(weights)
        return table.fuse({"dense": w, "bm25": 1 - w}, "zscore", DEPTH)
    many = 10
    return (f"Re-fusing {asked:,} queries × 2 sources × {DEPTH} candidates at a new weight, {many} times",
            take_turns({"np.argsort": lambda: [np.argsort(matrix, axis=1) for _ in range(many)], "ragbench": lambda: [ours() for _ in range(many)]}, rounds), "np.argsort")


def measures(rng: np.random.Generator, rounds: int, asked: int = 1_000) -> tuple[str, Laps, str]:
    names = {"recall_5": "Recall@5", "recall_10": "Recall@10", "P_5": "Precision@5", "P_10": "Precision@10", "recip_rank": "MRR", "ndcg_cut_5": "nDCG@5",
             "ndcg_cut_10": "nDCG@10", "success_5": "Hit@5", "map": "MAP"}
    frame = pd.DataFrame({"query_id": np.repeat([f"q{i}" for i in range(asked)], DEPTH), "doc_id": [f"d{j}" for _ in range(asked) for j in rng.choice(5000, DEPTH, replace=False)],
                          "score": rng.random(asked * DEPTH)})
    gold = frame.sample(frac=.05, random_state=7).assign(grade=lambda t: rng.integers(1, 4, len(t)))[["query_id", "doc_id", "grade"]]

    def nested(table: pd.DataFrame, value: str) -> dict[str, dict[str, object]]:
        out: dict[str, dict[str, object]] = {}
        for query, doc, v in zip(table["query_id"].tolist(), table["doc_id"].tolist(), table[value].tolist(), strict=True): out.setdefault(query, {})[doc] = v
        return out
    run, qrels = nested(frame, "score"), nested(gold, "grade")

    def theirs(qrels: dict, run: dict) -> pd.DataFrame:
        return pd.DataFrame.from_dict(pytrec_eval.RelevanceEvaluator(qrels, set(names)).evaluate(run), orient="index")

    def ours(qrels: object, run: object) -> pd.DataFrame: return rb.evaluate(qrels, run, list(names.values()), per_query=True)
    peer = theirs(qrels, run)
    for r in ours(gold, frame).itertuples(): assert abs(peer.loc[r.query_id, {v: k for k, v in names.items()}[r.measure]] - r.value) < 1e-9
    return (f"{len(names)} measures, {asked:,} queries × {DEPTH} hits, per query", take_turns({
        "pytrec_eval": lambda: theirs(qrels, run), "pytrec_eval, from frames": lambda: theirs(nested(gold, "grade"), nested(frame, "score")),
        "ragbench, from dicts": lambda: ours(qrels, run), "ragbench, from frames": lambda: ours(gold, frame)}, rounds), "pytrec_eval")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--rounds", type=int, default=7)
    rounds = ask.parse_args().rounds
    environment("numpy", "pandas", "bm25s", "pytrec-eval-terrier")
    rng = np.random.default_rng(7)
    with threadpool_limits(1, user_api="blas"):
        for bench in (bm25, dense, fusion, measures): report(*bench(rng, rounds))


if __name__ == "__main__": main()
