"""The golden wing: damage is named, what is saved loads again, public data sets load with their known counts."""
import csv
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ragbench.core.errors import BadInput
from ragbench.core.model import CASE_TYPES, EXPECTED, RISKS, SPLITS, Actor, Bench, Case, Document, Evidence, MustCover
from ragbench.golden.cases import load_bench_folder, validate_bench
from ragbench.golden.formats import import_bench, load_bench
from ragbench.golden.parse import PARSERS, parse_file, parse_text
from ragbench.golden.saving import save_bench

SHARED = Path(__file__).parents[2] / "shared" / "data"
shared = pytest.mark.shared
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public data sets are not beside the project")

REFUND = "# 退款规则\n\n签收次日为第一天。\n\n## 质量问题 🎧\n\n签收十五天内的质量问题可以全额退款，运费由我们承担，不需要原包装盒。\n\n| 型号 | 天数 |\n|---|---|\n| A2 | 15 |\n"
WARRANTY = "Warranty: audio products are covered for 12 months, home appliances for 24 months after delivery."
SALARY = "Salaries are paid on the 5th working day of every month to the registered account."


def quote(doc_id, text, words, **more):
    return {"doc_id": doc_id, "start": text.index(words), "end": text.index(words) + len(words), "quote": words, **more}


def small():
    "bench.yaml, documents and cases of a valid bench."
    documents = [{"doc_id": "refund-v3", "family": "refund", "path": "refund-v3.md", "effective_from": "2026-08-01"}, {"doc_id": "warranty", "text": WARRANTY},
                 {"doc_id": "salary", "text": SALARY, "roles": ["hr"]}]
    base = {"risk": "P1", "actor": {"role": "customer", "tenant": None}, "as_of": "2026-08-15", "dataset_version": "1", "split": "tune"}
    cases = [{**base, "query_id": "R-1", "query": "耳机坏了，第八天能退吗？", "type": "conditional", "answer": "能，十五天内可以全额退款。", "pair_id": "P1", "keywords": [["全额退款", "full refund"]],
              "evidence": [quote("refund-v3", REFUND, "签收十五天内的质量问题可以全额退款，运费由我们承担，不需要原包装盒。", group="exception", alt=1)], "must_cover": [{"text": "15 天", "groups": ["exception"]}]},
             {**base, "query_id": "R-2", "query": "耳机坏了，第十六天能退吗？", "type": "conditional", "answer": "不能。", "pair_id": "P1", "evidence": [{"doc_id": "refund-v3", "quote": "签收次日为第一天。"}]},
             {**base, "query_id": "W-1", "query": "How long is the warranty of a speaker?", "answer": "12 months.", "split": "locked", "evidence": [quote("warranty", WARRANTY, "audio products are covered for 12 months")]},
             {**base, "query_id": "S-1", "query": "When is payday?", "type": "permission", "answerable": False, "expected": "abstain", "evidence": [], "protected_evidence": [{"doc_id": "salary", "quote": SALARY}]},
             {**base, "query_id": "U-1", "query": "Do you sell gift cards?", "type": "unanswerable", "answerable": False, "split": "challenge"}]
    return "name: small\ndataset_version: '1'\nknowledge_version: 2026-08-01\n", documents, cases


def write(folder, bench, documents, cases):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.yaml").write_text(bench, encoding="utf-8")
    (folder / "refund-v3.md").write_text(REFUND, encoding="utf-8")
    for name, records in (("documents", documents), ("cases", cases)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return folder


def sees(document, case):
    return "is for other roles" if document.roles and case.actor.role not in document.roles else None


def test_a_valid_bench_loads_and_validates(tmp_path):
    folder = write(tmp_path / "small", *small())
    bench = load_bench_folder(folder)
    assert [d.doc_id for d in bench.documents] == ["refund-v3", "warranty", "salary"] and bench.documents[0].sections[1].anchor == "质量问题-"
    first, second = bench.cases[:2]
    assert all(d.text[e.start:e.end] == e.quote for c in bench.cases for e in c.evidence for d in [bench.document(e.doc_id)])
    assert (first.evidence[0].grade, second.evidence[0].group, second.lang, first.knowledge_version) == (3, "1", "zh", "2026-08-01")
    assert not bench.split_by_us and bench.languages == ("en", "zh") and bench.cases[4].expected == "abstain"
    found = validate_bench(folder, sees)
    assert found.ok and found.counts["cases"] == 5 and found.counts["pairs"] == 1 and found.shares["unanswerable"]["share"] == 0.2
    assert json.dumps(found.counts) and json.dumps(found.shares)


def damage_case(line, **change):
    def do(bench, documents, cases):
        cases[line - 1] = {k: v for k, v in {**cases[line - 1], **change}.items() if v is not ...}
    return do


def damage_document(line, **change):
    def do(bench, documents, cases):
        documents[line - 1] = {k: v for k, v in {**documents[line - 1], **change}.items() if v is not ...}
    return do


def damage_evidence(line, **change):
    def do(bench, documents, cases):
        cases[line - 1]["evidence"][0].update(change)
    return do


DAMAGES = {
    "shifted span": (damage_evidence(3, start=11), "cases.jsonl", 3, "evidence[0]", "The quote stands at 10-50"),
    "end beyond the text": (damage_evidence(3, end=999), "cases.jsonl", 3, "evidence[0].end", "code points"),
    "negative start": (damage_evidence(3, start=-1), "cases.jsonl", 3, "evidence[0].start", "count from 0"),
    "span of text": (damage_evidence(3, start="10"), "cases.jsonl", 3, "evidence[0].start", "without quotes"),
    "empty span": (damage_evidence(3, start=50), "cases.jsonl", 3, "evidence[0].start", "less than end"),
    "unknown document": (damage_evidence(3, doc_id="warrenty"), "cases.jsonl", 3, "evidence[0].doc_id", "Did you mean 'warranty'?"),
    "foreign quote": (damage_evidence(2, quote="一年保修。"), "cases.jsonl", 2, "evidence[0].quote", "Copy the words"),
    "quote of another": (damage_evidence(2, quote="Salaries are paid"), "cases.jsonl", 2, "evidence[0].quote", "It stands in salary"),
    "repeated quote": (damage_evidence(2, quote="天"), "cases.jsonl", 2, "evidence[0].quote", "Make the quote longer"),
    "unknown granularity": (damage_evidence(2, granularity="sentence"), "cases.jsonl", 2, "evidence[0].granularity", "Valid: document, quote, section."),
    "overlapping splits": (damage_case(2, split="locked"), "cases.jsonl", 2, "split", "Keep a family in one split"),
    "unknown split": (damage_case(2, split="tunes"), "cases.jsonl", 2, "split", "Did you mean 'tune'?"),
    "missing split": (damage_case(2, split=...), "cases.jsonl", 2, "split", "leave all splits out"),
    "wrong type": (damage_case(2, type="conditionel"), "cases.jsonl", 2, "type", "Did you mean 'conditional'?"),
    "wrong risk": (damage_case(2, risk="P9"), "cases.jsonl", 2, "risk", "P0"),
    "wrong outcome": (damage_case(2, expected="abstian"), "cases.jsonl", 2, "expected", "Did you mean 'abstain'?"),
    "bad date of a case": (damage_case(2, as_of="2026-02-30"), "cases.jsonl", 2, "as_of", "ISO day"),
    "bad date of a document": (damage_document(1, effective_from="01.08.2026"), "documents.jsonl", 1, "effective_from", "ISO day"),
    "duplicate case": (damage_case(2, query_id="R-1"), "cases.jsonl", 2, "query_id", "unique"),
    "duplicate document": (damage_document(2, doc_id="refund-v3"), "documents.jsonl", 2, "doc_id", "unique"),
    "missing query": (damage_case(2, query=...), "cases.jsonl", 2, "query", "needs one"),
    "blank query": (damage_case(2, query=" "), "cases.jsonl", 2, "query", "value"),
    "missing id": (damage_case(2, query_id=...), "cases.jsonl", 2, "query_id", "needs one"),
    "missing doc_id": (damage_document(2, doc_id=...), "documents.jsonl", 2, "doc_id", "needs one"),
    "no text": (damage_document(2, text=...), "documents.jsonl", 2, "text", "an empty text is legal"),
    "missing file": (damage_document(1, path="refund-v4.md"), "documents.jsonl", 1, "path", "Check the path"),
    "file outside": (damage_document(1, path="../refund-v3.md"), "documents.jsonl", 1, "path", "inside"),
    "kind of file": (damage_document(1, path="refund.pdf"), "documents.jsonl", 1, "path", ".markdown, .md, .txt"),
    "changed text": (damage_document(2, text_sha256="0" * 64), "documents.jsonl", 2, "text_sha256", "anchor the evidence anew"),
    "misspelt key": (damage_case(2, evidense=[]), "cases.jsonl", 2, "evidense", "Did you mean 'evidence'?"),
    "misspelt document key": (damage_document(2, tenent="x"), "documents.jsonl", 2, "tenent", "Did you mean 'tenant'?"),
    "answerable without evidence": (damage_case(2, evidence=[]), "cases.jsonl", 2, "evidence", '"answerable": false'),
    "unanswerable but answered": (damage_case(5, expected="answer"), "cases.jsonl", 5, "expected", "abstain"),
    "unanswerable but answerable": (damage_case(5, answerable=True, evidence=["warranty"]), "cases.jsonl", 5, "answerable", "Change type"),
    "unknown citation": (damage_case(2, expected_citations=["refund-v2"]), "cases.jsonl", 2, "expected_citations", "Did you mean 'refund-v3'?"),
    "unknown group": (damage_case(2, must_cover=[{"text": "x", "groups": ["exceptoin"]}]), "cases.jsonl", 2, "must_cover[0].groups", "Groups are: 1"),
    "lonely pair": (damage_case(2, pair_id="P2"), "cases.jsonl", 1, "pair_id", "exactly two"),
    "unknown status": (damage_document(2, status="publisht"), "documents.jsonl", 2, "status", "Did you mean 'published'?"),
    "roles as text": (damage_document(3, roles="hr"), "documents.jsonl", 3, "roles", "…"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(tmp_path, name):
    change, file, line, field, remedy = DAMAGES[name]
    bench, documents, cases = small()
    change(bench, documents, cases)
    folder = write(tmp_path / "small", bench, documents, cases)
    fault = validate_bench(folder, sees).faults[0]
    assert (fault.file, fault.line, fault.field) == (file, line, field) and remedy in fault.remedy, fault
    with pytest.raises(BadInput) as caught: load_bench_folder(folder)
    assert f"{file} line {line}" in caught.value.where and remedy in caught.value.remedy


@pytest.mark.parametrize("name, content, line, says", [
    ("cases.jsonl", b"", None, "holds no cases"), ("cases.jsonl", b'{"query_id": "a"\n', 1, "no JSON"), ("cases.jsonl", b"\n[]\n", 2, "not an object"),
    ("cases.jsonl", '{"query_id": "a"}\n{"query": "退款"}'.encode("gbk"), 2, "not valid UTF-8"), ("documents.jsonl", b'{"doc_id": "a", "text": NaN}', 1, "no number"),
    ("bench.yaml", b"dataset_version: '1'", None, "is missing"), ("bench.yaml", b"name: [", 1, "no valid YAML"), ("bench.yaml", b"name: x\nnmae: y", None, "unknown key"), ("bench.yaml", b"a: &a [1]\nname: *a", 2, "no valid YAML")])
def test_damaged_files_are_named(tmp_path, name, content, line, says):
    folder = write(tmp_path / "small", *small())
    (folder / name).write_bytes(content)
    fault = next(f for f in validate_bench(folder).faults if f.file == name)
    assert fault.line == line and says in fault.found and fault.remedy
    with pytest.raises(BadInput): load_bench_folder(folder)


def test_missing_files_are_named(tmp_path):
    found = validate_bench(tmp_path)
    assert not found.ok and [f.file for f in found.faults] == ["bench.yaml", "documents.jsonl", "cases.jsonl"]


def test_all_faults_are_listed_and_views_checked(tmp_path):
    bench, documents, cases = small()
    cases[0]["risk"], cases[1]["evidence"][0]["doc_id"], cases[3]["actor"] = "P7", "nope", {"role": "hr"}
    cases[2]["evidence"] = [{"doc_id": "salary", "quote": SALARY}]
    found = validate_bench(write(tmp_path / "small", bench, documents, cases), sees)
    assert [(f.line, f.field) for f in found.faults] == [(1, "risk"), (2, "evidence[0].doc_id"), (3, "evidence"), (4, "protected_evidence")]


def test_strict_turns_notes_into_faults(tmp_path):
    bench, documents, cases = small()
    cases[2]["answer"], cases[0]["must_cover"][0]["text"], cases[0]["keywords"] = "Eleven months.", "30 天", [["礼品卡"]]
    loose = validate_bench(write(tmp_path / "a", bench, documents, cases), sees)
    strict = validate_bench(write(tmp_path / "b", bench + "strict: true\n", documents, cases), sees)
    assert loose.ok and [f.field for f in loose.notes][:3] == ["must_cover[0]", "keywords[0]", "answer"]
    assert not strict.ok and [f.field for f in strict.faults][:3] == ["must_cover[0]", "keywords[0]", "answer"]


def test_near_duplicate_evidence_is_kept_in_one_split(tmp_path):
    bench, documents, cases = small()
    twin = REFUND.replace("全额退款，运费", "全额退款,运费").replace("退款规则", "通知")
    documents.append({"doc_id": "notice", "text": twin})
    cases.append({**cases[1], "query_id": "N-1", "pair_id": None, "split": "locked", "evidence": [quote("notice", twin, "签收十五天内的质量问题可以全额退款,运费由我们承担，不需要原包装盒。")]})
    found = validate_bench(write(tmp_path / "small", bench, documents, cases), sees)
    assert [(f.line, f.field) for f in found.faults] == [(6, "evidence")] and "R-1" in found.faults[0].found


def test_a_withheld_path_or_hash_is_checked_on_path_documents(tmp_path):
    bench, documents, cases = small()
    folder = write(tmp_path / "small", bench, documents, cases)
    saved = save_bench(load_bench_folder(folder), tmp_path / "saved")
    lines = (saved / "documents.jsonl").read_text(encoding="utf-8").replace("第一天", "首日", 1)
    (saved / "documents.jsonl").write_text(lines, encoding="utf-8")
    assert [f.field for f in validate_bench(saved).faults] == ["text_sha256"]


names = st.text("abc-é退", min_size=1, max_size=4)
texts = st.text("ab 退款天,\n|#🎧\u2028\\\"", max_size=40)


@st.composite
def benches(draw):
    ids = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    documents = tuple(parse_text(draw(texts) + "x", draw(st.sampled_from(["markdown", "text"])), i, version=draw(names), tenant=draw(st.none() | names), roles=tuple(draw(st.lists(names, max_size=2))),
                                 effective_from=draw(st.sampled_from([None, "2026-08-01"])), metadata=draw(st.dictionaries(names, st.integers() | names, max_size=2))) for i in ids)
    cases = []
    for i in range(draw(st.integers(1, 4))):
        document = draw(st.sampled_from(documents))
        start = draw(st.sampled_from([i for i, c in enumerate(document.text) if not c.isspace()]))
        end = draw(st.integers(start + 1, len(document.text)))
        evidence = Evidence(document.doc_id, start, end, document.text[start:end], draw(st.integers(2, 3)), draw(names), draw(names))
        cases.append(Case(f"q{i}", "? " + draw(texts), type=draw(st.sampled_from(sorted(set(CASE_TYPES) - {"unanswerable"}))), risk=draw(st.sampled_from(RISKS)), actor=Actor(draw(st.none() | names), None),
                          expected=draw(st.sampled_from(EXPECTED)), answer=draw(texts), evidence=(evidence,), must_cover=(MustCover(draw(names), (evidence.group,)),), must_not_claim=(draw(texts),),
                          keywords=((draw(names), draw(names)),), split="tune", metadata_filter=draw(st.dictionaries(names, names, max_size=1)), dataset_version="2", knowledge_version="3", exhaustive=draw(st.booleans())))
    return Bench(draw(names), documents, tuple(cases), "2", "3", tuple(sorted({d.lang for d in documents})))


@given(benches())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_saved_loads_again(tmp_path_factory, bench):
    folder = tmp_path_factory.mktemp("round")
    again = load_bench_folder(save_bench(bench, folder / "b"))
    assert replace(again, path="", notes=()) == bench
    assert validate_bench(folder / "b").ok
    assert (save_bench(again, folder / "c") / "documents.jsonl").read_bytes() == (folder / "b" / "documents.jsonl").read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["b", "c"]


def test_xlsx_and_gbk_tables(tmp_path):
    import openpyxl
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "退款.md").write_bytes("---\n版本: 3\n---\n十五天内可退。\n七天内可换。\n".encode())
    rows = [["类型", "问题", "原文", "答案", "提问日期"], ["事实", "多久能退？", "十五天内可退。 || 七天内可换。", "15 天", "2026/8/15"], [None, "有礼品卡吗？", None, None, None]]
    book = openpyxl.Workbook()
    for row in rows: book.active.append(row)
    book.save(tmp_path / "q.xlsx")
    with open(tmp_path / "q.csv", "w", encoding="gbk", newline="") as f: csv.writer(f).writerows(rows)
    wanted = load_bench({"format": "table", "path": "q.xlsx", "docs": "docs"}, tmp_path)
    assert [(e.quote, e.group) for e in wanted.cases[0].evidence] == [("十五天内可退。", "1"), ("七天内可换。", "2")]
    assert wanted.cases[0].as_of == "2026-08-15" and not wanted.cases[1].answerable and wanted.documents[0].version == "3"
    with pytest.raises(BadInput, match="encoding: gbk"): load_bench({"format": "table", "path": "q.csv", "docs": "docs"}, tmp_path)
    assert load_bench({"format": "table", "path": "q.csv", "docs": "docs", "encoding": "gbk"}, tmp_path).cases == wanted.cases


def test_3500_questions_load_in_time(tmp_path):
    rules = [f"Rule {i}: item {i} may be returned within {i % 30} days of delivery, code {i * 7919}." for i in range(3500)]
    documents = [{"doc_id": f"d{i}", "text": "\n".join(rules[i * 10:i * 10 + 10])} for i in range(350)]
    cases = [{"query_id": f"q{i}", "query": f"How long for item {i}?", "evidence": [{"quote": rules[i], **({"doc_id": f"d{i // 10}"} if i % 2 else {})}]} for i in range(3500)]
    folder = write(tmp_path / "big", "name: big\n", documents, cases)
    start = time.perf_counter()
    bench = load_bench_folder(folder)
    assert len(bench.cases) == 3500 and time.perf_counter() - start < 3


def test_order_and_hash_seed_do_not_matter(tmp_path):
    folder = write(tmp_path / "small", *small())
    code = f"from ragbench.golden.cases import *; v = validate_bench({str(folder)!r}); print(v.counts, v.shares, load_bench_folder({str(folder)!r}).cases)"
    outs = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, check=True).stdout for seed in ("0", "1")}
    assert len(outs) == 1


@shared
@needs_shared
@pytest.mark.parametrize("path", [p for p in sorted(SHARED.glob("docs/**/*")) if p.suffix in PARSERS], ids=lambda p: p.name)
def test_messy_documents_parse(path):
    document = parse_file(path)
    raw = path.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert document.text == raw
    for s in document.sections: assert 0 <= s.start < s.end <= len(raw) and s.path
    for t in document.tables: assert all(t.start <= a < b <= t.end for a, b in (t.header, *t.rows))
    assert len({s.anchor for s in document.sections}) == len(document.sections)


@shared
@needs_shared
def test_headings_are_as_many_as_the_index_says():
    with open(SHARED / "docs" / "index.csv", encoding="utf-8") as f: rows = [r for r in csv.DictReader(f) if r["file"].endswith(".md") and r["headings"] and r["kind"] == "original"]
    assert rows and all(len(parse_file(SHARED / "docs" / r["file"]).sections) == sum(map(int, r["headings"].split("/"))) for r in rows)


@shared
@needs_shared
def test_xquad_in_both_languages_and_across():
    en, zh = (load_bench({"format": "squad", "path": f"xquad/xquad.{x}.json"}, SHARED) for x in ("en", "zh"))
    cross = load_bench({"format": "squad", "path": "xquad/xquad.en.json", "queries": "xquad/xquad.zh.json"}, SHARED)
    for bench in (en, zh, cross): assert (len(bench.documents), len(bench.cases), len({d.family for d in bench.documents}), bench.split_by_us) == (180, 925, 36, True)
    assert {c.lang for c in cross.cases} == {"zh"} and {c.type for c in cross.cases} == {"multilingual"} and {c.type for c in zh.cases} == {"fact"}
    assert [c.query for c in cross.cases] == [c.query for c in zh.cases] and [c.evidence for c in cross.cases] == [c.evidence for c in en.cases]
    split_of = {}
    for c in en.cases: assert split_of.setdefault(en.document(c.evidence[0].doc_id).family, c.split) == c.split
    assert set(split_of.values()) == set(SPLITS)


@shared
@needs_shared
def test_drcd_spans_and_chunk_counts(tmp_path):
    start = time.perf_counter()
    drcd = load_bench({"format": "squad", "path": "drcd/DRCD_dev.json"}, SHARED)
    assert time.perf_counter() - start < 3
    texts_of = {d.doc_id: d.text for d in drcd.documents}
    assert (len(drcd.documents), len(drcd.cases), drcd.cases[0].query_id) == (1000, 3524, "1147-5-1")
    assert all(texts_of[e.doc_id][e.start:e.end] == e.quote for c in drcd.cases for e in c.evidence) and all(len(c.groups()) == 1 for c in drcd.cases)
    assert all(len({(e.start, e.end) for e in c.evidence}) == len(c.evidence) for c in drcd.cases) and len(drcd.cases[0].evidence) == 1
    start = time.perf_counter()
    assert len(import_bench({"format": "squad", "path": "drcd/DRCD_dev.json"}, tmp_path / "drcd", SHARED).cases) == 3524
    assert load_bench(tmp_path / "drcd").cases == drcd.cases and time.perf_counter() - start < 9


@shared
@needs_shared
def test_chunk_spans_counts():
    bench = load_bench({"format": "spans", "path": "chunk_spans"}, SHARED)
    counts = {d.doc_id: (len(d.text), sum(c.evidence[0].doc_id == d.doc_id for c in bench.cases), sum(e.doc_id == d.doc_id for c in bench.cases for e in c.evidence)) for d in bench.documents}
    assert counts == {"pubmed": (500_000, 99, 195), "state_of_the_union": (48_051, 76, 95), "wikitexts": (118_372, 144, 249)}
    one = load_bench({"format": "spans", "path": "questions_wikitexts.csv", "corpora": "corpora"}, SHARED / "chunk_spans")
    assert len(one.cases) == 144 and all(len(c.groups()) == len(c.evidence) for c in one.cases)


@shared
@needs_shared
def test_cranfield_counts():
    bench = load_bench({"format": "beir", "path": "cranfield"}, SHARED)
    grades = [e.grade for c in bench.cases for e in c.evidence]
    assert (len(bench.documents), len(bench.cases), len(grades), grades.count(0), max(grades)) == (1400, 225, 1837, 225, 3)
    assert bench.document("471").text.strip() == bench.document("471").title and bench.cases[0].query.startswith("what similarity laws")


def test_document_defaults_are_kept():
    assert Document("d", "x").metadata == {}
