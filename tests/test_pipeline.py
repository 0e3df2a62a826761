"""View, chunkers, encoder and sources: long properties, scale, and bits that must not depend on company or threads."""
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from ragbench.core.errors import BadInput
from ragbench.core.model import Chunk, Document, Section, chunk_id
from ragbench.core.spec import Call, canonical, chunker, encoder, retriever
from ragbench.core.text import ink_before
from ragbench.pipeline.chunk import chunk_document, fixed, sentence_spans
from ragbench.pipeline.embed import embed, encoder_key, encoder_of
from ragbench.pipeline.retrieve import Queries, corpus_of, queries_of, search_source, tokenise

USE = Call("use")
WORDS = "退款 质量问题 耳机 七天 无理由 refund return receipt warranty 15 days 发票 customer 客服 快递 damaged".split()


def make_texts(n, seed=3):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 150))) + f" {i}" for i in range(n)]


def chunks_of(texts):
    return [Chunk(chunk_id(f"d{i:04}", 0, len(t)), f"d{i:04}", 0, len(t), t) for i, t in enumerate(texts)]


SPECS = ["fixed", "fixed(size=50, overlap=10, unit=word)", "fixed(size=64, overlap=8, unit=token)", "heading", "heading(max_size=300, min_size=100)"]
LINES = ["a", "退款", "质量问题的商品，签收后十五天内可退。", "a b ", ".", "\n", "\n \n退", "a.)", "🎧", "x\n\n"]


def cut_and_check(spec, text):
    "Processor seconds; every visible character lies in a chunk."
    start = time.process_time()
    chunks = chunk_document(Document("big", text), canonical(chunker, spec))
    spent = time.process_time() - start
    assert all(c.text == text[c.start:c.end] for c in chunks[:50])
    ink, covered, reach = ink_before(text), 0, 0
    for c in chunks:
        covered += int(ink[c.end] - ink[max(min(reach, c.end), c.start)])
        reach = max(reach, c.end)
    assert covered == int(ink[-1])
    return spent


@pytest.mark.parametrize("spec", SPECS)
def test_hostile_lines_lose_no_ink(spec):
    assert sum(cut_and_check(spec, line * (100_000 // len(line.encode()))) for line in LINES) < 60


@pytest.mark.parametrize("spec", SPECS)
def test_a_line_of_five_megabytes(spec):
    assert cut_and_check(spec, "质量问题 returns " * (5_000_000 // 21)) < 60


def test_many_sections_and_one_huge_window():
    text = "".join(f"# {i}\n正文{i}。\n" for i in range(20_000))
    starts = [i for i in range(len(text)) if text.startswith("# ", i)]
    sections = tuple(Section((text[s + 2:text.index("\n", s)],), "", s, e) for s, e in zip(starts, [*starts[1:], len(text)]))
    document = Document("many", text, sections=sections)
    assert len(chunk_document(document, canonical(chunker, "heading"))) == 20_000
    assert [len(c.text) for c in chunk_document(document, canonical(chunker, "fixed(size=1000000000)"))] == [len(text)]


def test_sentence_borders_do_not_backtrack():
    start = time.process_time()
    for text in ("." * 300_000, ".)" * 150_000, "。" * 300_000, "!?" * 150_000, ".\"" + ")" * 300_000): sentence_spans(text)
    assert time.process_time() - start < 10


def test_fixed_refuses_bad_sizes():
    for spec in ("fixed(size=0)", "fixed(size=5, overlap=5)", "fixed(overlap=-1)", "fixed(unit=byte)"):
        with pytest.raises(BadInput, match="chunker fixed.*document 'd'"): chunk_document(Document("d", "text"), canonical(chunker, spec))
    with pytest.raises(BadInput): canonical(chunker, "fixed(size=1.5)")
    assert fixed("", 5, 0) == []


def test_same_text_same_bits_in_any_company():
    texts = make_texts(150) + ["退", "a", "", "退款 " * 900, "x " * 1500]
    whole = embed(USE, texts)
    order = np.random.default_rng(5).permutation(len(texts))
    assert embed(USE, [texts[i] for i in order]).tobytes() == whole[order].tobytes()
    for i in np.random.default_rng(6).choice(len(texts), 25, replace=False).tolist():
        assert embed(USE, [texts[i]]).tobytes() == whole[i].tobytes()
        assert embed(USE, [texts[i], texts[i - 1]])[0].tobytes() == whole[i].tobytes()
    assert not whole[texts.index("")].any()


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from test_pipeline import make_texts, chunks_of, USE
import numpy as np
from ragbench.core.spec import Call
from ragbench.pipeline.retrieve import corpus_of, queries_of, search_source
texts = make_texts(90)
corpus, queries = corpus_of(chunks_of(texts), USE), queries_of(texts[:30], USE)
digest = hashlib.sha256(corpus.vectors.tobytes())
for name in ("bm25", "dense"):
    found = search_source(Call(name), corpus, np.arange(0, 90, 2), queries, 20)
    for column in (found.query, found.chunk, found.score): digest.update(column.tobytes())
print(digest.hexdigest())
"""


def test_same_bits_for_any_thread_count_and_hash_seed():
    seen = set()
    for threads, seed in (("1", "0"), ("2", "1"), ("4", "2")):
        env = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", SCRIPT.format(tests=os.path.dirname(__file__))], env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        seen.add(run.stdout.strip())
    assert len(seen) == 1


def test_other_weights_are_refused(monkeypatch):
    from ragbench.pipeline import embed as room
    monkeypatch.setattr(room, "USE_WEIGHTS", "0" * 64)
    room._load_use.cache_clear()
    try:
        with pytest.raises(BadInput, match="Install the pinned version"): room.Use().encode(["退款"])
    finally: room._load_use.cache_clear()
    assert encoder_key(USE) == f"use@{encoder_of(USE).weights_hash}" and len(encoder_of(USE).weights_hash) == 64


def test_registered_names():
    assert "use" in encoder and "fixed" in chunker and "heading" in chunker and {"bm25", "dense"} <= set(retriever)


@pytest.mark.parametrize("spec", ["bm25", "bm25(k1=0.9, b=0.4)", "dense"])
def test_deleting_the_forbidden_changes_no_byte(spec):
    texts, embedder = make_texts(160), USE if spec == "dense" else None
    corpus, queries = corpus_of(chunks_of(texts), embedder), queries_of([*texts[:25], "退款需要发票吗", "nothing known", ""], embedder)
    rng, call = np.random.default_rng(1), canonical(retriever, spec)
    for kept in (3, 40, 159):
        rows = np.sort(rng.choice(160, kept, replace=False))
        left_out = search_source(call, corpus, rng.permutation(rows), queries, 50)
        gone = corpus_of([corpus.chunks[i] for i in rows], embedder)
        deleted = search_source(call, gone, np.arange(kept), queries, 50)
        assert left_out.score.tobytes() == deleted.score.tobytes() and left_out.query.tobytes() == deleted.query.tobytes()
        assert [corpus.chunks[i].chunk_id for i in left_out.chunk] == [gone.chunks[i].chunk_id for i in deleted.chunk]
        for q in (0, 24, 25):
            alone = search_source(call, corpus, rows, queries_of([queries.texts[q]], embedder), 50)
            assert alone.score.tobytes() == left_out.score[left_out.query == q].tobytes()


@pytest.mark.parametrize("spec", ["bm25", "dense"])
def test_public_protocol_agrees_with_the_batch(spec):
    texts = make_texts(60)
    corpus, queries = corpus_of(chunks_of(texts), USE), queries_of(texts[:5], USE)
    found = search_source(Call(spec), corpus, np.arange(60), queries, 7)
    source = retriever.make(Call(spec))
    source.index(corpus.chunks[::-1])
    for q, text in enumerate(queries.texts):
        hits = source.search(text, 7)
        assert [h.rank for h in hits] == list(range(1, len(hits) + 1))
        assert [h.chunk_id for h in hits] == [corpus.chunks[i].chunk_id for i in found.chunk[found.query == q]]
        assert [h.score for h in hits] == found.score[found.query == q].tolist()


@pytest.mark.parametrize("spec", ["bm25", "dense"])
def test_equal_scores_by_chunk_id(spec):
    corpus = corpus_of(chunks_of(["耳机退款"] * 30), USE)
    found = search_source(Call(spec), corpus, np.arange(30), queries_of(["退款"] * 2, USE), 12)
    assert found.chunk.tolist() == [*range(12)] * 2 and len(set(found.score.tolist())) == 1


def test_tokens_are_the_same_for_any_writing():
    assert tokenise("ＲＥＦＵＮＤ　八天") == tokenise("refund 8天")
    assert tokenise("退" * 200_000)[0]


def test_queries_without_tokens_are_refused():
    with pytest.raises(BadInput, match="Tokenise"): search_source(Call("bm25"), corpus_of(chunks_of(["退款"])), np.arange(1), Queries(("退款",)), 3)




def test_a_chunk_is_searched_by_its_context_too(tmp_path):
    "Two rows of tables without their headers: only the context tells which is about batteries."
    from ragbench.core.model import Bench, Case, Evidence
    from ragbench.engine.config import Matrix
    from ragbench.engine.experiment import Experiment
    from ragbench.engine.store import Store
    from ragbench.pipeline.chunk import Piece
    texts = {d: f"{head}\n24 months" for d, head in (("battery", "battery warranty"), ("hinge", "hinge warranty"), ("cable", "cable warranty"))}
    try:
        @chunker("headless")
        def headless(text: str, show: bool = True): return [Piece(text.index("24"), len(text), context=((0, text.index("\n")),) if show else ())]
        bench = Bench("rows", tuple(Document(d, t, d) for d, t in texts.items()), (Case("q", "warranty of the hinge", evidence=(Evidence("hinge", 15, 24, "24 months"),), split="tune"),))
        run = Experiment(bench, Matrix(chunker={"with": "headless", "without": "headless(show=False)"}, retriever=["bm25", "dense"]), measures=["Recall"], cutoffs=(1,)).run(tmp_path / "runs", Store(tmp_path / "cache"))
        first = run.hits[run.hits["rank"] == 1].set_index("config")["doc_id"]
        assert first["with | bm25"] == first["with | dense"] == "hinge" and "without | bm25" not in first
    finally: chunker.entries.pop("headless", None)
