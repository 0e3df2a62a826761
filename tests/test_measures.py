"""Measures: agreement with trec_eval, pytrec_eval and ir_measures; evidence against a slow reference; edges by hand."""
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ragbench.core.errors import BadInput
from ragbench.measures.ranked import evaluate

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs = lambda name: pytest.mark.skipif(not (SHARED / name).exists(), reason=f"needs shared/data/{name}")

PAIRS = {"map": "MAP", "recip_rank": "MRR", "ndcg": "nDCG", "bpref": "bpref", "P_5": "Precision@5", "P_10": "Precision@10", "P_20": "Precision@20", "recall_5": "Recall@5",
         "recall_10": "Recall@10", "recall_20": "Recall@20", "recall_100": "Recall@100", "ndcg_cut_5": "nDCG@5", "ndcg_cut_10": "nDCG@10", "ndcg_cut_20": "nDCG@20",
         "success_1": "Hit@1", "success_5": "Hit@5", "success_10": "Hit@10", "map_cut_10": "MAP@10"}


def trec_output(path):
    rows = [line.split() for line in path.read_text().splitlines()]
    return {(q, PAIRS[m]): float(v) for m, q, v in rows if m in PAIRS}


def world(seed, ties=True, queries=30, docs=60):
    rng = np.random.default_rng(seed)
    qrels = {f"q{i}": {f"d{j}": int(rng.choice([0, 0, 1, 2, 3])) for j in rng.choice(docs, rng.integers(1, 15), replace=False)} for i in range(queries)}
    run = {f"q{i}": {f"d{j}": float(rng.choice([1, 2, 3, 4]) if ties else rng.random()) for j in rng.choice(docs, rng.integers(1, 40), replace=False)} for i in range(queries)}
    return qrels, run


# ---------------------------------------------------------------- ranked
@pytest.mark.shared
@needs("cranfield")
def test_cranfield_equals_trec_eval():
    folder = SHARED / "cranfield"
    expected = trec_output(folder / "bm25_top100.trec_eval.txt")
    names = [m for m in PAIRS.values() if any(k[1] == m for k in expected)]
    for qrels in (folder / "original" / "cranqrel.trec.txt", folder / "qrels.tsv"):
        each = evaluate(qrels, folder / "bm25_top100.run", names, per_query=True, trec_eval=True)
        mine = {(r.query_id, r.measure): r.value for r in each.itertuples()} | {("all", r.measure): r.value for r in evaluate(qrels, folder / "bm25_top100.run", names, trec_eval=True).itertuples()}
        assert len(mine) == len(expected)
        assert max(abs(mine[k] - v) for k, v in expected.items()) <= 5.1e-5


@pytest.mark.shared
@needs("trec_eval_golden")
def test_trec_eval_golden():
    folder = SHARED / "trec_eval_golden"
    expected = {k: v for k, v in trec_output(folder / "out.test.aq").items()}
    names = sorted({m for _, m in expected})
    assert len(names) >= 12
    each = evaluate(folder / "qrels.test", folder / "results.test", names, per_query=True, trec_eval=True)
    mine = {(r.query_id, r.measure): r.value for r in each.itertuples()} | {("all", r.measure): r.value for r in evaluate(folder / "qrels.test", folder / "results.test", names, trec_eval=True).itertuples()}
    assert max(abs(mine[k] - v) for k, v in expected.items()) <= 5.1e-5


@pytest.mark.shared
@needs("ir_measures_golden")
def test_both_gains():
    import json
    folder = SHARED / "ir_measures_golden"
    golden = json.loads((folder / "graded.expected.json").read_text())
    for block, gain, tolerance in ((golden["gdeval"], "exp", 1e-4), (golden["trec_eval"], "linear", 1e-4)):
        for name, values in block.items():
            measure = f"nDCG(gain={gain})@{name.split('@')[1]}" if name.startswith("nDCG@") else PAIRS.get(name, {"P_2": "Precision@2", "ndcg_cut_2": "nDCG@2"}.get(name))
            if not measure: continue
            mine = evaluate(folder / "graded.qrels", folder / "graded.run", [measure], per_query=True).set_index("query_id")["value"]
            assert all(abs(mine[q] - v) <= tolerance for q, v in values.items() if q != "all"), name


@pytest.mark.parametrize("seed,ties", [(0, True), (1, True), (2, False)])
def test_agrees_with_pytrec_eval(seed, ties):
    pytrec_eval = pytest.importorskip("pytrec_eval")
    qrels, run = world(seed, ties)
    names = list(PAIRS.values())
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank", "ndcg", "bpref", "P.5,10,20", "recall.5,10,20,100", "ndcg_cut.5,10,20", "success.1,5,10", "map_cut.10"}).evaluate(run)
    mine = evaluate(qrels, run, names, per_query=True, trec_eval=True)
    for r in mine.itertuples():
        assert abs(theirs[r.query_id][{v: k for k, v in PAIRS.items()}[r.measure]] - r.value) < 1e-9, r


@pytest.mark.parametrize("seed", [3, 4])
def test_agrees_with_ir_measures(seed):
    ir_measures = pytest.importorskip("ir_measures")
    qrels, run = world(seed, ties=False)
    theirs_names = ["R@5", "P@5", "Success@1", "RR", "RR@3", "AP", "AP@10", "nDCG@10", "R(rel=2)@5", "P(rel=2)@5", "AP(rel=2)", "Bpref", "Judged@10", "nDCG(dcg='exp-log2')@10"]
    mine = evaluate(qrels, run, theirs_names, per_query=True)
    labels = dict(zip(mine["measure"].iloc[:len(theirs_names)], theirs_names))
    want = {labels_: ir_measures.parse_measure(labels_) for labels_ in theirs_names if "exp-log2" not in labels_}
    got = {(m.query_id, str(m.measure)): m.value for m in ir_measures.iter_calc(list(want.values()), qrels, run)}
    for r in mine.itertuples():
        if labels[r.measure] not in want or np.isnan(r.value): continue
        assert abs(got[(r.query_id, str(want[labels[r.measure]]))] - r.value) < 1e-9, r


def test_missing_query_counts_zero_and_undefined_stays_out():
    out = evaluate({"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 0}}, {"a": {"x": 1.0}}, ["Recall@5", "Precision@1", "MRR", "MAP", "nDCG@5", "Hit@1"])
    assert out["value"].tolist() == [.5] * 6 and out["n"].tolist() == [2] * 6


def test_ties_and_rows_in_any_order():
    qrels = {"q": {"a": 1}}
    up, down = ({"q": dict.fromkeys(order, 1.0)} for order in ("ab", "ba"))
    assert evaluate(qrels, up, "MRR")["value"][0] == evaluate(qrels, down, "MRR")["value"][0] == 1
    assert evaluate(qrels, up, "MRR", trec_eval=True)["value"][0] == .5


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), None])
def test_scores_that_are_no_number(score):
    with pytest.raises(BadInput, match="'q'.*'b'"): evaluate({"q": {"a": 1}}, {"q": {"a": 1.0, "b": score}}, "MRR")
    frame = pd.DataFrame({"query_id": ["q", "q"], "doc_id": ["a", "b"], "score": [1.0, score]})
    with pytest.raises(BadInput, match="row 1"): evaluate({"q": {"a": 1}}, frame, "MRR")


def test_integer_ids_and_inputs_unchanged():
    qrels, run = pd.DataFrame({"query_id": [1], "doc_id": [10], "grade": [1]}), pd.DataFrame({"query_id": [1, 1], "doc_id": [9, 10], "score": [1, 2]})
    before = qrels.copy(), run.copy()
    assert evaluate(qrels, run, "Hit@1")["value"][0] == 1
    assert evaluate({"1": {"10": 1}}, run, "Hit@1")["value"][0] == 1
    pd.testing.assert_frame_equal(qrels, before[0]); pd.testing.assert_frame_equal(run, before[1])


def test_ranked_is_quick_enough():
    import time
    rng = np.random.default_rng(0)
    run = pd.DataFrame({"query_id": np.repeat([f"q{i}" for i in range(1000)], 100), "doc_id": [f"d{j}" for _ in range(1000) for j in rng.choice(5000, 100, replace=False)], "score": rng.random(100_000)})
    qrels = run.iloc[::13].assign(grade=1)[["query_id", "doc_id", "grade"]]
    began = time.perf_counter()
    evaluate(qrels, run, "R@1,R@5,R@10,P@5,P@10,MRR@10,nDCG@5,nDCG@10,Hit@5,MAP")
    assert time.perf_counter() - began < 5
