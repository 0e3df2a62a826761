"""The experiment files on the public data sets: tables, agreement with bm25s and trec_eval, language pairs, chunk sizes, held-out reranking, same results twice."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ragbench.core.text import is_ink
from ragbench.engine.files import read_experiment
from ragbench.engine.results import Results
from ragbench.engine.store import Store
from ragbench.measures.ranked import evaluate
from ragbench.pipeline.retrieve import tokenise

HERE = Path(__file__).parents[1]
DATA = HERE.parent / "shared" / "data"
FILES = HERE / "experiments"
pytestmark = [pytest.mark.shared, pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the project (../shared/data)")]

CROSS = ("xquad-zh-en", "xquad-en-zh")
PAIRS = ("xquad-zh", "xquad-en", *CROSS)
WHOLE = (*PAIRS, "drcd", "cranfield")                 # one chunk a paragraph or document
LEXICAL = "matrix.retriever={A: bm25}"
UNRANKED = 'matrix.retriever={A: bm25, B: dense, C: "0.7*dense + 0.3*bm25"}'
BRIEF = ("base.retriever=bm25", "measures=[EvidenceRecall]", "cutoffs=[5]", "budgets=[100, 400, 800, 1600, 3200]")
RERANKED = 'matrix.retriever={D: "0.7*dense + 0.3*bm25 >> ltr(top_n=20)"}'
BUDGETS = (400, 800, 1600, 3200)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    "Experiment and results of a file under settings; stages are shared, between processes too."
    base, made = tmp_path_factory.getbasetemp(), {}
    store = Store((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "experiments-cache")

    def get(name, *settings):
        if (name, settings) not in made:
            experiment = read_experiment(FILES / f"{name}.yaml", settings)
            made[name, settings] = experiment, experiment.run(tmp_path_factory.mktemp("runs"), store)
        return made[name, settings]
    return get


def table(results, *measures):
    return results.leaderboard(list(measures) or None).set_index(["config", "measure"])


def articles(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))["data"]


def expected_size(name):
    "Cases and clusters, counted in the files."
    if name == "cranfield":
        rows = pd.read_csv(DATA / "cranfield/qrels.tsv", sep="\t", dtype=str).set_axis(["q", "d", "g"], axis=1)
        good = rows[rows["g"].astype(int) > 0]
        return good["q"].nunique(), good.groupby("q", sort=False)["d"].first().nunique()
    data = articles({"drcd": "drcd/DRCD_dev.json"}.get(name, "xquad/xquad.zh.json"))
    return sum(len(p["qas"]) for a in data for p in a["paragraphs"]), sum(any(p["qas"] for p in a["paragraphs"]) for a in data)


def relevant(experiment):
    return {c.query_id: {e.doc_id: int(e.grade > 0) for e in c.evidence} for c in experiment.asked.cases}


# ---------------------------------------------------------------- tables
def check_table(name, experiment, results):
    n, clusters = expected_size(name)
    assert len(results.chunks) == sum(any(map(is_ink, d.text)) for d in experiment.bench.documents)
    length = {d.doc_id: len(d.text) for d in experiment.bench.documents}
    assert (results.chunks["start"] == 0).all() and (results.chunks["end"] == results.chunks["doc_id"].map(length)).all() and results.chunks["doc_id"].is_unique
    board = results.leaderboard()
    assert (board["n"] == n).all() and (board["clusters"] == clusters).all()
    assert ((board["low"] <= board["mean"]) & (board["mean"] <= board["high"]) & (board["low"] >= 0) & (board["high"] <= 1)).all()
    if name != "cranfield": assert table(results).loc[("A", "Recall@10"), "floor"] == pytest.approx(10 / len(results.chunks))


def check_comparisons(results):
    "C − B with its interval on Recall@1 and Recall@10, and a sentence that says what the interval says."
    rows = results.comparisons()
    for r in rows.itertuples():
        values = results.values(r.measure)
        assert r.low <= r.difference <= r.high and r.difference == pytest.approx((values[r.b] - values[r.a]).mean())
        word = "helps" if r.low > 0 else "hurts" if r.high < 0 else "undecided"
        assert [w for w in ("helps", "hurts", "undecided") if w in r.sentence] == [word]
        assert f"difference {r.difference:+.3f} [{r.low:+.3f}, {r.high:+.3f}] over n = {r.n} cases in {r.clusters} clusters" in r.sentence
    return rows[(rows["a"] == "B") & (rows["b"] == "C")].set_index("measure")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_tables_of_the_four_retrievers(run, name):
    experiment, results = run(name)
    assert results.configs == ["A", "B", "C", "D"] and not results.manifest["failures"]
    check_table(name, experiment, results)
    assert {"Recall@1", "Recall@10"} <= set(check_comparisons(results).index)
    assert {m.split("@")[0] for m in results.manifest["measures"]} >= {"Recall", "Hit", "MRR", "nDCG"}
    hits = results.hits.groupby(["config", "query_id"])["rank"].agg(["min", "max", "count"])
    assert (hits["min"] == 1).all() and (hits["max"] == hits["count"]).all() and hits["max"].max() == 100


@pytest.mark.slow
def test_table_of_the_four_retrievers_on_spans(run):
    _, results = run("chunk-spans")
    board = table(results, "EvidenceRecall@800t", "EvidenceRecall@5", "Recall@5")
    assert results.configs == ["A", "B", "C", "D"] and (board["n"] == 319).all() and (board["clusters"] == 3).all()
    assert (board["mean"] > 20 * board["floor"]).all() and (board["floor"] > 0).all()
    assert not [s for s in check_comparisons(results)["sentence"] if "undecided: too few clusters" not in s]     # three documents conclude nothing


# ---------------------------------------------------------------- BM25
def by_bm25s(experiment):
    "The run that bm25s gives when it is called directly: best first, scores above 0."
    import bm25s
    documents, cases = sorted(experiment.bench.documents, key=lambda d: d.doc_id), experiment.asked.cases
    model = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    model.index([tokenise(d.text) for d in documents], show_progress=False)
    rows, scores = model.retrieve([list(dict.fromkeys(tokenise(c.query))) or [""] for c in cases], k=100, show_progress=False)
    return {c.query_id: {documents[i].doc_id: float(s) for i, s in zip(r, x) if s > 0} for c, r, x in zip(cases, rows, scores)}


@pytest.mark.parametrize("name", WHOLE)
def test_bm25_agrees_with_bm25s(run, name):
    experiment, results = run(name, UNRANKED if name in CROSS else LEXICAL)
    check_table(name, experiment, results)
    hits, qrels, theirs = results.hits.query("config == 'A'")[["query_id", "doc_id", "score"]], relevant(experiment), by_bm25s(experiment)
    mine = evaluate(qrels, hits, "Recall@10")["value"][0]
    assert abs(mine - evaluate(qrels, theirs, "Recall@10")["value"][0]) <= .001
    assert mine == pytest.approx(table(results).loc[("A", "Recall@10"), "mean"], abs=1e-9)
    top = hits.groupby("query_id")["score"].first()
    np.testing.assert_allclose(top, [max(theirs[q].values()) for q in top.index], rtol=1e-5)
    if name in ("xquad-zh", "xquad-en", "drcd"): assert mine >= .98
    if name == "xquad-zh-en": assert mine == pytest.approx(.16, abs=.05)
    if name == "xquad-en-zh": assert mine == pytest.approx(.22, abs=.05)


def test_cranfield_reproduces_trec_eval(run):
    experiment, results = run("cranfield", LEXICAL)
    names = {"map": "MAP", "recip_rank": "MRR", "ndcg_cut_10": "nDCG@10", "P_10": "Precision@10", "recall_10": "Recall@10", "recall_100": "Recall@100"}
    stored = {(q, names[m]): float(v) for m, q, v in map(str.split, (DATA / "cranfield/bm25_top100.trec_eval.txt").read_text().splitlines()) if m in names}
    stored_mean = {m: stored["all", m] for m in names.values()}
    assert stored_mean == {"MAP": .2668, "MRR": .4952, "nDCG@10": .3580, "Precision@10": .2262, "Recall@10": .3821, "Recall@100": .6966}
    hits, asked = results.hits[["query_id", "doc_id", "score"]], ["MAP", "MRR", "nDCG@10", "P@10", "R@10", "R@100"]
    for qrels in (DATA / "cranfield/qrels.tsv", DATA / "cranfield/original/cranqrel.trec.txt"):
        for ties in (False, True):
            mean = evaluate(qrels, hits, asked, trec_eval=ties)
            assert {r.measure: round(r.value, 4) for r in mean.itertuples()} == stored_mean and (mean["n"] == 225).all()
            each = evaluate(qrels, hits, asked, per_query=True, trec_eval=ties)
            assert len(each) == 225 * 6 and max(abs(r.value - stored[r.query_id, r.measure]) for r in each.itertuples()) <= 5.1e-5
    board = table(results)["mean"].round(4)
    assert board["A", "Recall@10"] == .3821 and board["A", "Precision@10"] == .2262
    empty = {d.doc_id for d in experiment.bench.documents if not d.text}
    assert empty == {"471", "995"} and empty & {e.doc_id for c in experiment.asked.cases for e in c.evidence} == {"995"}      # judged relevant, and unreachable


# ---------------------------------------------------------------- language pairs
def check_pair(name, results):
    differences = check_comparisons(results)
    assert {"Recall@1", "Recall@10"} <= set(differences.index) and (differences["clusters"] == 36).all() and (differences["n"] == 925).all()
    board = table(results)["mean"]
    if name in CROSS: assert board["B", "Recall@10"] >= .95 and board["B", "Recall@10"] > board["A", "Recall@10"] + .6
    else: assert min(board[c, "Recall@10"] for c in "ABC") >= .95


@pytest.mark.parametrize("name", [n if n in CROSS else pytest.param(n, marks=pytest.mark.slow) for n in PAIRS])
def test_dense_crosses_languages_and_fusion_is_compared(run, name):
    check_pair(name, run(name, UNRANKED)[1])


# ---------------------------------------------------------------- chunk sizes
def spans_cut(experiment, size):
    "Gold spans of which no window of `size` characters holds 95 % of the visible characters, counted one by one."
    text = {d.doc_id: d.text for d in experiment.bench.documents}
    cut = 0
    for e in (e for c in experiment.asked.cases for e in c.evidence):
        windows = [i // size for i in range(e.start, e.end) if is_ink(text[e.doc_id][i])]
        cut += max(map(windows.count, set(windows))) < .95 * len(windows) - 1e-9
    return cut


def found_at_5(experiment, results, config):
    "EvidenceRecall@5, counted character by character."
    text = {d.doc_id: d.text for d in experiment.bench.documents}
    top = results.hits[(results.hits["config"] == config) & (results.hits["rank"] <= 5)].groupby("query_id")
    values = []
    for c in experiment.asked.cases:
        hits, found = top.get_group(c.query_id), []
        for e in c.evidence:
            ink = np.array([i for i in range(e.start, e.end) if is_ink(text[e.doc_id][i])])
            seen = [(h.start <= ink) & (ink < h.end) for h in hits.itertuples() if h.doc_id == e.doc_id]
            found.append(np.any(seen, axis=0).sum() >= .95 * len(ink) - 1e-9 if seen else False)
        values.append(np.mean(found))
    return np.mean(values)


def check_sizes(experiment, results):
    sizes = {c["config"]: int(c["chunker"].partition("size=")[2].split(",")[0] or 200) for c in results.manifest["configs"]}
    assert sorted(sizes.values()) == [200, 400, 800, 1600]
    names = [m for m in results.manifest["measures"] if m.startswith("EvidenceRecall@") and (m.endswith("t") or m == "EvidenceRecall@5")]
    assert {"EvidenceRecall@5", *(f"EvidenceRecall@{b}t" for b in BUDGETS)} <= set(names)
    board = results.leaderboard(names)
    assert len(board) == 4 * len(names) and (board["n"] == 319).all() and (board["clusters"] == 3).all()
    assert ((board["low"] < board["mean"]) & (board["mean"] < board["high"]) & (board["floor"] > 0) & (board["floor"] < .05) & (board["mean"] > 10 * board["floor"])).all()
    order = {m: [sizes[c] for c in g.sort_values("mean", ascending=False)["config"]] for m, g in board.groupby("measure")}
    assert order["EvidenceRecall@5"] == [1600, 800, 400, 200]
    assert any(order[m] != order["EvidenceRecall@5"] for m in names)
    for c in results.configs: assert found_at_5(experiment, results, c) == pytest.approx(board.set_index(["config", "measure"])["mean"][c, "EvidenceRecall@5"])
    cut = results.chunking().set_index("chunker")
    for c in results.manifest["configs"]:
        row = cut.loc[c["chunker"]]
        assert (row["cut"], row["groups"]) == (spans_cut(experiment, sizes[c["config"]]), 539) and row["evidence_cut_rate"] == pytest.approx(row["cut"] / 539)
    return order


def test_chunk_sizes_at_equal_k_and_equal_budget(run):
    check_sizes(*run("chunk-spans-sizes", *BRIEF))


@pytest.mark.slow
def test_chunk_sizes_as_in_the_file(run):
    order = check_sizes(*run("chunk-spans-sizes"))
    assert order["EvidenceRecall@400t"] == [800, 1600, 400, 200]


# ---------------------------------------------------------------- a small part of xquad
@pytest.fixture(scope="module")
def part(tmp_path_factory):
    "Writes the first articles, English and Chinese; `mislead` points the questions of one article at its next paragraph."
    folder = tmp_path_factory.mktemp("part")

    def write(mislead=None, size=7):
        names = {}
        for lang in ("en", "zh"):
            data = articles(f"xquad/xquad.{lang}.json")[:size]
            for article in data:
                if article["title"] != mislead: continue
                asked = [p["qas"] for p in article["paragraphs"]]
                for p, qas in zip(article["paragraphs"], asked[-1:] + asked[:-1]):
                    p["qas"] = [{**qa, "answers": [{"text": p["context"][:9], "answer_start": 0}]} for qa in qas]
            names[lang] = folder / f"{mislead or 'plain'}-{size}.{lang}.json"
            names[lang].write_text(json.dumps({"data": data}), encoding="utf-8")
        return f"bench={{format: squad, path: '{names['en']}', queries: '{names['zh']}', name: part}}"
    return write


def test_the_reranker_never_saw_the_family_it_scores(part, tmp_path):
    """Change what is relevant for one family: its own scores stay the same to the last bit, so no model that scored it had seen it."""
    def scores(setting):
        experiment = read_experiment(FILES / "xquad-zh-en.yaml", [setting, RERANKED])
        results = experiment.run(tmp_path / "runs", store)
        family = dict(zip(results.cases["query_id"], results.cases["cluster"]))
        hits = results.hits[results.hits["config"] == "D"]
        return experiment, hits.assign(family=hits["query_id"].map(family)).sort_values(["query_id", "rank"], ignore_index=True)
    store = Store(tmp_path / "cache")
    plain, before = scores(part())
    misled = sorted(before["family"].unique())[0]
    changed, after = scores(part(misled))
    assert before["family"].nunique() == 7 and plain.study.fitting.key == plain.asked.key
    gold, moved = ({c.query_id: {e.doc_id for e in c.evidence} for c in x.asked.cases} for x in (plain, changed))
    own = set(before.loc[before["family"] == misled, "query_id"])
    assert {q for q in gold if gold[q] != moved[q]} == own
    old, new = (h[h["query_id"].isin(own)][["query_id", "rank", "chunk_id", "score"]].reset_index(drop=True) for h in (before, after))
    pd.testing.assert_frame_equal(old, new, check_exact=True)
    assert (before["score"] != after["score"])[~before["query_id"].isin(own)].mean() > .5          # the others did learn from it


def test_twice_and_on_other_threads_the_same_results(part, tmp_path):
    seen = []
    for place, jobs in (("a", 1), ("a", 2), ("b", 2)):
        results = read_experiment(FILES / "xquad-zh-en.yaml", [part(), RERANKED]).run(tmp_path / place / "runs", Store(tmp_path / place / "cache"), jobs=jobs)
        seen.append(results.manifest["results_sha256"])
        assert (results.outcome["run"] == 0) == (len(seen) == 2)
    assert len(set(seen)) == 1
    assert Results.open(results.folder).manifest["results_sha256"] == seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xquad-zh-en", "chunk-spans"])
def test_another_process_gives_the_same_results(run, tmp_path, name):
    settings = (UNRANKED,) if name == "chunk-spans" else ()
    code = "import sys; from ragbench.engine.files import read_experiment as r; from ragbench.engine.store import Store as S; " \
           "print(r(sys.argv[1], sys.argv[3:]).run(sys.argv[2] + '/runs', S(sys.argv[2] + '/cache'), jobs=1).manifest['results_sha256'])"
    env = {**os.environ, "PYTHONHASHSEED": "11", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(FILES / f"{name}.yaml"), str(tmp_path), *settings], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split()[-1] == run(name, *settings)[1].manifest["results_sha256"]
