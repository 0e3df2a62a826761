"""Texts, numbers, paths and plugins that nobody should send: refused in one line, or shown spelt out; never executed, never a wrong number."""
import json
import os
import re

import pytest
import yaml

from ragbench.core.spec import REGISTRIES
from ragbench.faces.cli import call

ESCAPES = "\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\\x1b]52;c;aGk=\x07\x9b31m\x00\x7f\u202egnp\u2066\u2028\U000e0041"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
DOCUMENTS = {"refund": "# Refunds\n\nGoods may be returned within seven days of delivery.\n\n## Fees\n\nThe seller bears the fee of 5 euros.\n",
             "repair": "# Repair\n\nRepairs take ten working days at most.\n", "warranty": "# Warranty\n\nThe warranty lasts 24 months for batteries.\n"}
ASKED = [("q1", "When may goods be returned?", "refund", "within seven days of delivery"), ("q2", "How long do repairs take?", "repair", "ten working days at most"),
         ("q3", "How long is the warranty for batteries?", "warranty", "24 months for batteries")]


class Room:
    "A folder with a bench and an experiment, and the command line in this process."

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.bench(), self.experiment()

    def bench(self, documents=None, cases=None, **head):
        home = self.folder / "b"
        home.mkdir(exist_ok=True)
        (home / "bench.yaml").write_text(yaml.safe_dump({"name": "b", **head}), encoding="utf-8")
        self.lines("documents", [{"doc_id": d, "text": t} for d, t in DOCUMENTS.items()] if documents is None else documents)
        self.lines("cases", [{"query_id": q, "query": query, "evidence": [{"doc_id": d, "quote": quote}]} for q, query, d, quote in ASKED] if cases is None else cases)

    def lines(self, name, rows):
        (self.folder / "b" / f"{name}.jsonl").write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")

    def experiment(self, **change):
        content = {"name": "x", "bench": "b", "split": "all", "matrix": {"retriever": {"A": "bm25"}}, "primary": "EvidenceRecall@800t", **change}
        (self.folder / "x.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def go(self, *words, debug=False):
        self.capsys.readouterr()
        code = call([str(w) for w in words], debug)
        return code, *self.capsys.readouterr()

    def run(self, **change):
        if change: self.experiment(**change)
        code, out, err = self.go("run", "x.yaml", "--no-report", "--json")
        assert code == 0, err
        return json.loads(out)

    def refused(self, *says, words=("run", "x.yaml", "--no-report"), **change):
        "Exit 2, one line that says so, nothing left behind."
        if change: self.experiment(**change)
        before = sorted(self.folder.rglob("*"))
        code, out, err = self.go(*words)
        assert code == 2 and out == "" and err.startswith("ragbench: ") and err.count("\n") == 1, (code, err)
        for part in says: assert part in err, (part, err)
        assert [p for p in sorted(self.folder.rglob("*")) if p not in before and "cache" not in p.parts] == []


@pytest.fixture
def room(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGBENCH_CACHE", str(tmp_path / "cache"))
    return Room(tmp_path, capsys)


# -- terminals


def hostile(room):
    documents = [{"doc_id": d + ESCAPES, "text": t + ESCAPES, "title": ESCAPES, "family": d + ESCAPES, "lang": ESCAPES, "version": ESCAPES} for d, t in DOCUMENTS.items()]
    cases = [{"query_id": q + ESCAPES, "query": query + ESCAPES, "lang": ESCAPES, "evidence": [{"doc_id": d + ESCAPES, "quote": quote, "group": ESCAPES}]} for q, query, d, quote in ASKED]
    room.bench(documents, cases, name=ESCAPES, dataset_version=ESCAPES)
    room.experiment(matrix={"retriever": {"A" + ESCAPES: "bm25", "B\nnote: B is best": "bm25(k1=0.9)"}})


@pytest.mark.parametrize("words", ["run x.yaml --no-report", "plan x.yaml", "dataset validate b", "dataset stats b", "runs list"])
def test_no_control_character_reaches_the_terminal(room, words):
    hostile(room)
    if words == "runs list": room.go("run", "x.yaml", "--no-report")
    code, out, err = room.go(*words.split())
    assert code == 0 and not CONTROLS.search(out + err) and "\nnote: B is best" not in out, err
    code, out, err = room.go(*words.split(), "--json")
    assert code == 0 and not CONTROLS.search(out + err) and out.count("\n") == 1
    assert words == "plan x.yaml" or "\\u001b" in out and json.loads(out)


def test_no_control_character_in_chunks(room):
    (room.folder / "a.md").write_text(f"# H {ESCAPES}\n\nBody {ESCAPES} text.\n", encoding="utf-8")
    code, out, _ = room.go("chunk", "a.md", "--chunker", "heading")
    assert code == 0 and not CONTROLS.search(out) and "".join(json.loads(line)["text"] for line in out.splitlines()).count(ESCAPES) == 2


@pytest.mark.parametrize("debug", [False, True])
def test_no_control_character_in_messages(room, debug):
    room.lines("cases", [{"query_id": "q" + ESCAPES + "\nragbench: all is well", "query": "x", ESCAPES: 1, "evidence": [{"doc_id": ESCAPES, "quote": "y"}]}])
    for words in ("run x.yaml", "dataset validate b", f"run {ESCAPES[1:6]}.yaml", f"report {ESCAPES[1:6]}"):
        code, out, err = room.go(*words.split(" "), debug=debug)
        assert code == 2 and not CONTROLS.search(out + err) and "\nragbench: all is well" not in err


# -- records


def case(**change):
    return {"query_id": "q1", "query": "When?", "evidence": [{"doc_id": "refund", "quote": "within seven days"}], **change}


BAD_CASES = {
    "infinite": (json.dumps(case())[:-1] + ', "metadata_filter": {"x": 1e400}}', "beyond every number"), "NaN": (json.dumps(case())[:-1] + ', "metadata_filter": {"x": NaN}}', "NaN is no number"),
    "huge int": (json.dumps(case())[:-1] + f', "metadata_filter": {{"x": {"9" * 5000}}}}}', "too long"), "deep": ("[" * 10_000 + "]" * 10_000, "nested too deep"), "tail": (json.dumps(case()) + " trailing", "Extra data"),
    "twice": (json.dumps(case())[:-1] + ', "query": "again"}', "stands twice"), "half a pair": (json.dumps(case(query="\ud800")), "surrogate"), "NUL": ("\0", "no JSON"),
    "grade": (case(evidence=[{"doc_id": "refund", "quote": "within seven days", "grade": 10 ** 30}]), "too high a grade"), "blank": (case(evidence=[{"doc_id": "refund", "start": 9, "end": 11}]), "nothing visible"),
    "beyond": (case(evidence=[{"doc_id": "refund", "start": 0, "end": 10 ** 30}]), "beyond the text"), "negative": (case(evidence=[{"doc_id": "refund", "start": -1, "end": 3}]), "negative")}


@pytest.mark.parametrize("name", BAD_CASES)
def test_odd_records_are_refused_by_run_and_validate_alike(room, name):
    line, says = BAD_CASES[name]
    room.lines("cases", [line])
    room.refused("cases.jsonl line 1", says)
    code, out, err = room.go("dataset", "validate", "b", "--json")
    assert code == 2 and any(says in f["found"] for f in json.loads(out)["faults"])


BAD_HEADS = {"bomb": "a: &a [x, x]\nname: b\nb: [*a, *a]\n", "twice": "name: b\nname: c\n", "object": "name: !!python/object/apply:os.system [id]\n", "odd tag": "name: b\nx: !!bool maybe\n",
             "odd day": "name: !!timestamp x\n", "half a pair": 'name: "a\\ud800"\n', "deep": "name: " + "[" * 3000 + "\n", "NUL": "name: a\0b\n", "list": "- a\n"}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_odd_yaml_is_refused(room, name):
    (room.folder / "b" / "bench.yaml").write_text(BAD_HEADS[name], encoding="utf-8")
    room.refused("bench.yaml")
    (room.folder / "x.yaml").write_text(BAD_HEADS[name] + "bench: b\nmatrix: {retriever: {A: bm25}}\n", encoding="utf-8")
    room.refused("x.yaml")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.md", "a\0b.md", "loop.md", "out.md", "x" * 300 + ".md", "pipe.md", "folder.md", "."])
def test_paths_that_lead_elsewhere_are_refused(room, path):
    home = room.folder / "b"
    (room.folder / "x.md").write_text("secret", encoding="utf-8")
    os.symlink("loop.md", home / "loop.md"), os.symlink("../x.md", home / "out.md"), os.mkfifo(home / "pipe.md"), (home / "folder.md").mkdir()
    room.lines("documents", [{"doc_id": "refund", "path": path}])
    room.refused("documents.jsonl line 1, path")


@pytest.mark.parametrize("spec", ["bm25(k1=" + "9" * 400 + ")", "bm25(k1=1e999)", "bm25 >> ltr(top_n=1" + "0" * 30 + ")", "9" * 400 + "*bm25", "rrf(dense, bm25, k=1" + "0" * 400 + ")"])
def test_numbers_without_end_in_a_spec_are_refused(room, spec):
    room.refused("x.yaml", matrix={"retriever": {"A": spec}})


@pytest.mark.parametrize("change", [{"base": {"depth": 10 ** 30}}, {"base": {"depth": 10 ** 400, "k": 10 ** 399}}, {"base": {"k": 0}}, {"cutoffs": [10 ** 30]}, {"budgets": [0]}, {"seed": -1}])
def test_numbers_beyond_counting_are_refused(room, change):
    room.refused("x.yaml", **change)


@pytest.mark.parametrize("name", ["a\0b.py", "loop.py", "x" * 300 + ".py", "pipe.py", "b", "nope.py"])
def test_plugins_that_are_no_files_are_refused(room, name):
    os.symlink("loop.py", room.folder / "loop.py"), os.mkfifo(room.folder / "pipe.py")
    room.refused("plugins", "no such file", plugins=[name])


def test_numerals_of_any_length(room):
    long = "一" * 5000 + "个"
    room.bench([{"doc_id": "refund", "text": f"{long} within seven days"}], [case(query=long, answer=long, keywords=[long])])
    assert room.go("dataset", "validate", "b")[0] == 0
    room.run(measures=["EvidenceRecall", "Recall", "KeywordRecall"])


# -- plugins

PLUGIN = "from ragbench.core.spec import *\nfrom ragbench.core.model import *\nfrom ragbench.pipeline.retrieve import Candidates\nimport numpy as np\nX = np.array\n"
BAD_RETRIEVERS = {v: ("search(self, query, depth)", v) for v in (
    "None", "'abc'", "[1]", "[Hit('', 'nope', 1, 1.0)]", "[Hit('', [], 1, 1.0)]", "[Hit('', self.c[0].chunk_id, 1, float('nan'))]", "[Hit('', self.c[0].chunk_id, 1, float('inf'))]",
    "[Hit('', self.c[0].chunk_id, 1, 10**400)]", "[Hit('', self.c[0].chunk_id, 1, '1')] * 2", "[Hit('', self.c[0].chunk_id, 1, 1+2j)]")}
BAD_RETRIEVERS |= {v: ("search_view(self, view, queries, depth)", v) for v in (
    "[]", "Candidates(X([0]), X([9999]), X([1.0]))", "Candidates(X([0]), X([-1]), X([1.0]))", "Candidates(X([99]), X([0]), X([1.0]))", "Candidates(X([0.5]), X([0]), X([1.0]))",
    "Candidates(X([0, 0]), X([0, 0]), X([1.0, 1.0]))", "Candidates(X([0]), X([0]), X([np.nan]))", "Candidates(X([0, 1]), X([0]), X([1.0]))")}


@pytest.mark.parametrize("name", BAD_RETRIEVERS)
def test_a_retriever_that_returns_nonsense_is_named(room, name):
    head, value = BAD_RETRIEVERS[name]
    index = "" if "view" in head else "    def index(self, chunks): self.c = chunks\n"
    (room.folder / "plug.py").write_text(f"{PLUGIN}@retriever('odd{abs(hash(name))}')\nclass Odd:\n{index}    def {head}: return {value}\n", encoding="utf-8")
    room.refused(f"odd{abs(hash(name))}", plugins=["plug.py"], matrix={"retriever": {"A": f"odd{abs(hash(name))}"}})


@pytest.mark.parametrize("value", ["2.0", "-1", "None", "'x'", "float('inf')", "10 ** 400", "1 + 2j", "[0.5]", "np.complex64(1)", "1 / 0"])
def test_a_measure_that_returns_no_share_is_named(room, value):
    name = f"Odd{abs(hash(value))}"
    (room.folder / "plug.py").write_text(f"{PLUGIN}@measure('{name}')\ndef odd(case): return {value}\n", encoding="utf-8")
    room.refused(name, plugins=["plug.py"], measures=[name], primary=name)


@pytest.mark.parametrize("value", ["[['a', 'b'] for t in texts]", "None", "np.full((len(texts), 2), np.nan)", "np.ones((len(texts), 3))", "np.ones((len(texts), 2))", "[[1.0], [1.0, 2.0]]", "{}"])
def test_an_encoder_that_returns_nonsense_is_named(room, value):
    name = f"odd{abs(hash(value))}"
    (room.folder / "plug.py").write_text(f"{PLUGIN}@encoder('{name}')\nclass Odd:\n    dim = 2\n    weights_hash = 'w'\n    def encode(self, texts): return {value}\n", encoding="utf-8")
    room.refused(f"encoder {name}", plugins=["plug.py"], base={"embedder": name}, matrix={"retriever": {"A": "dense"}})


@pytest.mark.parametrize("value", ["[(0, 10 ** 30)]", "[(5, 5)]", "[(8, 3)]", "[(-2, 3)]", "[('a', 'b')]", "'abcd'", "3", "None", "[(0.0, 4.0)]", "[(float('nan'), 4)]", "[(0, 4, 5, 6)]", "1 / 0"])
def test_a_chunker_that_returns_nonsense_is_named(room, value):
    name = f"odd{abs(hash(value))}"
    (room.folder / "plug.py").write_text(f"{PLUGIN}@chunker('{name}')\ndef odd(text): return {value}\n", encoding="utf-8")
    room.refused(f"chunker {name}", plugins=["plug.py"], matrix={"chunker": [name]})


@pytest.mark.parametrize("value", ["[(0, 5), (3, len(text))]", "[(np.int64(0), np.int64(len(text)))]", "[(i, i + 1) for i in range(len(text))]", "((0, len(text)) for _ in '1')"])
def test_overlapping_numpy_and_generated_spans_are_fine(room, value):
    name = f"fine{abs(hash(value))}"
    (room.folder / "plug.py").write_text(f"{PLUGIN}@chunker('{name}')\ndef fine(text): return {value}\n", encoding="utf-8")
    assert room.run(plugins=["plug.py"], matrix={"chunker": [name]})["leaderboard"][0]["n"] == 3


# -- names that our tables use themselves


def test_labels_may_have_the_names_of_our_columns(room):
    from ragbench.engine.results import Results
    from ragbench.faces import charts, fragments
    room.lines("cases", [case(query="zzz unrelated", lang="config"), case(query_id="q2", query="Goods", lang="n")])
    names = ("measure", "grade", "document", "group", "config", "needed evidence", "mean")
    done = room.run(matrix={"retriever": {n: f"bm25(k1={1 + i / 10})" for i, n in enumerate(names)}}, base={"k": 1})
    results = Results.open(done["folder"])
    table = charts.by_measure(results.leaderboard())
    assert table.columns[0] == "measure" and set(table.columns[1:]) == {*names} - {"measure"} | {"measure (configuration)"}
    strata = charts.strata_table(results.by_stratum(by="lang"))
    assert list(strata.columns) == ["config", "config (stratum)", "n"] and set(strata["config"]) == set(names)
    cards = fragments.bad_cases_html(results).html
    assert all(f"{n} (configuration)" in cards or n not in ("grade", "document", "group", "needed evidence") for n in {w for w in names if f"<code>{w}</code>" in cards})


# -- what else was once wrong

def test_a_cell_far_away_and_a_table_too_wide(room):
    import openpyxl
    (room.folder / "docs").mkdir(exist_ok=True)
    (room.folder / "docs" / "a.md").write_text("# A\n\nGoods may be returned within seven days.\n")
    book = openpyxl.Workbook()
    for row in (["question", "quote"], ["When may goods be returned?", "within seven days"]): book.active.append(row)
    book.active.cell(1_048_576, 16_384, "x")
    book.save(room.folder / "q.xlsx")
    book.active.cell(1_048_576, 16_384).value = None
    book.active.cell(1_048_576, 2).value = "gone"
    book.save(room.folder / "far.xlsx")
    (room.folder / "wide.csv").write_text(",".join(f"c{i}" for i in range(100_000)) + "\n" + "x" + "," * 99_999)
    code, out, err = room.go("dataset", "import", "q.xlsx", "--format", "table", "--docs", "docs", "--out", "b1")
    assert code == 0 and "1 case" in out, (out, err)          # what lies right of column 256 is blank in all rows that are read
    code, out, err = room.go("dataset", "import", "wide.csv", "--format", "table", "--docs", "docs", "--out", "b2")
    assert code == 2 and "beyond column 256" in err and len(err) < 400 and not (room.folder / "b2").exists()
    code, out, err = room.go("dataset", "import", "far.xlsx", "--format", "table", "--docs", "docs", "--out", "b3")
    assert code == 2 and "row 1048576" in err and not (room.folder / "b3").exists()


def test_a_link_out_of_the_documents_and_a_list_without_questions(room, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("not for you")
    (room.folder / "docs").mkdir(exist_ok=True)
    (room.folder / "docs" / "a.md").write_text("# A\n\nText.\n")
    (room.folder / "q.csv").write_text("question,quote\nWhat?,Text.\n")
    (room.folder / "none.json").write_text("[]")
    code, _, err = room.go("dataset", "import", "none.json", "--format", "cases", "--docs", "docs", "--out", "made")
    assert code == 2 and "holds no question" in err and not (room.folder / "made").exists()
    (room.folder / "docs" / "p.txt").symlink_to(secret)
    code, _, err = room.go("dataset", "import", "q.csv", "--format", "table", "--docs", "docs", "--out", "made")
    assert code == 2 and "p.txt" in err and "leads out of the folder" in err and not (room.folder / "made").exists()


def test_a_measure_undefined_for_every_case_ranks_nothing(room):
    room.bench(cases=[{"query_id": f"q{i}", "query": f"Do you sell gift card {i}?", "type": "unanswerable", "answerable": False} for i in range(12)])
    done = room.run(matrix={"retriever": {"A": "bm25", "B": "dense"}})
    board = [r for r in done["leaderboard"] if r["measure"] == "EvidenceRecall@800t"]
    assert [(r["mean"], r["low"], r["high"], r["n"], r["standing"]) for r in board] == [(None, None, None, 0, None)] * 2
    code, out, err = room.go("run", "x.yaml")
    assert code == 0 and "EvidenceRecall@800t is undefined for every case that was measured" in out and "nan" not in out.lower().replace("finance", "")
    from html.parser import HTMLParser
    seen: list[str] = []
    class Visible(HTMLParser):
        hidden = 0
        def handle_starttag(self, tag, attrs): self.hidden += tag in ("script", "style")
        def handle_endtag(self, tag): self.hidden -= tag in ("script", "style")
        def handle_data(self, data):
            if not self.hidden: seen.append(data)
    Visible().feed((room.folder / done["folder"] / "report.html").read_text(encoding="utf-8"))
    said = " ".join(seen)
    assert "undefined for every case" in said and not re.search(r"(?<![A-Za-z])(nan|inf|NaN|None)(?![A-Za-z])", said), re.findall(r".{60}(?<![A-Za-z])(?:nan|inf|NaN|None)(?![A-Za-z]).{60}", said)


@pytest.mark.parametrize("body, fails", [("def index(self, chunks): 1 / 0\n    def search(self, query, depth): return []", "ZeroDivisionError"),
                                         ("def index(self, chunks): pass\n    def search(self, query, depth): raise KeyError('k')", "KeyError"), ("def index(self, chunks): pass\n    def search(self, query, depth): raise SystemExit", "SystemExit")])
def test_a_users_retriever_that_raises_is_named(room, body, fails):
    (room.folder / "mine.py").write_text(f"from ragbench import retriever\n@retriever('failing')\nclass Failing:\n    {body}\n")
    try: room.refused("failing fails", fails, "Mend the plugin", plugins=["mine.py"], matrix={"retriever": {"M": "failing"}})
    finally: REGISTRIES["retriever"].entries.pop("failing", None)
