"""What an asker may not see does not exist: results equal those of the corpus without it, bit for bit, in random worlds."""
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ragbench.core.model import Actor, Bench, Case, Document, Evidence
from ragbench.engine import stages
from ragbench.engine.config import Matrix
from ragbench.engine.experiment import Experiment
from ragbench.engine.graph import execute
from ragbench.golden.parse import parse_text
from ragbench.pipeline.rerank import Linear, feature_names
from ragbench.pipeline.view import visible, view_of

WORDS = "refund battery screen repair delivery seven days euro fee loan device warranty months 退款规则 电池 维修 免费 七天 保修期 salary secret merger 1,000 A-7".split()
DAYS = ("2026-03-01", "2026-03-02", "2026-03-03", "2026-09-30")
MATRIX = {"chunker": ["fixed(size=60, overlap=15)", "heading(max_size=150, min_size=10)"],
          "retriever": {"A": "bm25", "B": "dense", "C": "0.7*dense + 0.3*bm25", "M": "minmax(0.5*dense + 0.5*bm25)", "R": "rrf(dense, bm25)",
                        "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=4)"}}


class Memory:
    """A cache that keeps results in memory."""

    def __init__(self): self.kept = {}
    def has(self, stage, key): return (stage, key) in self.kept
    def get(self, stage, key): return self.kept.get((stage, key))
    def put(self, stage, key, value): self.kept[stage, key] = value
    def lock(self, stage, key): return nullcontext()


def may_see(d, c):
    """The rules once more, written apart from the code under test: days are included, a document is gone from `withdrawn_at` on."""
    now, asked = c.as_of, c.valid_at or c.as_of
    wanted = {k: v if isinstance(v, list) else [v] for k, v in c.metadata_filter.items()}
    return all([d.tenant in (None, c.actor.tenant), not d.roles or c.actor.role in d.roles, d.status != "draft",
                d.status != "withdrawn" or bool(now and d.withdrawn_at and now < d.withdrawn_at),
                not (now and d.withdrawn_at) or now < d.withdrawn_at, not (now and d.published_at) or d.published_at <= now,
                not (asked and d.effective_from) or d.effective_from <= asked, not (asked and d.effective_to) or asked <= d.effective_to,
                all(any(repr(d.metadata.get(k)) == repr(v) for v in vs) for k, vs in wanted.items())])


def text_of(rng):
    if rng.random() < .08: return rng.choice(["", " \n", "# \n"])
    parts = [f"{'#' * rng.randint(1, 2)} {' '.join(rng.choices(WORDS, k=2))}\n\n{' '.join(rng.choices(WORDS, k=rng.randint(1, 30)))}." for _ in range(rng.randint(1, 3))]
    if rng.random() < .2: parts.append("| part | fee |\n|---|---|\n" + "".join(f"| {rng.choice(WORDS)} | {i} |\n" for i in range(3)))
    return "\n\n".join(parts)


def document(rng, i, before):
    day = lambda p: rng.choice(DAYS) if rng.random() < p else None
    text = rng.choice(before).text if before and rng.random() < .1 else text_of(rng)
    doc_id = rng.choice([f"d{i:02}", f"文档{i}", f"D/{i}:0-60"])
    return replace(parse_text(text, "markdown", doc_id), family=f"f{i // 2}", title=" ".join(rng.choices(WORDS, k=2)), tenant=rng.choice([None, None, "t1", "t2"]),
                   roles=rng.choice([(), (), ("admin",), ("agent", "admin")]), status=rng.choice(["published"] * 5 + ["draft", "withdrawn"]),
                   published_at=day(.3), withdrawn_at=day(.3), effective_from=day(.3), effective_to=day(.3),
                   metadata=rng.choice([{}, {"region": "eu"}, {"region": "cn"}, {"region": True}, {"region": 1}]))


def case(rng, i):
    return Case(f"q{i}", " ".join(rng.choices(WORDS, k=rng.randint(1, 8))), type="unanswerable", answerable=False, expected="abstain", split="challenge",
                actor=Actor(rng.choice([None, "admin", "agent"]), rng.choice([None, "t1", "t2"])), as_of=rng.choice([None, *DAYS]), valid_at=rng.choice([None, None, *DAYS]),
                metadata_filter=rng.choice([{}, {}, {}, {"region": "eu"}, {"region": ["eu", "cn"]}, {"region": 1}]))


def lesson(documents):
    """A tune case for the reranker to be fitted on."""
    d = next(d for d in documents if d.text.strip())
    return Case("tune", "refund", evidence=(Evidence(d.doc_id, 0, len(d.text), d.text),), split="tune")


def ranked(documents, cases, base):
    """Hits, contexts and candidates of every cell: the stages of a run, up to measuring."""
    experiment = Experiment(Bench("world", tuple(documents), (*cases, lesson(documents))), Matrix(base, **MATRIX), split="challenge")
    memory = Memory()
    kinds = {(label, kind): key for label, keys in experiment.keys.items() for kind, key in keys.items() if kind in ("hits", "context", "fused") or kind.startswith("source ")}
    outcome = execute(experiment.graph, memory, list(dict.fromkeys(kinds.values())), jobs=1)
    if outcome.failures: raise next(iter(outcome.failures.values())).error
    chunks = {c.label: memory.get("chunk", experiment.keys[c.label]["chunk"])["chunk_id"].to_numpy() for c in experiment.cells}
    ids = np.array([c.query_id for c in experiment.asked.cases], dtype=object)
    name = lambda label, f: f.assign(query_id=ids[f["query"]], chunk_id=chunks[label][f["chunk"]]).drop(columns=["query", "chunk"]) if "query" in f else f
    return {place: name(place[0], memory.get(experiment.graph.stages[key].name, key)) for place, key in kinds.items()}


def compare(seed):
    """How many frames of one random world were compared: each asker's against those of the corpus that is left for this asker."""
    rng = random.Random(seed)
    documents = []
    for i in range(rng.randint(3, 20)): documents.append(document(rng, i, documents))
    cases = [case(rng, i) for i in range(rng.randint(2, 8))]
    if not any(d.text.strip() for d in documents): return 0
    base = {"depth": rng.choice([1, 3, 20, 100]), "context": rng.choice(["pack", "pack(max_tokens=30)", "pack(max_tokens=60, order=document, parents=True)"])}
    base["k"] = min(base["depth"], rng.choice([1, 5]))
    whole, compared = ranked(documents, cases, base), 0
    for c in cases: assert set(visible(documents, view_of(c))) == {d.doc_id for d in documents if may_see(d, c)}, (seed, c.query_id)
    for c in rng.sample(cases, 2):
        left = [d for d in documents if may_see(d, c)]
        rng.shuffle(left)
        alone = ranked(left, [c], base) if any(d.text.strip() for d in left) else {}
        for place, frame in whole.items():
            mine = frame[frame["query_id"] == c.query_id].reset_index(drop=True)
            if mine.empty: assert place not in alone or alone[place].empty, (seed, c.query_id, place)
            else: pd.testing.assert_frame_equal(mine, alone[place], check_exact=True, obj=f"world {seed} {c.query_id} {place}")
            compared += 1
    return compared


@pytest.fixture
def fixed_model(monkeypatch):
    """A reranker whose weights do not depend on what it was fitted on."""
    names = feature_names(("bm25", "dense"))
    weights = np.random.default_rng(3).normal(size=len(names))
    model = Linear(tuple([0.0] * len(names)), tuple([1.0] * len(names)), tuple(weights.tolist()), 1, 1)
    monkeypatch.setattr(stages, "fit_model", lambda *_: model.to_dict())


@pytest.mark.parametrize("seed", range(6))
def test_forbidden_documents_leave_no_trace(seed, fixed_model):
    compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_forbidden_documents_leave_no_trace_in_many_worlds(block, fixed_model):
    assert sum(compare(1000 + 100 * block + i) for i in range(50)) > 1000


def test_days_themselves(fixed_model):
    day, before, after = "2026-03-02", "2026-03-01", "2026-03-03"
    seen = lambda d, **k: bool(visible([replace(Document("d", "refund"), **d)], view_of(Case("q", "refund", **k))))
    assert [seen({"published_at": day}, as_of=t) for t in (before, day, after, None)] == [False, True, True, True]
    assert [seen({"withdrawn_at": day}, as_of=t) for t in (before, day, after, None)] == [True, False, False, True]
    assert [seen({"withdrawn_at": day, "status": "withdrawn"}, as_of=t) for t in (before, day, after, None)] == [True, False, False, False]
    assert [seen({"effective_from": day, "effective_to": day}, as_of=t) for t in (before, day, after, None)] == [False, True, False, True]
    assert [seen({"effective_from": day, "effective_to": day}, as_of=after, valid_at=t) for t in (before, day, after, None)] == [False, True, False, False]
    assert [seen({"published_at": day}, as_of=before, valid_at=after), seen({"withdrawn_at": day}, as_of=after, valid_at=before)] == [False, False]


def test_nobody_and_everybody():
    seen = lambda who, **d: bool(visible([replace(Document("d", "refund"), **d)], view_of(Case("q", "refund", actor=who))))
    nobody, agent, at_t1, at_t2, chief = Actor(None, None), Actor("agent", None), Actor("agent", "t1"), Actor("agent", "t2"), Actor("admin", "t1")
    assert all(seen(who) and seen(who, roles=(), tenant=None) for who in (nobody, agent, at_t1, at_t2, chief))
    assert [seen(who, roles=("agent",)) for who in (nobody, Actor("", None), agent, at_t1, chief)] == [False, False, True, True, False]
    assert [seen(who, tenant="t1") for who in (nobody, agent, at_t1, at_t2, chief)] == [False, False, True, False, True]
    assert [seen(who, tenant="t1", roles=("agent",)) for who in (nobody, agent, at_t1, at_t2, chief)] == [False, False, True, False, False]
    assert [seen(who, tenant="") for who in (nobody, Actor("agent", ""))] == [False, True]
