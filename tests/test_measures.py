"""Measures: agreement with trec_eval, pytrec_eval and ir_measures; evidence against a slow reference; edges by hand."""
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hypothesis import given, settings, strategies as st

from ragbench.core.errors import BadInput
from ragbench.core.model import Case, Evidence
from ragbench.core.text import count_tokens, cut_at_tokens, is_ink
from ragbench.measures.evidence import project, score_hits
from ragbench.measures.floors import uniform_floor
from ragbench.measures.names import expand, parse_measures
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


# ---------------------------------------------------------------- evidence: a slow reference
def ink(texts, doc, a, b):
    return {(doc, i) for i in range(a, b) if is_ink(texts[doc][i])}


class Slow:
    """The definitions, one character at a time."""

    def __init__(self, case, hits, chunks, texts, point_at=.5, found=.95):
        self.case, self.hits, self.chunks, self.texts, self.point_at, self.found_at = case, hits, chunks, texts, point_at, found
        self.groups = {}
        for e in case.evidence:
            if e.grade: self.groups.setdefault((e.group, e.grade >= 2), {}).setdefault(e.alt, []).append(e)
        self.required = {g: alts for g, alts in self.groups.items() if g[1]}
        self.grade = {g: max(e.grade for es in alts.values() for e in es) for g, alts in self.groups.items()}

    def span(self, e): return ink(self.texts, e.doc_id, e.start, e.end)
    def own(self, h): return ink(self.texts, *h[:3])

    def covers_span(self, h, e):
        chunk, span = self.own(h), self.span(e)
        if e.granularity == "quote": return len(chunk & span) / len(span) >= self.point_at - 1e-9
        return bool(chunk) and len(chunk & span) / len(chunk) >= .5 - 1e-9

    def covers(self, h, g): return any(self.covers_span(h, e) for es in self.groups[g].values() for e in es)

    def taken(self, cutoff, unit):
        if unit == "k": return [(h, h[2]) for h in self.hits[:cutoff]]
        out, left = [], cutoff
        for h in self.hits:
            text = self.texts[h[0]][h[1]:h[2]]
            n = int(count_tokens([text])[0])
            if n <= left: out.append((h, h[2])); left -= n; continue
            if left: out.append((h, h[1] + cut_at_tokens(text, left)))
            break
        return out

    def found(self, taken, alts):
        seen = [ink(self.texts, h[0], h[1], end) for h, end in taken]
        union = set().union(*seen)
        def has(e):
            if e.granularity == "quote": return len(union & self.span(e)) / len(self.span(e)) >= self.found_at - 1e-9
            return any(self.covers_span(h, e) and s & self.span(e) for (h, _), s in zip(taken, seen))
        return any(all(has(e) for e in es) for es in alts.values())

    def first(self, g): return next((r for r, h in enumerate(self.hits, 1) if self.covers(h, g)), np.inf)

    def values(self, cutoff, unit):
        if not self.required: return None
        t = self.taken(cutoff, unit)
        parts = [ink(self.texts, h[0], h[1], end) for h, end in t]
        union, paid = set().union(*parts), sum(map(len, parts))
        found = [self.found(t, alts) for alts in self.required.values()]
        coarse = any(e.granularity != "quote" for alts in self.required.values() for es in alts.values() for e in es)
        gold = set().union(*(self.span(e) for alts in self.required.values() for es in alts.values() for e in es))
        best = set()
        for alts in self.required.values():
            sizes = {a: (-sum(len(self.span(e) & union) for e in es) / sum(len(self.span(e)) for e in es), sum(len(self.span(e)) for e in es)) for a, es in alts.items()}
            best |= set().union(*(self.span(e) for e in alts[min(sizes, key=lambda a: sizes[a])]))
        out = {"EvidenceRecall": np.mean(found), "Complete": float(all(found)), "Redundancy": 1 - len(union) / paid if paid else np.nan,
               "EvidencePrecision": np.nan if coarse else len(union & gold) / paid if paid else 0, "IoU": np.nan if coarse else len(union & best) / len(union | best)}
        if unit == "t": return {f"{m}@{cutoff}t": v for m, v in out.items()}
        return {f"{m}@{cutoff}": v for m, v in (out | self.ranked(cutoff)).items()}

    def ranked(self, k):
        first = {g: self.first(g) for g in self.groups}
        need = list(self.required)
        core = [g for g in need if self.grade[g] == 3] or need
        good = {h for h in self.hits[:k] if any(self.covers_span(h, e) for g in need for es in self.groups[g].values() for e in es)}
        every = {c for c in self.chunks if any(self.covers_span(c, e) for g in need for es in self.groups[g].values() for e in es)}
        order = sorted((first[g], -self.grade[g]) for g in self.groups if first[g] <= k)
        ideal = sum(g / np.log2(1 + j) for j, g in enumerate(sorted(self.grade.values(), reverse=True), 1))
        soon, last = min(first[g] for g in core), max(first[g] for g in need)
        gain = lambda c: max((e.grade for alts in self.groups.values() for es in alts.values() for e in es if self.covers_span(c, e)), default=0)
        ranked = [gain(h) if h not in self.hits[:i] else 0 for i, h in enumerate(self.hits[:k])]
        best = sorted((gain(c) for c in self.chunks), reverse=True)[:k]
        dcg = lambda gs: sum(g / np.log2(i + 2) for i, g in enumerate(gs))
        return {"Recall": np.mean([first[g] <= k for g in need]), "Hit": float(any(first[g] <= k for g in need)), "Precision": len(good) / k,
                "MRR": 1 / soon if soon <= k else 0, "AllRR": 1 / last if last <= k else 0, "ChunkRecall": len(good & every) / len(every) if every else 0,
                "EvidencenDCG": sum(-g / np.log2(1 + max(r, j)) for j, (r, g) in enumerate(order, 1)) / ideal, "nDCG": dcg(ranked) / dcg(best) if dcg(best) else 0,
                "MaxSourceShare": max(sum(h[0] == d for h in self.hits[:k]) for d in self.texts) / len(self.hits[:k]) if self.hits else np.nan}


def random_world(seed, n_cases=12):
    rng = np.random.default_rng(seed)
    words = ["fee", "a", "return", " ", "\n", "\u200b", "五天", "days.", "  ", "quality", "x"]
    texts = {f"d{i}": "word " + "".join(str(rng.choice(words)) + str(rng.choice(["", " "])) for _ in range(rng.integers(20, 60))) for i in range(4)}
    size, overlap = int(rng.integers(5, 60)), int(rng.integers(0, 4))
    spans = [(d, a, min(a + size, len(t))) for d, t in texts.items() for a in range(0, len(t), size - overlap)]
    chunks = pd.DataFrame(list(dict.fromkeys(spans)), columns=["doc_id", "start", "end"])
    chunks["chunk_id"] = [f"{r.doc_id}:{r.start}-{r.end}" for r in chunks.itertuples()]
    cases, hits = [], []
    for q in range(n_cases):
        evidence = []
        for _ in range(rng.integers(0, 7)):
            doc = str(rng.choice(list(texts)))
            a = int(rng.integers(0, len(texts[doc]) - 4)); b = int(min(len(texts[doc]), a + rng.integers(3, 70)))
            if not ink(texts, doc, a, b): continue
            evidence.append(Evidence(doc, a, b, grade=int(rng.choice([1, 2, 3])), group=str(rng.integers(3)), alt=str(rng.integers(2)), granularity="quote"))
        if q % 4 == 3: evidence = [Evidence(e.doc_id, e.start, e.end, grade=e.grade, group=e.group, alt=e.alt, granularity="section") for e in evidence]
        cases.append(Case(f"q{q}", "?", evidence=tuple(evidence)))
        rows = rng.choice(len(chunks), rng.integers(0, 15))
        hits.append(chunks.iloc[rows].assign(query_id=f"q{q}", rank=np.arange(1, len(rows) + 1)))
    return cases, pd.concat(hits, ignore_index=True).sample(frac=1, random_state=seed), chunks, texts


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_slow_reference(seed):
    cases, hits, chunks, texts = random_world(seed)
    cutoffs, budgets = (1, 2, 3, 5, 10), (3, 10, 40)
    names = expand("EvidenceRecall,Complete,Redundancy,EvidencePrecision,IoU,Recall,Hit,Precision,ChunkRecall,EvidencenDCG,nDCG,MaxSourceShare", cutoffs, budgets)
    names += parse_measures([f"{m}@{k}" for m in ("MRR", "AllRR") for k in cutoffs])
    projection = project(cases, chunks, texts)
    mine = score_hits(cases, hits, texts, projection, names)
    bare = score_hits(cases, hits.drop(columns="chunk_id"), texts, projection, [m for m in names if m.name not in ("ChunkRecall", "nDCG")])
    table = mine.pivot(index="query_id", columns="measure", values="value")
    compared = 0
    for case in cases:
        own = hits[hits["query_id"] == case.query_id].sort_values("rank")
        slow = Slow(case, list(own[["doc_id", "start", "end"]].itertuples(index=False, name=None)), list(chunks[["doc_id", "start", "end"]].itertuples(index=False, name=None)), texts)
        for cutoff, unit in [*((k, "k") for k in cutoffs), *((t, "t") for t in budgets)]:
            values = slow.values(cutoff, unit)
            if values is None:
                assert table.loc[case.query_id].drop([m for m in table.columns if m.startswith(("Redundancy", "MaxSource"))]).isna().all(); continue
            for name, value in values.items():
                assert table.loc[case.query_id, name] == pytest.approx(value, abs=1e-9, nan_ok=True), (case, name)
                compared += 1
    assert compared > 300
    both = mine.merge(bare, on=["query_id", "measure"])
    assert len(both) == len(bare) and np.allclose(both["value_x"], both["value_y"], equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
def test_projection_agrees_with_the_slow_reference(seed):
    cases, _, chunks, texts = random_world(seed)
    p = project(cases, chunks, texts)
    rows = list(chunks[["doc_id", "start", "end"]].itertuples(index=False, name=None))
    got = {(r.query_id, r.group, r.grade >= 2): r for r in p.groups.itertuples()}
    pairs = {(r.query_id, r.chunk_id, r.group, r.grade >= 2) for r in p.relevant.itertuples()}
    seen = 0
    for case in cases:
        slow = Slow(case, [], rows, texts)
        for g, alts in slow.groups.items():
            row = got[(case.query_id, *g)]; seen += 1
            over = [c for c in rows if slow.covers(c, g)]
            assert row.reachable == bool(over) and row.grade == slow.grade[g]
            assert {(case.query_id, f"{c[0]}:{c[1]}-{c[2]}", *g) for c in over} == {x for x in pairs if (x[0], x[2], x[3]) == (case.query_id, *g)}
            whole = any(all(len(slow.own(c) & slow.span(e)) / len(slow.span(e)) >= .95 - 1e-9 for e in es) for es in alts.values() for c in rows)
            assert row.intact == (whole if row.granularity == "quote" else bool(over))
    assert seen == len(p.groups) > 10


# ---------------------------------------------------------------- evidence by hand
TEXT = "aaaaaaaaaa bbbbbbbbbb cccccccccc dddddddddd eeeeeeeeee"


def by_hand(evidence, chunks, order, measures, text=TEXT, **more):
    case = Case("q", "?", evidence=tuple(evidence))
    table = pd.DataFrame([{"chunk_id": f"{a}-{b}", "doc_id": "d", "start": a, "end": b} for a, b in chunks])
    hits = pd.DataFrame([{"query_id": "q", "rank": r, "chunk_id": f"{a}-{b}", "doc_id": "d", "start": a, "end": b} for r, (a, b) in enumerate(order, 1)],
                        columns=["query_id", "rank", "chunk_id", "doc_id", "start", "end"])
    out = score_hits([case], hits, {"d": text}, project([case], table, {"d": text}), measures, **more)
    return out["value"].tolist()


WORDS = [(0, 10), (11, 21), (22, 32), (33, 43), (44, 54)]


def test_two_groups_both_found_score_one():
    assert by_hand([Evidence("d", 0, 10), Evidence("d", 11, 21, group="2")], WORDS, WORDS[:2], ["EvidenceRecall@5", "Recall@5", "Complete@5", "EvidencenDCG@5", "AllRR@5"]) == [1, 1, 1, 1, .5]
    assert by_hand([Evidence("d", 0, 10, group="1"), Evidence("d", 0, 10, group="2")], WORDS, WORDS[:1], ["EvidenceRecall@1", "EvidencenDCG@1"]) == [1, 1]


def test_any_alternative_suffices():
    gold = [Evidence("d", 0, 10, alt="1"), Evidence("d", 44, 54, alt="2")]
    assert by_hand(gold, WORDS, WORDS[4:], ["EvidenceRecall@1", "Recall@1", "Complete@1", "Hit@1", "EvidencenDCG@1", "EvidenceRecall@400t"]) == [1] * 6
    assert by_hand(gold, WORDS, WORDS[4:], ["IoU@1", "EvidencePrecision@1"]) == [1, 1]


def test_all_spans_of_an_alternative_are_needed():
    gold = [Evidence("d", 0, 10), Evidence("d", 33, 43)]
    assert by_hand(gold, WORDS, [WORDS[0]], ["EvidenceRecall@5", "Complete@5"]) == [0, 0]
    assert by_hand(gold, WORDS, [WORDS[0], WORDS[3]], ["EvidenceRecall@5", "EvidenceRecall@1", "Complete@5"]) == [1, 0, 1]


def test_found_in_union_only_and_overlapping_chunks():
    gold = [Evidence("d", 0, 21)]
    assert by_hand(gold, WORDS, WORDS[:2], ["EvidenceRecall@1", "EvidenceRecall@2"]) == [0, 1]
    assert by_hand(gold, [(0, 15), (8, 21)], [(0, 15), (8, 21)], ["EvidenceRecall@1", "EvidenceRecall@2", "EvidencePrecision@2", "Redundancy@2"]) == pytest.approx([0, 1, 20 / 26, 6 / 26])


@pytest.mark.parametrize("size,end,found", [(20, 19, 1), (20, 18, 0), (60, 57, 1), (60, 56, 0), (40, 38, 1), (100, 95, 1), (100, 94, 0), (140, 133, 1)])
def test_the_threshold_is_met_exactly(size, end, found):
    assert by_hand([Evidence("d", 0, size)], [(0, end)], [(0, end)], ["EvidenceRecall@1"], text="x" * 200) == [found]


def test_point_at_is_met_exactly():
    assert by_hand([Evidence("d", 0, 10)], [(0, 5)], [(0, 5)], ["Recall@1"]) == [1]
    assert by_hand([Evidence("d", 0, 10)], [(0, 4)], [(0, 4)], ["Recall@1"]) == [0]


def test_fewer_hits_than_k_and_none():
    gold = [Evidence("d", 0, 10)]
    assert by_hand(gold, WORDS, WORDS[:1], ["Precision@5", "ChunkRecall@5", "Recall@5"]) == [.2, 1, 1]
    assert by_hand(gold, WORDS, [], ["Precision@5", "Recall@5", "EvidenceRecall@5", "EvidenceRecall@400t", "nDCG@5", "MRR@5", "EvidencenDCG@5", "EvidencePrecision@5", "IoU@5", "AllRR@5"]) == [0] * 10
    assert np.isnan(by_hand(gold, WORDS, [], ["Redundancy@5", "MaxSourceShare@5"])).all()


def test_unreachable_groups_score_zero():
    gold = [Evidence("d", 0, 10), Evidence("d", 22, 43, group="2")]
    assert by_hand(gold, WORDS[:2], WORDS[:2], ["Recall@5", "EvidenceRecall@5", "nDCG@5"]) == [.5, .5, 1]
    p = project([Case("q", "?", evidence=tuple(gold))], pd.DataFrame({"chunk_id": ["a"], "doc_id": "d", "start": [0], "end": [10]}), {"d": TEXT})
    assert p.groups["reachable"].tolist() == [True, False] and p.cut_rate().cut == p.cut_rate().unreachable == 1


@pytest.mark.parametrize("blank", ["", " \n\u200b"])
def test_a_relevant_document_without_text_is_unreachable(blank):
    texts = {"d": TEXT, "lost": blank}
    gold = [Evidence("lost", 0, len(blank), group="lost", granularity="document"), Evidence("d", 0, len(TEXT), group="d", granularity="document")]
    cases = [Case("both", "?", evidence=tuple(gold)), Case("only", "?", evidence=(gold[0],)), Case("other", "?", evidence=(gold[1],))]
    chunks = pd.DataFrame({"chunk_id": ["d:0"], "doc_id": "d", "start": 0, "end": len(TEXT)})
    hits = pd.concat([chunks.assign(query_id=c.query_id, rank=1) for c in cases])
    p = project(cases, chunks, texts)
    assert p.groups["reachable"].tolist() == [False, True, False, True] and p.cut_rate().unreachable == 2
    names = ["Recall@5", "EvidenceRecall@5", "EvidenceRecall@400t", "Complete@5", "Hit@5", "MRR@5", "AllRR@5"]
    table = score_hits(cases, hits, texts, p, names).pivot(index="query_id", columns="measure", values="value")[names]
    assert table.values.tolist() == [[.5, .5, .5, 0, 1, 1, 0], [0] * 7, [1] * 7]
    assert (uniform_floor(cases, p, chunks, {c.query_id: ["d", "lost"] for c in cases}, texts, names, 7)["value"] == table.to_numpy().ravel()).all()
    with pytest.raises(BadInput, match="'q' evidence: 0-.* of 'lost' holds nothing visible"): project([Case("q", "?", evidence=(Evidence("lost", 0, len(blank)),))], chunks, texts)


def test_mrr_looks_for_core_evidence_first():
    gold = [Evidence("d", 0, 10, grade=2), Evidence("d", 11, 21, grade=3, group="2"), Evidence("d", 22, 32, grade=1, group="3")]
    assert by_hand(gold, WORDS, [WORDS[2], WORDS[0], WORDS[1]], ["MRR@5", "MRR(min_grade=2)@5", "MRR@2", "Recall@5", "Recall(min_grade=3)@2"]) == [1 / 3, 1 / 2, 0, 1, 0]
    assert by_hand(gold[:1], WORDS, WORDS, ["MRR@5"]) == [1]


def test_background_alone_is_undefined_and_counts_only_in_gain():
    assert np.isnan(by_hand([Evidence("d", 0, 10, grade=1)], WORDS, WORDS, ["Recall@5", "EvidenceRecall@5", "EvidencenDCG@5", "nDCG@5", "Precision@5"])).all()
    gold = [Evidence("d", 0, 10), Evidence("d", 11, 21, grade=1, group="2")]
    want = 3 / (3 + 1 / np.log2(3))
    assert by_hand(gold, WORDS, WORDS[:1], ["EvidencenDCG@5", "Precision@1", "ChunkRecall@1", "nDCG@5"]) == pytest.approx([want, 1, 1, want])


def test_evidence_ndcg_of_several_groups_in_one_chunk():
    gold = [Evidence("d", 0, 10), Evidence("d", 11, 21, grade=2, group="2")]
    assert by_hand(gold, [(0, 21)], [(0, 21)], ["EvidencenDCG@1", "EvidencenDCG@5"]) == [1, 1]
    ideal = 3 + 2 / np.log2(3)
    assert by_hand(gold, WORDS, [WORDS[4], WORDS[1], WORDS[0]], ["EvidencenDCG@5"]) == pytest.approx([(2 / np.log2(3) + 3 / 2) / ideal])


def test_sections_and_documents():
    gold = [Evidence("d", 0, 21, granularity="section")]
    assert by_hand(gold, [(0, 30), (15, 43)], [(15, 43), (0, 30)], ["Recall@1", "EvidenceRecall@1", "EvidenceRecall@2", "MRR@2", "Precision@2"]) == [0, 0, 1, .5, .5]
    assert np.isnan(by_hand(gold, WORDS, WORDS, ["IoU@5", "EvidencePrecision@5"])).all()
    assert by_hand([Evidence("d", 0, 54, granularity="document")], WORDS, WORDS[3:], ["Recall@1", "EvidenceRecall@1", "EvidenceRecall@1t"]) == [1, 1, 1]


def test_budget_cuts_inside_a_span():
    text = "one two three four five six seven eight nine ten"
    assert count_tokens([text])[0] == 10
    gold = [Evidence("d", 0, 23)]
    got = by_hand(gold, [(0, 48)], [(0, 48)], ["EvidenceRecall@4t", "EvidenceRecall@5t", "EvidenceRecall@50t", "EvidencePrecision@5t", "Complete@4t"], text=text)
    assert got == [0, 1, 1, 1, 0]
    later = by_hand(gold, [(24, 48), (0, 23)], [(24, 48), (24, 48), (0, 23)], ["EvidenceRecall@14t", "EvidenceRecall@15t", "EvidenceRecall@10t", "Redundancy@10t"], text=text)
    assert later == [0, 1, 0, .5]
    assert by_hand(gold, [(0, 48)], [(0, 48)], ["EvidenceRecall@5t"], text=text, token_counts={"0-48": 10}) == [1]


def test_added_context_is_paid_and_counts():
    text = "head line here. row one is here. row two is here."
    case = Case("q", "?", evidence=(Evidence("d", 0, 15), Evidence("d", 33, 49)))
    hits = pd.DataFrame({"query_id": "q", "rank": [1], "chunk_id": ["r2"], "doc_id": "d", "start": [33], "end": [49], "context": [((0, 15),)]})
    p = project([case], hits[["chunk_id", "doc_id", "start", "end", "context"]], {"d": text})
    n = int(count_tokens([text[:15] + "\n" + text[33:]])[0])
    assert score_hits([case], hits, {"d": text}, p, ["EvidenceRecall@1", f"EvidenceRecall@{n}t", f"EvidenceRecall@{n - 3}t", "EvidencePrecision@1", "Recall@1"])["value"].tolist() == [1, 1, 0, 1, 1]
    assert p.groups["intact"].all() and score_hits([case], hits.drop(columns="context"), {"d": text}, p, ["EvidenceRecall@1"])["value"].tolist() == [0]


def test_max_source_share_counts_families():
    case = Case("q", "?", evidence=(Evidence("a1", 0, 3),))
    texts = {"a1": "one", "a2": "two", "b": "six"}
    hits = pd.DataFrame({"query_id": "q", "rank": [1, 2, 3], "chunk_id": ["1", "2", "3"], "doc_id": ["a1", "a2", "b"], "start": 0, "end": 3})
    p = project([case], hits[["chunk_id", "doc_id", "start", "end"]], texts)
    assert score_hits([case], hits, texts, p, ["MaxSourceShare@3"], family={"a1": "a", "a2": "a"})["value"].tolist() == [2 / 3]
    assert score_hits([case], hits, texts, p, ["MaxSourceShare@3", "MaxSourceShare@10"])["value"].tolist() == [1 / 3, 1 / 3]


# ---------------------------------------------------------------- evidence: properties
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 60), k=st.integers(1, 6), budget=st.integers(1, 60))
def test_laws(seed, size, k, budget):
    cases, hits, _, texts = random_world(seed, n_cases=4)
    rows = [(d, a, min(a + size, len(t))) for d, t in texts.items() for a in range(0, len(t), size)]
    chunks = pd.DataFrame([{"chunk_id": f"{d}:{a}-{b}", "doc_id": d, "start": a, "end": b} for d, a, b in rows])
    p = project(cases, chunks, texts)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(chunks))[:8]
    lean = pd.concat([chunks.iloc[order].assign(query_id=c.query_id, rank=np.arange(1, len(order) + 1)) for c in cases])
    lean = lean.reset_index(drop=True)
    fat = lean.loc[lean.index.repeat(2)].assign(rank=np.tile(np.arange(1, 2 * len(order) + 1), len(cases)))
    score = lambda h, names: score_hits(cases, h, texts, p, names)["value"].to_numpy().reshape(len(cases), -1)
    names = [f"Recall@{k}", f"Recall@{k + 1}", f"EvidenceRecall@{k}", f"EvidenceRecall@{k + 1}", f"EvidenceRecall@{budget}t", f"EvidenceRecall@{budget + 2}t", f"EvidencenDCG@{k}",
             f"EvidencenDCG@{k + 1}", f"Complete@{budget}t", f"Complete@{budget + 9}t", "EvidencePrecision@50", "IoU@50", "nDCG@5", "MAP", "EvidenceRecallArea(budgets=[5,50])"]
    a, b = score(lean, names), score(fat, names)
    on = ~np.isnan(a[:, 0])
    assert ((a[on][:, [0, 2, 4, 6, 8]] <= a[on][:, [1, 3, 5, 7, 9]] + 1e-12).all()) and (np.nan_to_num(a) <= 1).all() and (np.nan_to_num(a) >= 0).all()
    assert (np.nan_to_num(b) <= np.nan_to_num(a) + 1e-12).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(12, 200))
def test_a_perfect_ranking_scores_one_under_every_chunking(seed, size):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("abcdefg "), 400)) + "z"
    spans = sorted((int(a), int(a) + 5) for a in rng.choice(390, 3, replace=False))
    case = Case("q", "?", evidence=tuple(Evidence("d", a, b, grade=3, group=str(i)) for i, (a, b) in enumerate(spans)))
    if any(not text[a:b].strip() for a, b in spans): return
    windows_ = [(a, min(a + size, len(text))) for a in range(0, len(text), size)]
    chunks = pd.DataFrame([{"chunk_id": f"{a}-{b}", "doc_id": "d", "start": a, "end": b} for a, b in windows_])
    p = project([case], chunks, {"d": text})
    if not p.groups["reachable"].all(): return
    order, todo = [], set(p.groups["group"])
    for r in p.relevant.itertuples():
        if r.group in todo: order.append(r.chunk_id); todo -= set(p.relevant[p.relevant["chunk_id"] == r.chunk_id]["group"])
    hits = chunks.set_index("chunk_id").loc[order].reset_index().assign(query_id="q", rank=range(1, len(order) + 1))
    assert score_hits([case], hits, {"d": text}, p, ["EvidencenDCG@10"])["value"].iloc[0] == pytest.approx(1)


@pytest.mark.parametrize("seed", [0, 1])
def test_projected_qrels_agree_with_pytrec_eval(seed):
    pytrec_eval = pytest.importorskip("pytrec_eval")
    cases, hits, chunks, texts = random_world(seed)
    hits = hits.sort_values(["query_id", "rank"]).drop_duplicates(["query_id", "chunk_id"])
    hits["rank"] = hits.groupby("query_id").cumcount() + 1
    p = project(cases, chunks, texts)
    qrels, run = {}, {}
    for r in p.qrels().itertuples(): qrels.setdefault(r.query_id, {})[r.chunk_id] = r.grade
    for r in hits.itertuples(): run.setdefault(r.query_id, {})[r.chunk_id] = 100.0 - r.rank
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.5", "ndcg"}).evaluate(run)
    strict = pytrec_eval.RelevanceEvaluator(qrels, {"recall.5", "map", "P.5"}, relevance_level=2).evaluate(run)
    mine = score_hits(cases, hits, texts, p, ["nDCG@5", "nDCG", "ChunkRecall@5", "MAP", "Precision@5"]).pivot(index="query_id", columns="measure", values="value")
    required = set(p.groups[p.groups["grade"] >= 2]["query_id"])
    checked = 0
    for q in set(theirs) & required:
        want = [theirs[q]["ndcg_cut_5"], theirs[q]["ndcg"], strict[q]["recall_5"], strict[q]["map"], strict[q]["P_5"]]
        assert mine.loc[q, ["nDCG@5", "nDCG", "ChunkRecall@5", "MAP", "Precision@5"]].tolist() == pytest.approx(want, abs=1e-9); checked += 1
    assert checked >= 4


# ---------------------------------------------------------------- floors
def test_exact_floors_equal_all_permutations():
    from itertools import permutations
    text = "aaaaa bbbbb ccccc ddddd eeeee"
    chunks = pd.DataFrame([{"chunk_id": f"{a}-{a + n}", "doc_id": "d", "start": a, "end": a + n} for a, n in ((0, 5), (6, 5), (12, 5), (18, 5), (0, 11))])
    cases = [Case("q1", "?", evidence=(Evidence("d", 0, 5), Evidence("d", 6, 11, grade=2, group="2"), Evidence("d", 18, 23, grade=1, group="3"))),
             Case("q2", "?", evidence=(Evidence("d", 24, 29, grade=2), Evidence("d", 12, 17, grade=2, group="2"), Evidence("d", 6, 11, grade=2, alt="2", group="2"))),
             Case("q3", "?", answerable=False), Case("q4", "?", evidence=(Evidence("d", 24, 29),))]
    names = ["Recall@2", "Hit@2", "Precision@2", "Precision@9", "MRR@3", "MRR", "MRR(min_grade=2)@2", "ChunkRecall@2", "MAP", "MAP@2", "nDCG@3", "nDCG(gain=exp)@9", "Recall(min_grade=3)@2", "Recall@9"]
    loose = ["EvidenceRecall@2", "EvidencenDCG@3", "AllRR@4", "EvidenceRecall@4t", "EvidencePrecision@4t"]
    p, orders = project(cases, chunks, {"d": text}), list(permutations(range(5)))
    total = sum(score_hits(cases, pd.concat([chunks.iloc[list(o)].assign(query_id=c.query_id, rank=range(1, 6)) for c in cases]), {"d": text}, p, names + loose)["value"].to_numpy() for o in orders)
    visible = {c.query_id: {"d", "not there"} for c in cases}
    floor = uniform_floor(cases, p, chunks, visible, {"d": text}, names + loose, seed=7)
    got, want = (x.reshape(4, -1) for x in (floor["value"].to_numpy(), total / len(orders)))
    assert np.allclose(got[:, :len(names)], want[:, :len(names)], atol=1e-12, equal_nan=True) and np.isnan(got[2]).all() and (got[3][:2] == 0).all()
    assert np.allclose(got[:, -1:], want[:, -1:], atol=.15, equal_nan=True)
    assert np.allclose(got[:, len(names):-1], want[:, len(names):-1], atol=.03, equal_nan=True) and np.allclose(got[3], want[3], atol=1e-12)
    again = uniform_floor(cases[::-1], p, chunks.iloc[::-1], visible, {"d": text}, names + loose, seed=7)
    both = floor.merge(again, on=["query_id", "measure"])
    assert len(both) == len(floor) and np.array_equal(both["value_x"], both["value_y"], equal_nan=True)
    assert not uniform_floor(cases, p, chunks, visible, {"d": text}, loose, seed=8)["value"].equals(uniform_floor(cases, p, chunks, visible, {"d": text}, loose, seed=7)["value"])


def study_world():
    "The bundled study: its tune cases, the chunks of `fixed(size=200, overlap=40)`, what their askers see, the documents' texts."
    from ragbench.engine import stages
    from ragbench.golden.formats import load_bench
    from ragbench.core.text import count_tokens
    bench = load_bench("aftersales")
    texts = {d.doc_id: d.text for d in bench.documents}
    asked = stages.CaseSet.of([c for c in bench.cases if c.split == "tune"], bench.documents)
    rows = [(f"{d}:{a}", d, a, min(a + 200, len(t))) for d, t in sorted(texts.items()) for a in range(0, max(len(t) - 40, 1), 160)]
    chunks = pd.DataFrame(rows, columns=["chunk_id", "doc_id", "start", "end"])
    return asked, chunks.assign(tokens=count_tokens([texts[d][a:b] for _, d, a, b in rows])), texts


def test_floors_of_the_study_by_brute_force():
    """Recall@5 counts a chunk that holds half of a span, so its floor is higher than that of whole spans; both against drawn rankings."""
    from collections import defaultdict
    asked, chunks, texts = study_world()
    p, rng, draws = project(asked.cases, chunks, texts), np.random.default_rng(3), 2000
    got = uniform_floor(asked.cases, p, chunks, asked.visible, texts, ["Recall@5", "EvidenceRecall@5"], 7).pivot(index="query_id", columns="measure", values="value")
    loose, strict, checked = [], [], 0
    for c in asked.cases:
        seen = chunks[chunks["doc_id"].isin(asked.visible[c.query_id])]
        places = list(zip(seen["doc_id"], seen["start"], seen["end"]))
        groups = defaultdict(list)
        for e in c.evidence:
            if e.grade < 2: continue
            ink = [i for i in range(e.start, e.end) if is_ink(texts[e.doc_id][i])]
            groups[e.group].append((e.alt, [sum(a <= i < b for i in ink) / len(ink) if d == e.doc_id else 0 for d, a, b in places]))
        if not groups or any(e.granularity != "quote" for e in c.evidence) or any(len(s) > 1 for s in groups.values()): continue
        share = np.array([s[0][1] for s in groups.values()])
        top = np.argsort(rng.random((draws, len(places))), axis=1)[:, :5]
        half, whole = (share >= .5)[:, top].any(2).mean(0), (share >= .95)[:, top].any(2).mean(0)
        for found, name, same in ((half, "Recall@5", True), (whole, "EvidenceRecall@5", ((share > 0) == (share >= .95)).all())):
            if same: assert abs(got.loc[c.query_id, name] - found.mean()) <= 4.5 * max(found.std(), .02) / draws ** .5, (c.query_id, name)
        loose, strict, checked = [*loose, half.mean()], [*strict, whole.mean()], checked + 1
    assert checked >= 25 and np.mean(loose) > np.mean(strict)


def test_floors_on_budgets_hardly_depend_on_the_seed():
    asked, chunks, texts = study_world()
    names, few = ["EvidenceRecall@800t", "EvidenceRecall@5"], asked.cases[:40]
    p = project(asked.cases, chunks, texts)
    table = pd.concat([uniform_floor(few, p, chunks, asked.visible, texts, names, seed).assign(seed=seed) for seed in range(3)])
    each = table.pivot_table(index=["measure", "query_id"], columns="seed", values="value")
    assert each.std(axis=1).max() < .015 and each.groupby("measure").mean().std(axis=1).max() < .002
    rng, total, draws = np.random.default_rng(5), 0, 60
    for _ in range(draws):
        orders = [seen.iloc[rng.permutation(len(seen))[:40]].assign(query_id=c.query_id, rank=range(1, min(len(seen), 40) + 1))
                  for c in few for seen in [chunks[chunks["doc_id"].isin(asked.visible[c.query_id])]]]
        total = total + score_hits(few, pd.concat(orders), texts, p, names, dict(zip(chunks["chunk_id"], chunks["tokens"]))).groupby("measure")["value"].mean()
    assert each.mean(axis=1).groupby("measure").mean().to_numpy() == pytest.approx((total / draws).to_numpy(), abs=.012)


def test_speed_of_scoring_and_projection():
    import time
    rng = np.random.default_rng(0)
    texts = {f"d{i}": "".join(rng.choice(list("abcdefgh "), 5000)) for i in range(500)}
    chunks = pd.DataFrame([{"chunk_id": f"{d}:{a}-{a + 100}", "doc_id": d, "start": a, "end": a + 100} for d in texts for a in range(0, 5000, 100)])
    where = rng.integers(0, 4900, 3500).tolist()
    cases = [Case(f"q{i}", "?", evidence=(Evidence(f"d{i % 500}", a, a + 80), Evidence(f"d{(i * 7) % 500}", a, a + 50, group="2"))) for i, a in enumerate(where)]
    began = time.perf_counter()
    p = project(cases, chunks, texts)
    projected = time.perf_counter() - began
    hits = pd.concat([chunks.iloc[rng.choice(len(chunks), 100, replace=False)].assign(query_id=c.query_id, rank=np.arange(1, 101)) for c in cases[:1000]])
    names = expand(["EvidenceRecall", "Recall", "Precision", "MRR", "nDCG", "EvidencenDCG", "AllRR", "EvidencePrecision"])
    costs = dict.fromkeys(chunks["chunk_id"], 60)
    began = time.perf_counter()
    out = score_hits(cases[:1000], hits, texts, p, names, costs)
    scored = time.perf_counter() - began
    assert len(out) == 1000 * len(names) and projected < 8 and scored < 10, (projected, scored)


# ---------------------------------------------------------------- chunk_spans
def is_cut(marks, e, size):
    most = max(marks[max(e.start, a):min(e.end, a + size)].sum() for a in range(e.start // size * size, e.end, size))
    return most < .95 * marks[e.start:e.end].sum() - 1e-9


@pytest.mark.shared
@needs("chunk_spans")
@pytest.mark.parametrize("name", ["state_of_the_union", "wikitexts", "pubmed"])
def test_cut_rate_agrees_with_a_direct_count(name):
    import json
    folder = SHARED / "chunk_spans"
    text = (folder / "corpora" / f"{name}.md").read_text(encoding="utf-8")
    table = pd.read_csv(folder / f"questions_{name}.csv")
    cases = [Case(f"q{i}", r.question, evidence=tuple(Evidence(name, s["start_index"], s["end_index"], group=str(j)) for j, s in enumerate(json.loads(r.references)))) for i, r in enumerate(table.itertuples())]
    marks = np.array([is_ink(c) for c in text])
    for size in (200, 400):
        chunks = pd.DataFrame([{"chunk_id": f"{a}", "doc_id": name, "start": a, "end": min(a + size, len(text))} for a in range(0, len(text), size)])
        rate = project(cases, chunks, {name: text}).cut_rate()
        spans = [e for c in cases for e in c.evidence]
        assert (rate.cut, rate.n) == (sum(is_cut(marks, e, size) for e in spans), len(spans))
