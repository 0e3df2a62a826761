"""The bundled bench keeps what it promises: no fault, the promised mix, questions that are neither trivial nor hopeless, no leak; and any damage is named."""
import json
import shutil
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pytest

from ragbench.core.model import CASE_TYPES, SPLITS
from ragbench.engine.config import Matrix
from ragbench.engine.experiment import Experiment
from ragbench.engine.store import Store
from ragbench.faces.cli import call
from ragbench.golden.cases import load_bench_folder
from ragbench.golden.checks import RECOMMENDED, near_pairs, numbers, numbers_held
from ragbench.golden.formats import find_bench
from ragbench.pipeline.view import hidden_because, view_of, visible

FOLDER = find_bench("aftersales")
RETRIEVERS = {"A": "bm25", "B": "dense", "C": "0.7*dense + 0.3*bm25", "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=20)"}


@pytest.fixture(scope="module")
def bench():
    return load_bench_folder(FOLDER)


def command(capsys, *words):
    capsys.readouterr()
    code = call([str(w) for w in words], False)
    return code, *capsys.readouterr()


# -- what is in it


def test_it_is_valid_and_the_table_shows_counts_and_shares(capsys):
    code, out, err = command(capsys, "dataset", "validate", "aftersales")
    assert code == 0 and err == "" and out.splitlines()[-1] == "no fault"
    lines = out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.split() == ["type", "group", "n", "share", "recommended"])
    rows = [line for line in lines[head + 1:lines.index("", head)]]
    assert len(rows) == len(CASE_TYPES) + len(RECOMMENDED)
    for kind, group in CASE_TYPES.items():
        row = next(r for r in rows if r.startswith(kind + " "))
        assert f" {group} " in row and row.endswith("%")
    for group, share in RECOMMENDED.items(): assert any(r.startswith("all of the group") and f" {group} " in r and r.endswith(f"{share:.1%}".replace("%", " %")) for r in rows)
    code, out, err = command(capsys, "dataset", "validate", "aftersales", "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and found["ok"] is True and found["faults"] == [] and found["counts"]["cases"] == sum(found["counts"]["type"].values()) == sum(found["counts"]["group"].values())


def test_counts_and_shares(bench):
    cases = bench.cases
    assert len(bench.documents) >= 45 and len(cases) >= 150 and not bench.split_by_us
    kinds = Counter(c.type for c in cases)
    assert set(kinds) == set(CASE_TYPES) and min(kinds.values()) >= 6
    groups = Counter(CASE_TYPES[c.type] for c in cases)
    for group, share in RECOMMENDED.items(): assert abs(groups[group] / len(cases) - share) <= 0.03, group
    splits = Counter(c.split for c in cases)
    for split, share in zip(SPLITS, (0.45, 0.40, 0.15)): assert abs(splits[split] / len(cases) - share) <= 0.05, split
    assert sum(c.risk == "P0" for c in cases) >= 30
    pairs = Counter(c.pair_id for c in cases if c.pair_id)
    assert len(pairs) >= 15 and set(pairs.values()) == {2}
    lang = {d.doc_id: d.lang for d in bench.documents}
    other = [c for c in cases if c.lang == "en" or any(lang[e.doc_id] != c.lang for e in c.evidence if e.required)]
    assert len(other) / len(cases) >= 0.23 and sum(c.lang == "en" for c in cases) / len(cases) >= 0.15


def test_kinds_of_documents(bench):
    documents = bench.documents
    assert {d.lang for d in documents} == {"zh", "en"} and {d.status for d in documents} == {"published", "withdrawn", "draft"} and len({d.tenant for d in documents}) >= 2
    assert max(Counter(d.family for d in documents).values()) >= 3 and any(d.roles for d in documents) and any(len(s.path) >= 3 for d in documents for s in d.sections)
    assert sum(bool(d.tables) for d in documents) >= 5 and len({Path(d.path).suffix for d in documents}) >= 2 and any((FOLDER / "incoming").glob("*.html"))
    assert [1 for i, j in near_pairs([d.text for d in documents], [d.text for d in documents], 0.4) if i < j], "no near-duplicate announcement"


def test_every_quote_is_its_span_and_holds_what_the_answer_says(bench):
    texts = {d.doc_id: d.text for d in bench.documents}
    for case in bench.cases:
        for e in (*case.evidence, *case.protected_evidence): assert texts[e.doc_id][e.start:e.end] == e.quote and e.quote.strip() == e.quote, case.query_id
        assert case.answer and case.as_of and case.actor.role and case.origin and case.annotators, case.query_id
        if not case.answerable: continue
        held = numbers_held("\n".join(e.quote for e in case.evidence if e.required)) | numbers_held(case.query)
        assert case.must_cover and case.keywords and not numbers(case.answer) - held, case.query_id
        for point in case.must_cover: assert not numbers(point.text) - held and set(point.groups) <= set(case.groups()), case.query_id


def test_nobody_is_asked_about_what_they_cannot_see(bench):
    documents = {d.doc_id: d for d in bench.documents}
    for case in bench.cases:
        for e in case.protected_evidence: assert hidden_because(documents[e.doc_id], view_of(case)), case.query_id
        if case.answerable:
            for alternatives in case.groups().values():
                assert any(all(hidden_because(documents[e.doc_id], view_of(case)) is None for e in spans) for spans in alternatives.values()), case.query_id
    assert all(c.protected_evidence for c in bench.cases if c.type == "permission" and not c.answerable)


def test_injections_are_harmless_placeholders(bench):
    cases = [c for c in bench.cases if c.type == "injection"]
    holders = [d for d in bench.documents if "[UNTRUSTED_INSTRUCTION]" in d.text]
    assert len(cases) >= 6 and holders or any("[UNTRUSTED_INSTRUCTION]" in c.query for c in cases)
    for text in [d.text for d in bench.documents] + [c.query for c in bench.cases]:
        assert not any(words in text.casefold() for words in ("ignore previous", "ignore all", "忽略以上", "忽略之前", "system prompt", "<script"))


def test_splits_share_no_family_and_no_near_duplicate(bench):
    family = {d.doc_id: d.family for d in bench.documents}
    asked = {s: [c for c in bench.cases if c.split == s] for s in SPLITS}
    used = {s: {family[e.doc_id] for c in asked[s] for e in c.evidence if e.required} for s in SPLITS}
    assert not used["tune"] & used["locked"]
    quotes = {s: sorted({e.quote for c in asked[s] for e in c.evidence if e.required}) for s in SPLITS}
    assert not list(near_pairs(quotes["tune"], quotes["locked"]))
    assert not list(near_pairs([c.query for c in asked["tune"]], [c.query for c in asked["locked"]]))


# -- what systems make of it


def run(bench, folder, chunker):
    "A-D on every case, measured by Hit@5."
    experiment = Experiment(bench, Matrix({"depth": 50}, chunker=[chunker], retriever=RETRIEVERS), measures=["Hit@5"], split="all", name="check")
    return experiment.run(folder / "runs", Store(folder / "cache"))


@pytest.mark.parametrize("chunker", ["fixed", pytest.param("heading(max_size=400)", marks=pytest.mark.slow)])
def test_questions_are_hard_enough_and_nothing_leaks(bench, tmp_path, chunker):
    results = run(bench, tmp_path, chunker)
    neither_trivial_nor_hopeless(results)
    no_system_finds_what_the_asker_must_not_see(results, bench)


def neither_trivial_nor_hopeless(results):
    hit, kind = results.values("Hit@5"), results.cases.set_index("query_id")["type"]
    bm25 = hit["A"].groupby(kind).mean()
    for name in ("paraphrase", "multilingual", "multi_hop"): assert 0.5 <= bm25[name] <= 0.85, (name, bm25[name])
    both = hit[["A", "B"]].dropna()
    assert len(both) >= 140 and (both["A"] != both["B"]).mean() >= 0.15


def outside(results, bench, frame):
    "Rows whose document the asker of the case must not see."
    hidden = {c.query_id: {d.doc_id for d in bench.documents} - set(visible(bench.documents, view_of(c))) for c in bench.cases}
    doc = frame["doc_id"] if "doc_id" in frame else frame["chunk_id"].map(results.chunks.set_index("chunk_id")["doc_id"])
    assert doc.notna().all() and len(frame)
    return [(q, d) for q, d in zip(frame["query_id"], doc) if d in hidden[q]]


def no_system_finds_what_the_asker_must_not_see(results, bench):
    permission = {c.query_id for c in bench.cases if c.type == "permission"}
    assert len(permission) >= 6 and permission <= set(results.hits["query_id"]) and set(results.hits["config"]) == set("ABCD")
    candidates = pd.read_parquet(results.folder / "candidates.parquet")
    assert set(candidates["source"]) == {"bm25", "dense"}
    for frame in (results.hits, candidates, results.contexts): assert not outside(results, bench, frame)
    secret = [e.quote for c in bench.cases if c.type == "permission" for e in c.protected_evidence]
    packed = "\n".join(results.contexts.loc[results.contexts["query_id"].isin({c.query_id for c in bench.cases if c.type == "permission" and not c.answerable}), "text"])
    assert secret and not any(q in packed for q in secret)


# -- damage


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def first(found, test):
    "Index of the first record that passes."
    return next(i for i, r in enumerate(found) if test(r))


def answered(r): return r["answerable"] and r["evidence"] and r["evidence"][0]["granularity"] == "quote"


def case(test=answered, **change):
    "Damage of one case; the line that is named is its own."
    def damage(cases, documents):
        at = first(cases, test)
        cases[at] = {k: v for k, v in {**cases[at], **change}.items() if v is not ...}
        return "cases.jsonl", at + 1
    return damage


def evidence(change):
    def damage(cases, documents):
        at = first(cases, answered)
        change(cases[at]["evidence"][0])
        return "cases.jsonl", at + 1
    return damage


def document(test=lambda d: True, **change):
    def damage(cases, documents):
        at = first(documents, test)
        documents[at] = {k: v for k, v in {**documents[at], **change}.items() if v is not ...}
        return "documents.jsonl", at + 1
    return damage


def overlapping(cases, documents):
    "A tune case is moved to locked, while others of its family stay."
    family = {d["doc_id"]: d["family"] for d in documents}
    often = Counter(family[r["evidence"][0]["doc_id"]] for r in cases if r["split"] == "tune" and answered(r))
    at = max(i for i, r in enumerate(cases) if r["split"] == "tune" and answered(r) and family[r["evidence"][0]["doc_id"]] == often.most_common(1)[0][0])
    cases[at]["split"] = "locked"
    for r in cases:
        if r["pair_id" ] and r["pair_id"] == cases[at].get("pair_id"): r["split"] = "locked"
    return "cases.jsonl", None


def lonely(cases, documents):
    at = first(cases, lambda r: r.get("pair_id"))
    other = next(i for i, r in enumerate(cases) if i != at and r.get("pair_id") == cases[at]["pair_id"])
    del cases[at]["pair_id"]
    return "cases.jsonl", other + 1


def twin(cases, documents):
    cases.append({**cases[0]})
    return "cases.jsonl", len(cases)


def uncovered(cases, documents):
    at = first(cases, lambda r: answered(r) and r["must_cover"])
    cases[at]["must_cover"][0]["text"] += "，共 98765 元"
    return "cases.jsonl", at + 1


def unheld(cases, documents):
    at = first(cases, answered)
    cases[at]["answer"] += " 98765"
    return "cases.jsonl", at + 1


def unseen(cases, documents):
    "The asker loses the right to the evidence: the document becomes another tenant's."
    at = first(cases, answered)
    number = first(documents, lambda d: d["doc_id"] == cases[at]["evidence"][0]["doc_id"])
    documents[number]["tenant"] = "another"
    return "cases.jsonl", at + 1


def seen(cases, documents):
    at = first(cases, lambda r: r["type"] == "permission" and r["protected_evidence"])
    number = first(documents, lambda d: d["doc_id"] == cases[at]["protected_evidence"][0]["doc_id"])
    documents[number] |= {"roles": [], "tenant": None, "status": "published", "effective_from": None, "effective_to": None, "published_at": None, "withdrawn_at": None}
    return "cases.jsonl", at + 1


def unbalanced(cases, documents):
    for r in cases:
        if r["type"] == "fact": r["type"] = "numeric"
    return "cases.jsonl", None


DAMAGE = {
    "shifted span": (evidence(lambda e: e.update(start=e["start"] + 1, end=e["end"] + 1)), "evidence[0]", ("The quote stands at",)), "end beyond the text": (evidence(lambda e: e.update(end=999_999)), "evidence[0].end", ("lies beyond the text", "code points")),
    "empty span": (evidence(lambda e: e.update(end=e["start"])), "evidence[0].start", ("is empty", "less than end")), "negative start": (evidence(lambda e: e.update(start=-1)), "evidence[0].start", ("count from 0",)),
    "span of text": (evidence(lambda e: e.update(start=str(e["start"]))), "evidence[0].start", ("whole number", "without quotes")), "one end": (evidence(lambda e: e.pop("end")), "evidence[0]", ("Give both",)),
    "changed quote": (evidence(lambda e: e.update(quote=e["quote"] + "了")), "evidence[0]", ("Give the quote alone",)), "missing quote and span": (evidence(lambda e: [e.pop(k) for k in ("quote", "start", "end", "doc_id")]), "evidence[0]", ("Give doc_id and quote",)),
    "quote of no document": (evidence(lambda e: [e.pop("start"), e.pop("end"), e.update(quote="没有这句话。")]), "evidence[0].quote", ("does not stand in", "Copy the words")),
    "unknown document": (evidence(lambda e: e.update(doc_id=e["doc_id"] + "x")), "evidence[0].doc_id", ("unknown document", "Did you mean")), "unknown granularity": (evidence(lambda e: e.update(granularity="line")), "evidence[0].granularity", ("Valid: document, quote, section",)),
    "grade of text": (evidence(lambda e: e.update(grade="3")), "evidence[0].grade", ("whole number",)), "unknown evidence key": (evidence(lambda e: e.update(quotte="x")), "evidence[0].quotte", ("Did you mean 'quote'?",)),
    "overlapping splits": (overlapping, "split", ("of the same family", "Keep a family in one split.")), "unknown split": (case(split="tunes"), "split", ("'tunes'", "Did you mean 'tune'?")), "missing split": (case(split=...), "split", ("has none", "Write tune, locked or challenge")),
    "wrong type": (case(type="facts"), "type", ("'facts'", "Did you mean 'fact'?")), "type of a list": (case(type=["fact"]), "type", ("must be text",)), "unanswerable type": (case(type="unanswerable"), "", ("Change",)), "wrong risk": (case(risk="P4"), "risk", ("'P4'", "P0")),
    "wrong outcome": (case(expected="answers"), "expected", ("Did you mean 'answer'?",)), "refusal expected of nobody": (case(lambda r: not r["answerable"], expected="answer"), "expected", ("Write abstain",)), "answerable of text": (case(answerable="maybe"), "answerable", ("true or false",)),
    "no evidence": (case(evidence=[], must_cover=[]), "evidence", ("has no evidence", '"answerable": false')), "evidence of text": (case(evidence="x"), "evidence", ("must be a list",)),
    "bad date": (case(as_of="2026-02-30"), "as_of", ("is no day", "ISO day")), "bad valid_at": (case(valid_at="2026/8/1"), "valid_at", ("ISO day",)), "empty query": (case(query=" "), "query", ("is empty",)), "no query": (case(query=...), "query", ("is missing",)),
    "no id": (case(query_id=...), "query_id", ("is missing",)), "case twice": (twin, "query_id", ("stands in line 1 already", "unique")), "pair of one": (lonely, "pair_id", ("has 1 cases", "exactly two")), "unknown key": (case(evidense=[]), "evidense", ("Did you mean 'evidence'?",)),
    "must_cover number": (uncovered, "must_cover[0]", ("98765", "Name the group")), "must_cover group": (case(must_cover=[{"text": "x", "groups": ["nope"]}]), "must_cover[0].groups", ("'nope'", "Groups are")), "must_cover of a number": (case(must_cover=[3]), "must_cover", ("object",)),
    "answer number": (unheld, "answer", ("98765", "Quote the sentence")), "keyword": (case(keywords=[["没有的词"]]), "keywords[0]", ("'没有的词'", "own word")), "unknown citation": (case(expected_citations=["refund-v9"]), "expected_citations", ("'refund-v9'", "Did you mean")),
    "actor of text": (case(actor="customer"), "actor", ("must be an object",)), "unknown actor key": (case(actor={"rol": "x"}), "actor.rol", ("Did you mean 'role'?",)), "evidence out of view": (unseen, "evidence", ("out of the asker's view", "Mend actor")),
    "protected in view": (seen, "protected_evidence", ("is in the asker's view", "Mend the actor")), "unbalanced": (unbalanced, "type", ("of the group 'simple fact'", "Add or take out cases")),
    "document twice": (document(lambda d: d["doc_id"] == "refund-v3", doc_id="refund-v2"), "doc_id", ("stands in line", "unique")), "no doc_id": (document(doc_id=...), "doc_id", ("needs one",)), "missing file": (document(path="documents/none.md"), "path", ("'documents/none.md'", "Check the path")),
    "file outside": (document(path="../../secret.md"), "path", ("outside the bench folder",)), "no text": (document(path=...), "text", ("neither text nor path",)), "document date": (document(effective_from="soon"), "effective_from", ("'soon'", "ISO day")),
    "status": (document(status="publish"), "status", ("Did you mean 'published'?",)), "roles of text": (document(roles="hr"), "roles", ("list of texts",)), "tenant of a list": (document(tenant=["harbor"]), "tenant", ("must be text",)),
    "changed text": (document(text_sha256="0" * 64), "text_sha256", ("not the text that was hashed",)), "document key": (document(tenent="x"), "tenent", ("Did you mean 'tenant'?",))}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "aftersales")
    return tmp_path / "aftersales"


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_exit_2_with_file_line_and_remedy(copy, capsys, name):
    damage, field, says = DAMAGE[name]
    cases, documents = rows(copy, "cases"), rows(copy, "documents")
    file, line = damage(cases, documents)
    for stem, records in (("cases", cases), ("documents", documents)):
        (copy / f"{stem}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    code, out, err = command(capsys, "dataset", "validate", copy)
    place = f"ragbench: {file}" + (f" line {line}" if line else "")
    named = [m for m in err.splitlines() if m.startswith(place) and (not field or f", {field}: " in m)]
    assert code == 2 and named and "Traceback" not in err and err.splitlines()[-1].endswith(f"in {copy}"), err
    for part in says: assert any(part in m for m in named), (part, named)
    code, out, err = command(capsys, "dataset", "validate", copy, "--json")
    found = json.loads(out)
    assert code == 2 and found["ok"] is False and all(f["remedy"] and f["found"] and f["file"] for f in found["faults"])
    assert any(f["file"] == file and (line is None or f["line"] == line) and (not field or f["field"] == field) for f in found["faults"])


def test_a_damaged_bench_is_not_run(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = rows(copy, "cases")
    cases[4]["evidence"][0]["start"] += 1
    (copy / "cases.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in cases), encoding="utf-8")
    (tmp_path / "e.yaml").write_text(f"name: x\nbench: {copy}\nmatrix: {{retriever: [bm25]}}\n", encoding="utf-8")
    code, out, err = command(capsys, "run", "e.yaml", "--no-report")
    assert code == 2 and out == "" and "cases.jsonl line 5, evidence[0]" in err and "The quote stands at" in err and not (tmp_path / "runs").exists()


def test_the_wheel_carries_the_bench():
    "As package data, or beside the package in a checkout."
    package = Path(str(files("ragbench")))
    assert FOLDER in (package / "_bundled" / "data" / "aftersales", package.parent / "data" / "aftersales") and (FOLDER / "bench.yaml").is_file()
