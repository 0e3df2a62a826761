"""The command line as scripts meet it: exit codes, one JSON document, and bad input that is one message and leaves nothing behind."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from ragbench.engine import stages
from ragbench.engine.store import from_file
from ragbench.faces.cli import call

TEXTS = {
    "refund": "# 退款规则\n\n签收次日为第一天，十五天内可申请无理由退货。\n\n## 质量问题\n\n质量问题的商品三十天内可以全额退款，运费由商城承担。\n\n| 型号 | 天数 |\n|---|---|\n| A2 | 15 |\n",
    "warranty": "# 保修说明\n\n音箱整机保修一年，电池保修六个月。\n\n## 凭证\n\n保修凭电子发票或订单号，丢失发票可以补开。\n",
    "shipping": "# Shipping\n\nOrders placed before 16:00 leave the warehouse on the same day.\n\n## Islands\n\nDeliveries to islands take four more working days and cost 12 euros.\n",
    "repair": "# 维修流程\n\n寄修前请在 App 里填写故障描述并备份数据。\n\n## 周期\n\n收到机器后七个工作日内寄回，换主板的需要十四天。\n",
    "privacy": "# Privacy\n\nVoice recordings are kept for 30 days and then deleted.\n\n## Export\n\nA customer may export all personal data once a month free of charge.\n",
    "salary": "# Salaries\n\nSalaries are paid on the 5th working day of every month.\n"}
ASKED = [("R-1", "东西没坏，多久之内能退？", "refund", "十五天内可申请无理由退货", "tune"), ("R-2", "耳机坏了运费谁出？", "refund", "运费由商城承担", "tune"),
         ("R-3", "Who pays when a broken headset goes back?", "refund", "运费由商城承担", "tune"), ("W-1", "音箱的电池保多久？", "warranty", "电池保修六个月", "tune"),
         ("W-2", "发票不见了还能保修吗？", "warranty", "丢失发票可以补开", "tune"), ("S-1", "When does a parcel leave if I order at noon?", "shipping", "leave the warehouse on the same day", "locked"),
         ("S-2", "寄到海岛要多付多少钱？", "shipping", "cost 12 euros", "locked"), ("F-1", "送修以后几天能拿回来？", "repair", "七个工作日内寄回", "tune"),
         ("F-2", "主板坏了要等多久？", "repair", "换主板的需要十四天", "tune"), ("P-1", "How long do you keep what I said to the speaker?", "privacy", "Voice recordings are kept for 30 days", "locked"),
         ("P-2", "Can I get a copy of my data?", "privacy", "export all personal data once a month", "challenge")]
EXPERIMENT = {"name": "tiny", "bench": "tiny", "base": {"depth": 10, "k": 3}, "cutoffs": [1, 3], "budgets": [20, 60], "measures": ["EvidenceRecall", "Hit"], "primary": "EvidenceRecall@60t",
              "matrix": {"chunker": ["fixed(size=40, overlap=8)", "heading(max_size=80)"],
                         "retriever": {"A": "bm25", "B": "dense", "C": "0.7*dense + 0.3*bm25", "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=5)"}}}
SMALL = {**EXPERIMENT, "matrix": {"chunker": ["fixed(size=40, overlap=8)"], "retriever": {"A": "bm25"}}}


def records():
    "Lines of documents.jsonl and of cases.jsonl."
    documents = [{"doc_id": d, "path": f"{d}.md", **({"roles": ["hr"]} if d == "salary" else {})} for d in TEXTS]
    cases = [{"query_id": q, "query": query, "type": "fact", "split": split, "actor": {"role": "customer"}, "evidence": [{"doc_id": d, "quote": quote}]} for q, query, d, quote, split in ASKED]
    return documents, [*cases, {"query_id": "U-1", "query": "有礼品卡吗？", "type": "unanswerable", "answerable": False, "split": "tune"}]


def write_bench(folder, documents, cases):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.yaml").write_text("name: tiny\n", encoding="utf-8")
    for d, text in TEXTS.items(): (folder / f"{d}.md").write_text(text, encoding="utf-8")
    for name, rows in (("documents", documents), ("cases", cases)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return folder


def write_experiment(path, content):
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return path


def prepare(folder):
    write_bench(folder / "tiny", *records())
    write_experiment(folder / "e.yaml", EXPERIMENT)
    write_experiment(folder / "small.yaml", SMALL)
    return folder


class Desk:
    "A working directory with a bench and experiments, and the command line in this process."

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys

    def go(self, *words, debug=False):
        self.capsys.readouterr()
        code = call([str(w) for w in words], debug)
        out, err = self.capsys.readouterr()
        return code, out, err

    def json(self, *words, code=0):
        got, out, err = self.go(*words, "--json")
        assert got == code, err
        return one_json(out)

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))

    def refused(self, *words, says=()):
        "Exit 2, one line with place, finding and remedy, nothing left behind."
        before = self.files()
        code, out, err = self.go(*words)
        assert code == 2, (code, err)
        assert out == "" and err.startswith("ragbench: ") and err.count("\n") == 1 and len(err) < 700, err
        assert "Traceback" not in err and "Run again" not in err
        for part in (says,) if isinstance(says, str) else says: assert part in err, (part, err)
        assert self.files() == before
        return err


def one_json(text):
    "The only document of a text: one line, no NaN."
    assert text.endswith("\n") and text.count("\n") == 1, text
    def refuse(name): raise AssertionError(name)
    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(prepare(tmp_path))
    monkeypatch.setenv("RAGBENCH_CACHE", str(tmp_path / "cache"))
    return Desk(tmp_path, capsys)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    "Folder in which e.yaml has run undisturbed, once; its run folder and result."
    folder = prepare(tmp_path_factory.mktemp("study"))
    done = shell(folder, "run", "e.yaml", "--no-report", "--json", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    return folder, one_json(done.stdout)


def shell(folder, *words, wait=True, **environ):
    "The command line in a process of its own."
    env = {**{k: v for k, v in os.environ.items() if not k.startswith(("RAGBENCH_", "LC_", "LANG", "PYTHON"))}, "RAGBENCH_CACHE": "cache", **environ}
    command = [sys.executable, "-c", "from ragbench.faces.cli import main; main()", *words]
    started = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))     # a shell's background jobs ignore it, and what they start too
    if not wait: return started
    out, err = started.communicate(timeout=300)
    return subprocess.CompletedProcess(command, started.returncode, out, err)


def frames(run_folder):
    "Result frames of a run by name, rows in canonical order; times are left out."
    found = {p.stem: from_file(p) for p in sorted(Path(run_folder).glob("*.parquet")) if p.stem != "stages"}
    return {n: f.sort_values(list(f.columns), key=lambda s: s.map(str)).reset_index(drop=True) for n, f in found.items()}


def same_frames(a, b):
    a, b = frames(a), frames(b)
    assert list(a) == list(b) and {"scores", "hits", "contexts", "candidates", "chunks", "floors", "groups", "cases"} <= set(a)
    for name in a: pd.testing.assert_frame_equal(a[name], b[name], obj=name)


# -- what scripts read


def test_run_prints_one_json_document(study):
    folder, done = study
    assert list(done) == ["run_id", "folder", "report", "results_sha256", "stages", "leaderboard", "verdict"]
    assert done["report"] is None and done["verdict"] == "none" and len(done["results_sha256"]) == 64 and done["stages"]["run"] > 20 and done["stages"]["cached"] == 0
    assert (folder / done["folder"] / "manifest.json").is_file() and done["run_id"] == Path(done["folder"]).name
    rows = done["leaderboard"]
    assert {tuple(r) for r in rows} == {("config", "spec", "measure", "mean", "low", "high", "n", "clusters", "floor", "standing")}
    labels = [f"{c} | {r}" for c in ("fixed(size=40, overlap=8)", "heading(max_size=80)") for r in "ABCD"]
    assert list(dict.fromkeys(r["config"] for r in rows)) == labels
    assert list(dict.fromkeys(r["measure"] for r in rows)) == ["EvidenceRecall@20t", "EvidenceRecall@60t", "EvidenceRecall@1", "EvidenceRecall@3", "Hit@1", "Hit@3"]
    assert {r["standing"] for r in rows if r["measure"] != "EvidenceRecall@60t"} == {None} and {r["standing"] for r in rows if r["measure"] == "EvidenceRecall@60t"} <= {"best", "in_play", "ruled_out"}
    assert all(r["n"] == 7 and r["clusters"] == 3 and 0 <= r["low"] <= r["mean"] <= r["high"] <= 1 and 0 <= r["floor"] <= 1 for r in rows)
    assert rows[0]["spec"] == "chunker=fixed(size=40, overlap=8); embedder=use; retriever=bm25; depth=10; k=3; context=pack"


def test_the_run_folder_is_as_the_contract_says(study):
    run = study[0] / study[1]["folder"]
    columns = {p.stem: list(from_file(p).columns) for p in run.glob("*.parquet")}
    assert columns["scores"] == ["config", "query_id", "measure", "value"] and columns["stages"] == ["config", "query_id", "stage", "ms", "tokens", "cost"]
    assert {"config", "query_id", "rank", "chunk_id", "doc_id", "start", "end", "score"} <= set(columns["hits"]) and {"config", "query_id"} <= set(columns["contexts"])
    hits = from_file(run / "hits.parquet")
    assert (hits.groupby(["config", "query_id"])["rank"].apply(lambda r: sorted(r) == list(range(1, len(r) + 1)))).all() and not (hits["doc_id"] == "salary").any()
    manifest = one_json(json.dumps(json.loads((run / "manifest.json").read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))) + "\n")
    assert manifest["results_sha256"] == study[1]["results_sha256"] and manifest["failures"] == {} and manifest["design"]["seed"] == 7


def test_the_second_run_runs_nothing(study, capsys, monkeypatch):
    folder, first = study
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAGBENCH_CACHE", str(folder / "cache"))
    desk = Desk(folder, capsys)
    before = {p: p.read_bytes() for p in sorted((folder / first["folder"]).iterdir())}
    again = desk.json("run", "e.yaml", "--no-report")
    assert again["stages"]["run"] == 0 and again["stages"]["cached"] > 0
    assert {k: v for k, v in again.items() if k != "stages"} == {k: v for k, v in first.items() if k != "stages"}
    assert {p: p.read_bytes() for p in sorted((folder / first["folder"]).iterdir())} == before
    planned = desk.json("plan", "e.yaml")
    assert list(planned) == ["stages", "model_calls", "cost"] and (planned["model_calls"], planned["cost"]) == (0, 0)
    assert all(list(s) == ["stage", "key", "cached"] and s["cached"] is True for s in planned["stages"]) and len(planned["stages"]) == first["stages"]["run"]
    code, out, err = desk.go("run", "e.yaml", "--no-report")
    assert code == 0 and "fixed(size=40, overlap=8) | A" in out and first["folder"] in out and "NaN" not in out and "nan" not in out and err == ""


def test_plan_says_what_will_run_and_writes_no_result(desk):
    planned = desk.json("plan", "e.yaml")["stages"]
    assert {s["cached"] for s in planned} == {False} and {"chunk", "embed", "search", "fuse", "rerank", "scores"} <= {s["stage"] for s in planned} and len({s["key"] for s in planned}) == len(planned)
    assert not (desk.folder / "runs").exists() and not [p for p in (desk.folder / "cache").rglob("*") if p.is_file()]
    assert desk.json("run", "small.yaml", "--no-report")["stages"]["run"] > 0
    later = {s["key"]: s["cached"] for s in desk.json("plan", "e.yaml")["stages"]}
    assert set(later) == {s["key"] for s in planned} and {True, False} == set(later.values())
    code, out, _ = desk.go("plan", "e.yaml")
    head, *rows, total = out.splitlines()
    assert code == 0 and head.split() == ["stage", "to", "run", "cached"] and f"of {len(planned)} stages to run; model calls: 0" in total
    assert sum(int(r.split()[1]) + int(r.split()[2]) for r in rows) == len(planned) and any(r.startswith("fuse ") and r.endswith("merge the sources") for r in rows)


def test_nothing_but_our_own_files_is_removed(desk, monkeypatch):
    "A cache and runs in a folder that is not theirs alone."
    monkeypatch.setenv("RAGBENCH_CACHE", str(desk.folder))
    others = [desk.folder / n for n in (".partial-download", "thesis/a.json", "thesis/.partial-1", "tiny/b.parquet", "c.npy")]
    for p in others:
        p.parent.mkdir(exist_ok=True)
        p.write_text("mine")
    before = {p for p in desk.folder.rglob("*") if p.is_file()}
    desk.json("run", "small.yaml", "--no-report", "--out", ".")
    made = {p for p in desk.folder.rglob("*") if p.is_file()} - before
    assert desk.json("cache", "clear")["freed"] > 0
    left = {p for p in desk.folder.rglob("*") if p.is_file()}
    assert before <= left and {p.parent.name for p in left - before} == {next(p.parent.name for p in made if p.name == "manifest.json")} and all(p.read_text() == "mine" for p in others)
    assert desk.json("cache", "size")["bytes"] == 0


def test_a_folder_here_goes_before_a_bundled_bench(desk):
    write_bench(desk.folder / "aftersales", *records())
    assert desk.json("dataset", "validate", "aftersales")["counts"]["cases"] == 12 and desk.json("dataset", "stats", "aftersales")["counts"]["cases"] == 12
    write_experiment(desk.folder / "e.yaml", experiment(bench="aftersales"))
    assert desk.json("run", "e.yaml", "--no-report")["leaderboard"][0]["n"] == 7


def test_output_is_utf8_in_every_locale(desk):
    for words in (["chunk", "tiny/refund.md", "--chunker", "heading"], ["run", "没有.yaml"]):
        done = shell(desk.folder, *words, PYTHONIOENCODING="latin-1")
        assert done.returncode in (0, 2) and "退款" in done.stdout + done.stderr or "没有.yaml" in done.stderr and "unexpected" not in done.stderr


def test_housekeeping_verbs(desk):
    assert desk.json("runs", "list") == [] and desk.go("runs", "list")[1].startswith("no run in ")
    done = desk.json("run", "small.yaml", "--no-report", "--out", "elsewhere")
    assert done["folder"].startswith("elsewhere") and desk.json("runs", "list") == []
    listed = desk.json("runs", "list", "--out", "elsewhere")
    row, = listed
    assert {k: row[k] for k in ("run_id", "folder", "bench", "split", "configs", "primary", "seed")} == {"run_id": done["run_id"], "folder": done["folder"], "bench": "tiny", "split": "tune", "configs": 1, "primary": "EvidenceRecall@60t", "seed": 7}
    lead, = (r for r in done["leaderboard"] if r["measure"] == row["measure"])
    assert (row["lead"], row["mean"]) == (lead["config"], pytest.approx(lead["mean"]))
    size = desk.json("cache", "size")
    assert size["bytes"] == sum(size["stages"].values()) > 0 and {"chunk", "search", "scores"} <= set(size["stages"])
    assert desk.go("cache", "size")[0] == 0
    assert desk.json("cache", "clear") == {"freed": size["bytes"]} and desk.json("cache", "size") == {"bytes": 0, "stages": {}}
    again = desk.json("run", "small.yaml", "--no-report", "--out", "elsewhere")
    assert again["results_sha256"] == done["results_sha256"] and again["stages"]["run"] == done["stages"]["run"]


def test_chunk_prints_json_lines(desk):
    for words in (["--json"], []):
        code, out, err = desk.go("chunk", "tiny/refund.md", "--chunker", "heading(max_size=60)", *words)
        rows = [one_json(line + "\n") for line in out.splitlines()]
        assert code == 0 and err == "" and rows and all(list(r) == ["chunk_id", "doc_id", "start", "end", "text", "kind", "section", "parent", "context"] for r in rows)
        assert all(r["text"] == TEXTS["refund"][r["start"]:r["end"]] and r["doc_id"] == "refund" and r["parent"] is None and r["context"] == [] for r in rows)
        assert ["退款规则", "质量问题"] in [r["section"] for r in rows]
    desk.refused("chunk", "tiny/refunds.md", "--chunker", "fixed", says=("refunds.md", "no such file", "Check the path."))
    desk.refused("chunk", "tiny/refund.md", "--chunker", "fixd", says=("--chunker", "unknown chunker 'fixd'", "Did you mean 'fixed'?"))
    (desk.folder / "empty.md").write_bytes(b"")
    assert desk.go("chunk", "empty.md", "--chunker", "fixed")[:2] == (0, "")
    (desk.folder / "gbk.txt").write_bytes("退款规则".encode("gbk"))
    desk.refused("chunk", "gbk.txt", "--chunker", "fixed", says=("gbk.txt", "not valid utf-8", "UTF-8"))
    assert desk.go("chunk", "gbk.txt", "--chunker", "fixed", "--encoding", "gbk")[0] == 0
    desk.refused("chunk", "gbk.txt", "--chunker", "fixed", "--encoding", "klingon", says=("gbk.txt", "klingon"))


def test_validate_and_stats(desk):
    found = desk.json("dataset", "validate", "tiny")
    assert found["ok"] is True and found["faults"] == [] and found["counts"]["cases"] == 12 and found["counts"]["split"] == {"challenge": 1, "locked": 3, "tune": 8}
    assert found["shares"]["simple fact"]["share"] == pytest.approx(11 / 12)
    assert desk.json("dataset", "stats", "tiny") == {"counts": found["counts"], "shares": found["shares"]}
    code, out, err = desk.go("dataset", "validate", "tiny")
    assert code == 0 and err == "" and out.splitlines()[-1] == "no fault" and "recommended" in out and "simple fact" in out
    documents, cases = records()
    cases[1]["split"], cases[2]["evidence"][0]["quote"] = "tunes", "没有这句话"
    write_bench(desk.folder / "broken", documents, cases)
    found = desk.json("dataset", "validate", "broken", code=2)
    assert found["ok"] is False and [(f["file"], f["line"], f["field"]) for f in found["faults"]] == [("cases.jsonl", 2, "split"), ("cases.jsonl", 3, "evidence[0].quote")]
    assert all(list(f) == ["file", "line", "field", "found", "remedy"] and all(f.values()) for f in found["faults"])
    code, out, err = desk.go("dataset", "validate", "broken")
    assert code == 2 and "cases.jsonl line 2, split" in err and "Did you mean 'tune'?" in err and "2 faults in broken" in err and "recommended" in out
    desk.refused("dataset", "validate", "aftersale", says=("neither a folder nor a bundled bench", "Did you mean 'aftersales'?"))
    code, out, err = desk.go("dataset", "validate", str(desk.folder / "cache"))
    assert code == 2


def test_report_refuses_what_is_no_run(desk):
    desk.refused("report", "runs/none", says=("runs/none", "is no run folder", "ragbench run"))
    desk.refused("report", "tiny", says=("tiny", "is no run folder"))


def test_a_damaged_run_is_said_and_made_again(desk):
    done = desk.json("run", "small.yaml", "--no-report")
    run = Path(done["folder"])
    shutil.copytree(run, run.parent / ".partial-999999-left")
    assert [r["run_id"] for r in desk.json("runs", "list")] == [done["run_id"]]
    head, row = desk.go("runs", "list")[1].splitlines()
    assert head.split()[:3] == ["run_id", "when", "bench"] and row.startswith(done["run_id"]) and row.index("tune") == head.index("split") and "seed" not in head
    (run / "scores.parquet").write_bytes((run / "scores.parquet").read_bytes()[:-9])
    (run / "manifest.json").write_text("{", encoding="utf-8")
    desk.refused("report", run, says=("manifest.json", "damaged", "Run the experiment again."))
    code, out, err = desk.go("runs", "list", "--json")
    assert code == 0 and one_json(out) == [] and "manifest.json" in err
    again = desk.json("run", "small.yaml", "--no-report")
    assert again["results_sha256"] == done["results_sha256"] and again["stages"]["run"] == 0 and [p.name for p in run.parent.iterdir()] == [done["run_id"]]


@pytest.mark.slow
def test_the_demo_twice(desk):
    first, again = (desk.json("demo", "--no-report") for _ in range(2))
    assert first["stages"]["run"] > 0 and again["stages"]["run"] == 0 and again["results_sha256"] == first["results_sha256"] and first["run_id"].startswith("demo-")
    assert len({r["config"] for r in first["leaderboard"]}) == 8


@pytest.mark.slow
def test_report_of_a_small_run(desk):
    done = desk.json("run", "small.yaml")
    assert Path(done["report"]).read_text(encoding="utf-8").startswith("<!")
    Path(done["report"]).unlink()
    assert desk.json("report", done["folder"]) == {"report": done["report"]} and Path(done["report"]).is_file()
    scores = Path(done["folder"]) / "scores.parquet"
    scores.write_bytes(scores.read_bytes()[:-9])
    code, out, err = desk.go("report", done["folder"])
    assert code == 2 and out == "" and "scores.parquet" in err and "Run the experiment again." in err and "Traceback" not in err


def test_usage_errors_are_exit_2(desk):
    for words, says in (([], "Usage:"), (["dataset"], "Usage:"), (["rrun", "e.yaml"], "'run'"), (["run"], "Missing argument"), (["run", "e.yaml", "--jbos", "1"], "--jobs"),
                        (["run", "e.yaml", "--jobs", "0"], "--jobs"), (["run", "e.yaml", "--jobs", "two"], "--jobs"), (["chunk", "tiny/refund.md"], "--chunker"), (["run", "e.yaml", "more.yaml"], "more.yaml")):
        code, out, err = desk.go(*words)
        assert code == 2 and out == "" and says in err and "Run again" not in err and "Traceback" not in err, (words, err)
    assert desk.go("--help")[0] == 0 and desk.go("--version")[0] == 0 and desk.go("run", "--help")[0] == 0
    assert not (desk.folder / "runs").exists()


def test_debug_adds_a_traceback(desk):
    code, out, err = desk.go("run", "nope.yaml", debug=True)
    assert code == 2 and out == "" and "Traceback" in err and err.rstrip().splitlines()[-1].startswith("ragbench: nope.yaml")
    done = shell(desk.folder, "run", "nope.yaml", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr and done.stdout == ""


# -- labels and overrides


@pytest.mark.parametrize("matrix, labels", [
    ({"retriever": {"A": "bm25"}}, ["A"]), ({"retriever": ["bm25"]}, ["bm25"]), ({"chunker": ["fixed(overlap=40, size=200)"], "retriever": ["bm25"]}, ["fixed | bm25"]),
    ({"chunker": ["fixed(100, 20)", "fixed( size = 200 )"], "retriever": ["bm25"]}, ["fixed(size=100, overlap=20)", "fixed"]),
    ({"retriever": {"A": "bm25", "B": "dense"}, "chunker": {"short": "fixed(size=100)"}}, ["A | short", "B | short"]),
    ({"k": [1, 2], "retriever": ["bm25"]}, ["1", "2"]), ({"k": {"one": 1, "two": 2}, "depth": [5, 7]}, ["one | 5", "one | 7", "two | 5", "two | 7"]),
    ({"retriever": {"sweep": "w*dense + (1-w)*bm25", "w": [0.25, 0.5]}}, ["0.25*dense + 0.75*bm25", "0.5*dense + 0.5*bm25"]),
    ({"retriever": ["rrf(dense,bm25)", "minmax(0.7*dense+0.3*bm25)"]}, ["rrf(dense, bm25)", "minmax(0.7*dense + 0.3*bm25)"])])
def test_labels(desk, matrix, labels):
    from ragbench.engine.files import read_experiment
    assert [c.label for c in read_experiment(write_experiment(desk.folder / "l.yaml", {**EXPERIMENT, "matrix": matrix})).cells] == labels


def test_overrides(desk):
    words = ["run", "e.yaml", "--no-report", "-p", "matrix.chunker=[heading]", "-p", "matrix.retriever={X: bm25}", "-p", "base.k=2", "-p", "split=all", "-p", "primary=", "-p", "measures=[R@1, Success@1]", "-p", "name=other"]
    done = desk.json(*words)
    assert done["run_id"].startswith("other-") and [(r["config"], r["measure"], r["standing"]) for r in done["leaderboard"]] == [("X", "Recall@1", None), ("X", "Hit@1", None)]
    assert "k=2; " in done["leaderboard"][0]["spec"] and done["leaderboard"][0]["n"] == 11
    for setting, says in (("k", ("-p 'k'", "KEY=VALUE")), ("=3", "KEY=VALUE"), ("name.x=1", "no mapping"), ("base.kk=3", ("'kk'", "Did you mean 'k'?")), ("cutofs=[1]", "Did you mean 'cutoffs'?"), ("cutoffs=1", ("cutoffs", "must be a list")),
                          ("seed=-1", "seed"), ("base.k=ten", "k: must be a whole number"), ("matrix.chunker=[fixd]", "Did you mean 'fixed'?"), ("base.k=[", "no valid YAML"), ("cutoffs=&a [*a]", "cutoffs")):
        desk.refused("run", "small.yaml", "-p", setting, says=says)


# -- bad input is exit 2, one message, nothing behind


def experiment(**change):
    return {k: v for k, v in {**SMALL, **change}.items() if v is not ...}


def retriever(spec):
    return experiment(matrix={"retriever": [spec]})


def chunker(spec):
    return experiment(matrix={"chunker": [spec]})


BAD = {
    "unknown key": (experiment(cutofs=[1]), ("e.yaml 'cutofs': is no key", "Did you mean 'cutoffs'?")),
    "later key": (experiment(gate="g.yaml"), ("gate", "not part of this version", "Remove")),
    "no name": (experiment(name=...), ("name", "is missing")), "no bench": (experiment(bench=...), ("bench", "is missing")), "no matrix": (experiment(matrix=...), ("matrix", "is missing")),
    "empty matrix": (experiment(matrix={}), ("matrix", "empty")), "empty file": ("", ("is no mapping", "name")), "list": ("- a\n- b\n", "is no mapping"), "scalar": ("42", "is no mapping"),
    "missing bench": (experiment(bench="nowhere"), ("bench", "'nowhere'", "neither a folder nor a bundled bench")),
    "bench of a number": (experiment(bench=3), ("bench", "Write bench: aftersales.")),
    "bench format": (experiment(bench={"format": "sqad", "path": "x"}), ("'sqad'", "Did you mean 'squad'?")), "bench format key": (experiment(bench={"format": "squad", "pth": "x"}), ("'pth'", "Did you mean 'path'?")),
    "bench format without path": (experiment(bench={"format": "squad"}), ("path is missing", "Keys are")), "bench file missing": (experiment(bench={"format": "squad", "path": "x.json"}), ("x.json", "no such file")),
    "bench format of a list": (experiment(bench={"format": ["squad"], "path": "x"}), "unknown format"),
    "misspelt chunker": (chunker("fixd(size=200)"), ("chunker", "'fixd'", "Did you mean 'fixed'?")), "chunker parameter": (chunker("fixed(sizze=200)"), ("'sizze'", "Did you mean 'size'?")),
    "overlap = size": (chunker("fixed(size=200, overlap=200)"), ("overlap", "200")), "size 0": (chunker("fixed(size=0)"), "size"), "negative size": (chunker("fixed(size=-5)"), "size"),
    "size of text": (chunker("fixed(size=big)"), ("size must be int", "'big'")), "size of a fraction": (chunker("fixed(size=1.5)"), "size must be int"), "huge size": (chunker("fixed(size=1e400)"), "size"),
    "unknown unit": (chunker("fixed(unit=chars)"), "unit"), "fused chunker": (chunker("fixed + heading"), ("a chunker is one call", "retrievers only")), "number as chunker": (chunker(200), "a spec is text"),
    "heading 0": (chunker("heading(max_size=0)"), "max_size"), "heading min above max": (chunker("heading(max_size=10, min_size=20)"), "min_size"),
    "misspelt retriever": (retriever("bm52"), ("retriever", "'bm52'", "Did you mean 'bm25'?")), "misspelt source": (retriever("0.5*dens + 0.5*bm25"), "Did you mean 'dense'?"),
    "misspelt fusion": (retriever("rff(dense, bm25)"), "Did you mean 'rrf'?"), "misspelt reranker": (retriever("bm25 >> lrt(top_n=5)"), ("'lrt'", "Did you mean 'ltr'?")),
    "two rerankers": (retriever("bm25 >> ltr(top_n=5) >> ltr(top_n=3)"), "several rerankers"), "reranker in a fusion": (retriever("rrf(dense >> ltr, bm25)"), "reranker"), "top_n 0": (retriever("bm25 >> ltr(top_n=0)"), "top_n"),
    "zero weights": (retriever("0*dense + 0*bm25"), "all weights are 0"), "negative weight": (retriever("-1*dense + bm25"), "weight"), "one source twice": (retriever("0.5*bm25 + 0.5*bm25"), "stands twice"),
    "bm25 out of range": (retriever("bm25(b=2)"), "b"), "bm25 nan": (retriever("bm25(k1=1e999)"), "10^15"),
    "misspelt embedder": (experiment(base={"embedder": "usee"}), ("embedder", "'usee'", "Did you mean 'use'?")), "misspelt context": (experiment(base={"context": "pak"}), "Did you mean 'pack'?"),
    "context 0": (experiment(base={"context": "pack(max_tokens=0)"}), "max_tokens"),
    "misspelt base key": (experiment(base={"dept": 5}), ("base", "'dept'", "Did you mean 'depth'?")), "misspelt axis": (experiment(matrix={"chunkr": ["fixed"]}), ("matrix", "'chunkr'", "Did you mean 'chunker'?")),
    "base of a list": (experiment(base=["k"]), "base: must be a mapping"), "k of text": (experiment(base={"k": "5"}), "k: must be a whole number"), "k of truth": (experiment(base={"k": True}), "k: must be a whole number"),
    "k above depth": (experiment(base={"depth": 5, "k": 6}), ("k = 6 is above depth = 5", "Raise depth.")), "depth 0": (experiment(base={"depth": 0}), "depth: must be a whole number >= 1"), "k -1": (experiment(base={"k": -1}), "k: must be"),
    "axis of text": (experiment(matrix={"chunker": "fixed"}), ("must be a list or a mapping", "[ ]")), "empty axis": (experiment(matrix={"chunker": []}), "has no values"), "axis of nothing": (experiment(matrix={"chunker": None}), "chunker"),
    "axis of lists": (experiment(matrix={"chunker": [["fixed"]]}), "a spec is text"), "axis of mappings": (experiment(matrix={"retriever": [{"A": "bm25"}]}), "a spec is text"),
    "same label": (experiment(matrix={"chunker": ["fixed", "fixed(size=200)"]}), ("two cells are both", "Remove the repeated value")),
    "two axes of one label": (experiment(matrix={"chunker": {"x": "fixed", "x | y": "heading"}, "retriever": {"y | z": "bm25", "z": "dense"}}), "two cells are both"),
    "sweep without weight": (experiment(matrix={"retriever": {"sweep": "w*dense + (1-w)*bm25"}}), "sweep"), "sweep of nothing": (experiment(matrix={"retriever": {"sweep": "w*dense + (1-w)*bm25", "w": []}}), "no values"),
    "sweep above 1": (experiment(matrix={"retriever": {"sweep": "w*dense + (1-w)*bm25", "w": [2]}}), "[0, 1]"), "sweep of text": (experiment(matrix={"retriever": {"sweep": "w*dense + (1-w)*bm25", "w": ["a"]}}), "[0, 1]"),
    "sweep on locked": (experiment(split="locked", matrix={"retriever": {"sweep": "w*dense + (1-w)*bm25", "w": [0.5]}}), ("split locked", "tune on them")),
    "misspelt measure": (experiment(measures=["Recalll"]), ("'Recalll'", "Did you mean 'Recall'?")), "misspelt primary": (experiment(primary="EvidenceRecal@60t"), "Did you mean 'EvidenceRecall'?"),
    "measure parameter": (experiment(measures=["nDCG(gian=exp)"]), "Did you mean 'gain'?"), "measure at 0": (experiment(measures=["Recall@0"]), "Recall@0"), "primary without cut-off": (experiment(primary="Recall"), ("primary", "'Recall' names 2 measures", "Recall@1")),
    "measures of text": (experiment(measures="Recall"), "measures: must be a list"), "measure of a number": (experiment(measures=[5]), "measure"), "measure in tokens": (experiment(measures=["MRR@800t"]), "MRR"),
    "cutoffs 0": (experiment(cutoffs=[0]), ("cutoffs", ">= 1")), "cutoffs of text": (experiment(cutoffs=["1"]), "cutoffs: must be whole numbers"), "cutoffs of truth": (experiment(cutoffs=[True]), "cutoffs: must be whole numbers"),
    "budgets -1": (experiment(budgets=[-1]), ("budgets", ">= 1")), "budgets of a number": (experiment(budgets=400), "budgets: must be a list"),
    "seed -1": (experiment(seed=-1), ("seed", ">= 0")), "seed of text": (experiment(seed="x"), "seed"), "seed of a fraction": (experiment(seed=1.5), "seed"), "seed beyond 32 bits": (experiment(seed=2**32), ("seed", "< 2^32")),
    "no measure": (experiment(measures=[], primary=...), ("measures", "name no measure")), "no cutoffs": (experiment(cutoffs=[]), ("Hit has no cut-off", "give cutoffs")), "huge cutoff": (experiment(cutoffs=[10**9]), ("cutoffs", "is no cut-off")),
    "name out of the folder": (experiment(name="../x"), ("name", "'../x' is no folder name", "Use letters")), "absolute name": (experiment(name="/tmp/x"), "no folder name"), "hidden name": (experiment(name=".x"), "no folder name"),
    "name with NUL": (experiment(name="a\0b"), "no folder name"), "long name": (experiment(name="n" * 300), "name"), "name of a list": (experiment(name=["a"]), "name"),
    "unknown split": (experiment(split="lockd"), ("split", "'lockd'", "Did you mean 'locked'?")), "split of a list": (experiment(split=["tune"]), "split"),
    "plugins missing": (experiment(plugins=["p.py"]), ("plugins p.py", "no such file", "relative to the experiment file")), "plugins of text": (experiment(plugins="p.py"), "plugins: must be a list"), "plugins of numbers": (experiment(plugins=[1]), "plugins"),
    "tabs": ("name: x\n\tbench: tiny\n", ("line 2", "no valid YAML")), "duplicate key": ("name: x\nbench: tiny\nname: y\n", ("line 3", "'name' stands twice")), "unclosed": ("name: [x\nbench: tiny\n", ("line", "no valid YAML")),
    "nested duplicate": ("name: x\nbench: tiny\nmatrix:\n  k: [1]\n  k: [2]\n", ("line 5", "'k' stands twice")),
    "tag": ("name: !!python/object/apply:os.system ['touch pwned']\nbench: tiny\nmatrix: {k: [1]}\n", "no valid YAML"), "two documents": ("name: x\n---\nname: y\n", "no valid YAML"), "mapping as key": ("? {a: 1}\n: 2\n", ("line 1",)),
    "bomb": ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi")) + "name: *i\n", ("line", "alias")),
    "endless alias": ("name: x\nbench: tiny\nmatrix: &m {k: *m}\n", ("line", "alias")), "merge key": ("x: &x {k: [1]}\nname: x\nbench: tiny\nmatrix:\n  <<: *x\n", "alias"),
    "deep YAML": ("name: " + "[" * 20_000 + "]" * 20_000, "no valid YAML"), "huge YAML": ("name: x\n" + "# " * 600_000, ("1,000,000", "right file")), "control character": ("name: x\x07\nbench: tiny\n", "no valid YAML"),
    "infinite number": ("name: x\nbench: tiny\nmatrix: {k: [.inf]}\n", "k: must be a whole number"), "nan as seed": ("name: x\nbench: tiny\nmatrix: {k: [1]}\nseed: .nan\n", "seed"), "date as name": ("name: 2026-08-01 10:00:00\nbench: tiny\nmatrix: {k: [1]}\n", "name"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_experiments_are_refused(desk, name):
    content, says = BAD[name]
    write_experiment(desk.folder / "e.yaml", content)
    message = desk.refused("run", "e.yaml", "--no-report", says=says)
    assert "e.yaml" in message
    assert desk.refused("plan", "e.yaml") == message


HOSTILE = {
    "100,000 characters": "fixed(size=" + "1" * 100_000 + ")", "many sources": "+".join(["bm25"] * 20_000), "deep nesting": "fixed(" * 1000 + ")" * 1000, "deep brackets": "(" * 5000 + "bm25" + ")" * 5000,
    "brackets just under": "rrf(" * 39 + "bm25" + ")" * 39, "minus signs": "-" * 1900 + "1*bm25", "attribute access": "bm25.__class__", "dunder import": "__import__('os').system('touch pwned')", "method call": "''.join(['a'])", "lambda": "(lambda: 1)()",
    "f-string": "f'{open(\"pwned\", \"w\")}'", "f-string argument": "fixed(unit=f'{1}')", "index": "bm25[0]", "comprehension": "[x for x in (1,)]", "walrus": "(x := 1)", "star": "fixed(*[1])", "double star": "fixed(**{'size': 1})",
    "power": "9**9**9*bm25", "huge number": "9" * 1999, "huge weight": "1e999*bm25", "complex": "1j*bm25", "bytes": "fixed(unit=b'x')", "ellipsis": "fixed(size=...)", "conditional": "bm25 if 1 else dense", "statement": "import os", "assignment": "x=1",
    "two lines": "bm25\nimport os", "NUL": "bm25\0", "surrogate": "bm25(\ud800)", "empty": "", "blank": "  \n ", "comment": "# bm25", "await": "await bm25", "yield": "(yield)", "format call": "'{0.__class__}'.format(1)", "bidi": "bm25\u202e", "Turkish": "BM25"}


@pytest.mark.parametrize("axis", ["retriever", "chunker", "primary"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specs_are_refused(desk, name, axis):
    spec = HOSTILE[name]
    content = experiment(primary=spec) if axis == "primary" else experiment(matrix={axis: [spec]})
    if axis == "primary" and not spec.strip(): pytest.skip("no primary measure is legal")
    (desk.folder / "e.yaml").write_text(json.dumps(content), encoding="utf-8")          # JSON is YAML, and escapes what YAML would refuse
    start = time.perf_counter()
    message = desk.refused("run", "e.yaml", "--no-report")
    assert time.perf_counter() - start < 5 and all(c.isprintable() for c in message.rstrip("\n")), message
    assert not (desk.folder / "pwned").exists()


def bench_with(documents=None, cases=None, **files):
    def write(folder):
        d, c = records()
        for change, rows in ((documents, d), (cases, c)):
            if change: change(rows)
        write_bench(folder, d, c)
        for name, data in files.items(): (folder / name.replace("__", ".")).write_bytes(data)
    return write


def evidence(**change):
    return bench_with(cases=lambda rows: rows[5]["evidence"][0].update(change))


BAD_BENCH = {
    "no cases": (bench_with(cases=lambda rows: rows.clear()), ("cases.jsonl", "holds no cases", "at least one")), "empty cases file": (bench_with(cases__jsonl=b""), ("cases.jsonl", "holds no cases")),
    "document not UTF-8": (bench_with(refund__md="退款".encode("gbk")), ("documents.jsonl line 1", "refund.md", "not valid utf-8", "UTF-8")), "cases not UTF-8": (bench_with(cases__jsonl='{"query_id": "退"}'.encode("gbk")), ("cases.jsonl line 1", "not valid UTF-8")),
    "query id twice": (bench_with(cases=lambda rows: rows.append(dict(rows[0]))), ("cases.jsonl line 13", "'R-1' stands in line 1 already", "unique")),
    "doc id twice": (bench_with(documents=lambda rows: rows.append(dict(rows[0]))), ("documents.jsonl line 7", "'refund' stands in line 1 already", "unique")),
    "evidence beyond the text": (evidence(start=0, end=9999), ("cases.jsonl line 6", "9999 lies beyond the text of shipping", "code points")), "shifted span": (evidence(start=12, end=47), ("cases.jsonl line 6", "The quote stands at")),
    "unknown document": (evidence(doc_id="shippping"), ("cases.jsonl line 6", "'shippping'", "Did you mean 'shipping'?")), "missing document file": (bench_with(documents=lambda rows: rows[0].update(path="x.md")), ("documents.jsonl line 1", "x.md", "no such file")),
    "folder as document": (bench_with(documents=lambda rows: rows[0].update(path="../tiny")), ("documents.jsonl line 1",)), "no JSON": (bench_with(cases__jsonl=b"{"), ("cases.jsonl line 1", "no JSON")),
    "half a surrogate": (bench_with(cases__jsonl=b'{"query_id": "\\ud800", "query": "?", "answerable": false}'), ("cases.jsonl line 1", "surrogate")), "deep JSON": (bench_with(cases__jsonl=b'{"a":' + b"[" * 100_000), ("cases.jsonl line 1", "nested")),
    "missing cases": (lambda folder: (write_bench(folder, *records()), (folder / "cases.jsonl").unlink()), ("cases.jsonl", "is missing")), "bench.yaml bomb": (bench_with(bench__yaml=b"a: &a [1]\nname: *a\n"), ("bench.yaml line 2", "an alias")),
    "empty folder": (lambda folder: folder.mkdir(), ("bench.yaml", "is missing", "documents.jsonl"))}


@pytest.mark.parametrize("name", BAD_BENCH)
def test_bad_benches_are_refused(desk, name):
    make, says = BAD_BENCH[name]
    shutil.rmtree(desk.folder / "tiny")
    make(desk.folder / "tiny")
    desk.refused("run", "small.yaml", "--no-report", says=says)


def test_bad_places_are_refused(desk):
    desk.refused("run", "nope.yaml", says=("nope.yaml", "cannot be read", "Check the path."))
    desk.refused("run", "tiny", says=("tiny", "cannot be read"))
    desk.refused("run", "tiny/refund.md", says="refund.md")
    (desk.folder / "gbk.yaml").write_bytes("name: 退款\n".encode("gbk"))
    desk.refused("run", "gbk.yaml", says=("gbk.yaml", "not valid utf-8", "UTF-8"))
    (desk.folder / "file").write_text("x")
    desk.refused("run", "small.yaml", "--no-report", "--out", "file", says=("--out", "file cannot be written", "Name another folder."))
    desk.refused("run", "small.yaml", "--no-report", "--out", "file/deeper", says=("--out", "cannot be written"))
    assert (desk.folder / "file").read_text() == "x"
    desk.refused("dataset", "stats", "file", says="neither a folder nor a bundled bench")


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_an_unwritable_cache_is_refused(desk, monkeypatch, verb):
    (desk.folder / "file").write_text("x")
    monkeypatch.setenv("RAGBENCH_CACHE", str(desk.folder / "file"))
    desk.refused(verb, "small.yaml", says=("cache", "cannot be written"))
    for words in (["cache", "size"], ["cache", "clear"]): desk.refused(*words, says=("cache", "cannot be written"))


def test_bad_settings_are_refused(desk, monkeypatch):
    monkeypatch.setenv("RAGBENCH_DEPTH", "many")
    desk.refused("run", "small.yaml", says=("RAGBENCH_DEPTH", "'many'"))
    monkeypatch.delenv("RAGBENCH_DEPTH")
    (desk.folder / "settings.ini").write_text("[pathss]\ncache = x\n")
    desk.refused("run", "small.yaml", says=("settings.ini", "[pathss]", "Did you mean 'paths'?"))


PLUGIN = """
from ragbench.core.spec import chunker

@chunker("{name}")
def pieces(text, size: int = 30):
    "Pieces of `size` characters."
    {body}
"""
GOOD = "return [(s, min(s + size, len(text))) for s in range(0, len(text), size)]"


def plugin(desk, name, body, **change):
    (desk.folder / "p.py").write_text(PLUGIN.format(name=name, body=body), encoding="utf-8")
    write_experiment(desk.folder / "e.yaml", experiment(plugins=["p.py"], **{"matrix": {"chunker": [f"{name}(size=25)"]}, **change}))


def test_a_plugin_runs_and_its_change_is_noticed(desk):
    plugin(desk, "pieces_a", GOOD)
    first = desk.json("run", "e.yaml", "--no-report")
    assert first["leaderboard"][0]["config"] == "pieces_a(size=25)" and first["stages"]["cached"] == 0
    assert desk.json("run", "e.yaml", "--no-report")["stages"]["run"] == 0
    plugin(desk, "pieces_a", GOOD.replace("[(s, ", "[(max(s - 3, 0), "))
    again = desk.json("run", "e.yaml", "--no-report")
    assert again["stages"]["run"] > 0 and again["results_sha256"] != first["results_sha256"]


@pytest.mark.parametrize("name, body, says", [("raises", "raise RuntimeError('boom')", "boom"), ("divides", "yield 1 // 0", "ZeroDivisionError"), ("exits", "import sys; sys.exit(0)", "SystemExit"),
                                              ("nothing", "return None", ""), ("numbers", "return [1, 2]", ""), ("beyond", "return [(0, 10**9)]", "returned the span"), ("backwards", "return [(5, 2)]", "returned the span")])
def test_a_plugin_that_fails_is_said(desk, name, body, says):
    plugin(desk, f"bad_{name}", body)
    code, out, err = desk.go("run", "e.yaml", "--no-report", "--json")
    assert code in (2, 4) and out == "" and says in err and "Traceback" not in err and "unexpected" not in err and f"bad_{name}" in err, (code, err)
    assert not (desk.folder / "runs").exists()


def test_one_cell_that_fails_is_exit_4_and_the_others_are_kept(desk):
    body = f"if 'Orders' in text: raise RuntimeError('boom')\n    {GOOD}"
    plugin(desk, "bad_shipping", body, matrix={"chunker": {"mine": "bad_shipping", "theirs": "heading"}})
    code, out, err = desk.go("run", "e.yaml", "--no-report", "--json")
    done = one_json(out)
    assert code == 4 and {r["config"] for r in done["leaderboard"]} == {"theirs"} and "mine" in err and "boom" in err and "incomplete" in err and "Traceback" not in err


def test_a_whole_run_outlives_a_later_one_that_fails(desk, monkeypatch):
    write_experiment(desk.folder / "e.yaml", {**EXPERIMENT, "matrix": {"retriever": {"A": "bm25", "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=5)"}}})
    whole = desk.json("run", "e.yaml", "--no-report")
    desk.go("cache", "clear")
    def full(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(stages, "fit_model", full)
    code, _, err = desk.go("run", "e.yaml", "--no-report")
    assert code == 4 and "D: [Errno 28] No space left on device" in err and "is kept" in err
    assert len(json.loads((desk.folder / whole["folder"] / "manifest.json").read_text(encoding="utf-8"))["configs"]) == 2


def test_a_users_own_retriever_and_measure(desk):
    (desk.folder / "own.py").write_text("""
from ragbench.core.model import Hit
from ragbench.core.spec import measure, retriever

@retriever("letters")
class Letters:
    "Chunks that share most letters with the query."
    def __init__(self, power: float = 1.0): self.power = power
    def index(self, chunks): self.chunks = list(chunks)
    def search(self, query: str, depth: int):
        found = sorted((-len(set(query) & set(c.text)) ** self.power, c.chunk_id) for c in self.chunks)[:depth]
        return [Hit("", c, i + 1, -s) for i, (s, c) in enumerate(found)]

@measure("FirstHit")
def first_hit(case) -> float:
    "1 when the first hit is relevant; undefined where nothing is."
    return float("nan") if not case.ideal.any() else float(len(case.grades) > 0 and case.grades[0] > 0)
""", encoding="utf-8")
    write_experiment(desk.folder / "e.yaml", experiment(plugins=["own.py"], matrix={"retriever": ["bm25", "letters(power=2)", "0.5*letters + 0.5*bm25"]}, measures=["FirstHit", "Hit@1"], primary="FirstHit"))
    done = desk.json("run", "e.yaml", "--no-report")
    value = {(r["config"], r["measure"]): r["mean"] for r in done["leaderboard"]}
    assert len(value) == 6 and all(value[c, "FirstHit"] == value[c, "Hit@1"] for c in ("bm25", "letters(power=2)", "0.5*letters + 0.5*bm25"))


@pytest.mark.parametrize("name, body, says", [
    ("syntax", None, ("plugins p.py", "in p.py line 1", "SyntaxError", "Mend the file")), ("raises", "raise RuntimeError('boom')", ("plugins p.py", "RuntimeError: boom")), ("exits", "import sys; sys.exit(3)", ("plugins p.py", "SystemExit")),
    ("imports", "import no_such_module", ("plugins p.py", "no_such_module")), ("clash", "from ragbench.core.spec import chunker\n@chunker('fixed')\ndef mine(document): return []", ("plugins p.py", "'fixed'", "already registered"))])
def test_broken_plugins_are_refused(desk, name, body, says):
    (desk.folder / "p.py").write_text("def (" if body is None else body)
    write_experiment(desk.folder / "e.yaml", experiment(plugins=["p.py"]))
    desk.refused("run", "e.yaml", "--no-report", says=says)


# -- the same results, whatever happens


def test_results_do_not_depend_on_threads_hash_seed_locale_zone_and_row_order(study, tmp_path):
    folder, first = study
    documents, cases = records()
    random.Random(3).shuffle(documents)
    random.Random(4).shuffle(cases)
    prepare(tmp_path)
    write_bench(tmp_path / "tiny", documents, cases)
    done = shell(tmp_path, "run", "e.yaml", "--no-report", "--json", "--jobs", "1", PYTHONHASHSEED="12345", LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", TZ="Asia/Kathmandu", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    again = one_json(done.stdout)
    assert again["results_sha256"] == first["results_sha256"] and again["leaderboard"] == first["leaderboard"]
    same_frames(folder / first["folder"], tmp_path / again["folder"])


@pytest.mark.parametrize("results", [2, pytest.param(12, marks=pytest.mark.slow), pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_an_undisturbed_one(study, desk, results):
    started = shell(desk.folder, "run", "e.yaml", "--no-report", "--json", wait=False)
    wait_for(lambda: len(list((desk.folder / "cache").glob("*/[!.]*.sum"))) >= results, started)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert started.returncode == -signal.SIGKILL and not list((desk.folder / "runs").glob("tiny-*"))
    (desk.folder / "cache" / "chunk" / ".partial-999999-left.parquet").write_bytes(b"x")
    done = desk.json("run", "e.yaml", "--no-report")
    assert done["results_sha256"] == study[1]["results_sha256"] and 0 < done["stages"]["run"] <= study[1]["stages"]["run"] - results
    same_frames(study[0] / study[1]["folder"], done["folder"])
    assert not [p for p in desk.folder.rglob(".partial-*")]


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


def copied(study, desk):
    shutil.copytree(study[0] / "cache", desk.folder / "cache")
    return [p for p in sorted((desk.folder / "cache").rglob("*")) if p.is_file() and p.suffix in (".parquet", ".npy", ".json")]


@pytest.mark.parametrize("damage", ["flipped byte", "cut short", "empty", "no sum", "no data", "other data", "binary sum", "changed places"])
def test_a_damaged_cache_file_is_made_again(study, desk, damage):
    files = copied(study, desk)
    for stage in ("chunk", "search", "scores", "embed"):
        path = next(p for p in files if p.parent.name == stage)
        data = path.read_bytes()
        if damage == "flipped byte": path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
        elif damage == "cut short": path.write_bytes(data[:-7])
        elif damage == "empty": path.write_bytes(b"")
        elif damage == "no sum": path.with_suffix(".sum").unlink()
        elif damage == "no data": path.unlink()
        elif damage == "binary sum": path.with_suffix(".sum").write_bytes(b"\xff\0")
        elif damage == "changed places": changed_places(path, next(p for p in files if p.parent.name == stage and p != path))
        else: path.write_bytes(next(p for p in files if p.parent.name == stage and p != path).read_bytes() if stage != "embed" else data[:-1] + b"\0")
    done = desk.json("run", "e.yaml", "--no-report")
    assert done["results_sha256"] == study[1]["results_sha256"] and done["stages"]["run"] >= 1
    again = desk.json("run", "e.yaml", "--no-report")
    assert again["stages"]["run"] == 0 and again["results_sha256"] == study[1]["results_sha256"]


def changed_places(a, b):
    for x, y in ((a, b), (a.with_suffix(".sum"), b.with_suffix(".sum"))):
        data = x.read_bytes()
        x.write_bytes(y.read_bytes())
        y.write_bytes(data)


def test_two_processes_at_once_agree(study, tmp_path):
    prepare(tmp_path)
    both = [shell(tmp_path, "run", "e.yaml", "--no-report", "--json", wait=False) for _ in range(2)]
    outs = [p.communicate(timeout=300) for p in both]
    assert [p.returncode for p in both] == [0, 0], [err for _, err in outs]
    a, b = (one_json(out) for out, _ in outs)
    assert a["results_sha256"] == b["results_sha256"] == study[1]["results_sha256"] and a["folder"] == b["folder"]
    same_frames(study[0] / study[1]["folder"], tmp_path / a["folder"])
    assert sum(r["stages"]["run"] for r in (a, b)) == study[1]["stages"]["run"] and not list(tmp_path.rglob(".partial-*"))


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_exit_4_and_keeps_what_is_done(desk, study, asked):
    started = shell(desk.folder, "run", "e.yaml", "--no-report", "--json", wait=False)
    wait_for(lambda: len(list((desk.folder / "cache").glob("*/[!.]*.sum"))) >= 2, started)
    started.send_signal(asked)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 4 and out == "" and "cancelled; what is done is kept" in err and "Traceback" not in err
    assert desk.json("run", "e.yaml", "--no-report")["results_sha256"] == study[1]["results_sha256"]


def test_a_closed_pipe_is_no_error(desk):
    code = f"{sys.executable} -c 'from ragbench.faces.cli import main; main()' chunk big.txt --chunker 'fixed(size=20, overlap=0)' | head -n 1"
    (desk.folder / "big.txt").write_text("退款规则 refund " * 20_000, encoding="utf-8")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", code], cwd=desk.folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
