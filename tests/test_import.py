"""A new user's first step: a folder of documents and a spreadsheet of ten questions become a bench, a run and a report."""
import csv
import json
from pathlib import Path

import pytest
import yaml

from ragbench.faces.cli import call
from ragbench.golden.cases import load_bench_folder

DOCUMENTS = {
    "退款规则.md": "# 退款规则\n\n签收次日为第一天，十五天内可申请无理由退货。\n\n## 质量问题\n\n质量问题的商品三十天内可以全额退款，\n运费由商城承担，不需要原包装盒。\n\n## 定制\n\n刻字的商品不支持无理由退货。\n",
    "保修说明.md": "# 保修说明\n\n音箱整机保修一年，电池保修六个月。\n\n## 凭证\n\n保修凭电子发票或订单号，丢失发票可以补开。\n\n客服热线 400-820-1234，每天 9:00 到 21:00。\n",
    "维修流程.md": "# 维修流程\n\n寄修前请在 App 里填写故障描述并备份数据。\n\n## 周期\n\n收到机器后七个工作日内寄回，换主板的需要十四天。\n",
    "门店.md": "# 门店\n\n上海、杭州和成都的门店提供当面检测，检测免费。\n\n客服热线 400-820-1234，每天 9:00 到 21:00。\n",
    "发票.md": "# 发票\n\n电子发票在签收后三天内发到邮箱，抬头可以修改一次。\n",
    "会员.md": "# 会员\n\n| 等级 | 积分 | 返还 |\n|---|---|---|\n| 银卡 | 1000 | 1% |\n| 金卡 | 5000 | 3% |\n\n积分两年内有效。\n",
    "召回/battery.md": "# Battery recall\n\nBatch B2406 of the A2 speaker may overheat. Owners get a new battery free of charge within ten days.\n",
    "召回/充电器.txt": "充电器召回通知\n\n批次 C0311 的充电器外壳可能开裂，请停止使用，凭订单号免费更换。\n",
    "配送.txt": "配送说明\n\n十六点前付款的订单当天出库。海岛地区多加四个工作日，运费十二元。\n",
    "privacy.txt": "Privacy\n\nVoice recordings are kept for 30 days and then deleted. A customer may export all personal data once a month.\n",
    "安装.txt": "安装指南\n\n路由器需要支持 5 GHz 频段。长按电源键五秒进入配网模式，蓝灯闪烁表示成功。\n",
    "以旧换新.md": "# 以旧换新\n\n旧音箱按型号折价，A1 折 80 元，A2 折 150 元，外观破损再减 30 元。\n"}
HEAD = ["问题", "答案", "原文", "文件", "提问人", "类型", "风险"]
ROWS = [["东西没坏，多久之内能退？", "十五天内。", "十五天内可申请无理由退货", "退款规则.md", "顾客", "事实", "高"],
        ["耳机坏了，退货的运费谁出？", "商城承担。", "质量问题的商品三十天内可以全额退款，运费由商城承担", "退款规则.md", "顾客", "条件", "极高"],
        ["音箱的电池保多久？", "六个月。", "电池保修六个月", "", "顾客", "数值", "中"],
        ["客服电话几点下班？", "21:00。", "客服热线 400-820-1234，每天 9:00 到 21:00。", "", "顾客", "事实", "低"],
        ["What happens with a hot A2 speaker?", "A new battery, free of charge.", "Owners get a new battery free of charge within ten days.", "battery.md", "顾客", "事实", "极高"],
        ["金卡返多少？", "3%。", "| 金卡 | 5000 | 3% |", "会员.md", "顾客", "表格", "中"],
        ["换主板要等几天，数据要自己备份吗？", "十四天，要备份。", "换主板的需要十四天\n填写故障描述并备份数据", "维修流程.md", "顾客", "多跳", "中"],
        ["蓝灯一闪一闪是什么意思？", "配网成功。", "蓝灯闪烁表示成功", "安装.txt", "顾客", "改写", "低"],
        ["Can I get a copy of what you recorded?", "Once a month.", "A customer may export all personal data once a month.", "privacy.txt", "顾客", "改写", "中"],
        ["有礼品卡卖吗？", "", "", "", "顾客", "无答案", "低"]]
EXPERIMENT = {"name": "first", "bench": "mine", "matrix": {"chunker": ["fixed(size=80, overlap=20)"], "retriever": {"A": "bm25", "B": "dense", "C": "0.7*dense + 0.3*bm25", "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=20)"}},
              "base": {"depth": 50}, "cutoffs": [1, 5], "budgets": [200, 400], "measures": ["EvidenceRecall", "Hit"], "primary": "EvidenceRecall@200t"}


def write_csv(path, rows=ROWS, head=HEAD, encoding="utf-8-sig"):
    with path.open("w", encoding=encoding, newline="") as f: csv.writer(f).writerows([head, *rows])


def write_xlsx(path, rows=ROWS, head=HEAD):
    import openpyxl
    book = openpyxl.Workbook()
    for row in [head, *rows]: book.active.append([v or None for v in row])
    book.save(path)


class Desk:
    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys

    def go(self, *words):
        self.capsys.readouterr()
        code = call([str(w) for w in words], False)
        return code, *self.capsys.readouterr()

    def take(self, source="问题.csv", out="mine", *more):
        return self.go("dataset", "import", source, "--format", "table", "--docs", "资料", "--out", out, *more)

    def refused(self, *words, says=()):
        before = sorted(self.folder.rglob("*"))
        code, out, err = words if isinstance(words[0], int) else self.go(*words)
        assert code == 2 and out == "" and err.startswith("ragbench: ") and err.count("\n") == 1 and "Traceback" not in err and "Run again" not in err, (code, out, err)
        for part in (says,) if isinstance(says, str) else says: assert part in err, (part, err)
        assert sorted(self.folder.rglob("*")) == before
        return err

    def bench(self, name="mine"):
        return load_bench_folder(self.folder / name)

    def run(self, *more, **change):
        (self.folder / "first.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **change}, allow_unicode=True, sort_keys=False), encoding="utf-8")
        return self.go("run", "first.yaml", "--json", "--no-report", *more)


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGBENCH_CACHE", str(tmp_path / "cache"))
    for name, text in DOCUMENTS.items():
        (tmp_path / "资料" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "资料" / name).write_text(text, encoding="utf-8-sig" if name == "发票.md" else "utf-8")
    write_csv(tmp_path / "问题.csv")
    return Desk(tmp_path, capsys)


def check(bench):
    assert len(bench.documents) == 12 and len(bench.cases) == 10 and bench.split_by_us
    texts, ids = {d.doc_id: d.text for d in bench.documents}, [c.query_id for c in bench.cases]
    assert ids == [f"问题-{n:03}" for n in range(2, 12)] and texts["发票"].startswith("# 发票")
    assert all(texts[e.doc_id][e.start:e.end] == e.quote for c in bench.cases for e in c.evidence)
    at = {c.query: c for c in bench.cases}
    assert [c.type for c in bench.cases] == ["fact", "conditional", "numeric", "fact", "fact", "table", "multi_hop", "paraphrase", "paraphrase", "unanswerable"]
    assert [c.risk for c in bench.cases] == ["P1", "P0", "P2", "P3", "P0", "P2", "P2", "P3", "P2", "P3"] and {c.actor.role for c in bench.cases} == {"顾客"}
    assert at["耳机坏了，退货的运费谁出？"].evidence[0].quote == "质量问题的商品三十天内可以全额退款，\n运费由商城承担"
    both = at["客服电话几点下班？"]
    assert {e.doc_id for e in both.evidence} == {"保修说明", "门店"} and len(both.groups()) == 1 and len(both.groups()["1"]) == 2
    assert [e.doc_id for e in at["音箱的电池保多久？"].evidence] == ["保修说明"] and [e.doc_id for e in at["What happens with a hot A2 speaker?"].evidence] == ["召回/battery"]
    assert len(at["换主板要等几天，数据要自己备份吗？"].groups()) == 2
    none = at["有礼品卡卖吗？"]
    assert not none.answerable and none.expected == "abstain" and none.evidence == () and all(c.answerable for c in bench.cases if c is not none)
    assert any("1 quote was anchored with white space let differ" in n for n in bench.notes) and any("客服热线" in n and "taken as alternatives" in n for n in bench.notes)


def test_a_folder_and_a_csv_become_a_bench(desk):
    code, out, err = desk.take()
    assert code == 0 and err == ""
    assert "12 documents" in out and "10 cases" in out and "bench: mine" in out and "taken as alternatives" in out and "white space" in out and "own required group" in out
    bench = desk.bench()
    assert len(bench.cases) == 10
    code, out, err = desk.take("问题.csv", "again", "--json")
    found = json.loads(out)
    assert code == 0 and (found["documents"], found["cases"]) == (12, 10) and len(found["notes"]) >= 3
    assert [c.evidence for c in desk.bench("again").cases] == [c.evidence for c in bench.cases]
    for name in ("documents.jsonl", "cases.jsonl"): assert (desk.folder / "mine" / name).read_bytes() == (desk.folder / "again" / name).read_bytes()
    assert (bench.name, desk.bench("again").name) == ("mine", "again") and (desk.folder / "mine" / "bench.yaml").read_text().replace("mine", "again") == (desk.folder / "again" / "bench.yaml").read_text()
    counts = {s: sum(c.split == s for c in bench.cases) for s in ("tune", "locked", "challenge")}
    assert f"Splits by family: {', '.join(f'{s} {n}' for s, n in counts.items())}." in found["notes"] and "With few cases, write split: all" in desk.take("问题.csv", "third", "--name", "售后")[1]
    assert desk.bench("third").name == "售后" and [c.query_id for c in desk.bench("third").cases] == [c.query_id for c in bench.cases]


def test_notes_alternatives_and_spans(desk):
    from ragbench.golden.formats import load_bench
    check(load_bench({"format": "table", "path": "问题.csv", "docs": "资料"}, desk.folder))
    write_xlsx(desk.folder / "问题.xlsx")
    book = load_bench({"format": "table", "path": "问题.xlsx", "docs": "资料"}, desk.folder)
    check(book)
    assert desk.take("问题.xlsx", "sheet")[0] == 0 == desk.take()[0]
    assert [(c.query, c.evidence, c.split, c.answer) for c in desk.bench("sheet").cases] == [(c.query, c.evidence, c.split, c.answer) for c in desk.bench().cases]


def test_the_bench_is_valid_and_counted(desk):
    desk.take()
    code, out, err = desk.go("dataset", "validate", "mine")
    assert code == 0 and err == "" and out.splitlines()[-1] == "no fault" and "recommended" in out
    code, out, _ = desk.go("dataset", "validate", "mine", "--json")
    assert json.loads(out)["counts"]["cases"] == 10


def test_one_run_of_ten_cases(desk):
    desk.take()
    code, out, err = desk.run(split="all")
    assert code == 0 and all(line.startswith("note: ") for line in err.splitlines())
    rows = json.loads(out)["leaderboard"]
    assert {r["config"] for r in rows} == set("ABCD") and {r["n"] for r in rows} == {9} and all(r["low"] <= r["mean"] <= r["high"] for r in rows)
    code, out, err = desk.go("run", "first.yaml", "--no-report")
    assert code == 0 and err == "" and "EvidenceRecall@200t" in out and "over 9 cases" in out and "nan" not in out


def test_few_cases_are_said(desk):
    "The tune split of ten cases holds one: what cannot be done is named, what can is done."
    desk.take()
    code, out, err = desk.run()
    assert code == 4 and {r["config"] for r in json.loads(out)["leaderboard"]} == set("ABC") and {r["n"] for r in json.loads(out)["leaderboard"]} == {1}
    *notes, failed = err.splitlines()
    assert any("1 of 10 cases were measured (split tune)" in n and "split: all" in n for n in notes) and "D: ltr folds" in failed and "one family" in failed and "Add tune cases" in failed
    code, out, err = desk.run(split="locked")
    assert code == 0 and {r["n"] for r in json.loads(out)["leaderboard"]} == {6} and "6 of 10 cases were measured (split locked)" in err


@pytest.mark.parametrize("matrix, asked", [({"retriever": ["bm25 >> ltr(top_n=5)"]}, "tune"), ({"retriever": ["bm25"]}, "locked")])
def test_a_bench_of_one_split(desk, matrix, asked):
    head, rows = [*HEAD, "集合"], [[*r, "locked"] for r in ROWS]
    write_csv(desk.folder / "问题.csv", rows, head)
    desk.take()
    assert {c.split for c in desk.bench().cases} == {"locked"} and not desk.bench().split_by_us
    before = sorted(desk.folder.rglob("*"))
    if asked == "locked":
        code, out, err = desk.run(split="locked", matrix=matrix)
        assert code == 0 and all(line.startswith("note: ") for line in err.splitlines()) and json.loads(out)["leaderboard"][0]["n"] == 9
    else:
        code, out, err = desk.run(matrix=matrix)
        assert code == 2 and "split tune: mine has no case in it." in err
        code, out, err = desk.run(split="locked", matrix=matrix)
        assert code == 2 and "ltr is fitted on tune cases, of which mine has none" in err
        assert set(desk.folder.rglob("*")) - set(before) == {desk.folder / "first.yaml"}


def test_gbk_needs_its_name(desk):
    write_csv(desk.folder / "旧.csv", encoding="gbk")
    desk.refused(*("dataset", "import", "旧.csv", "--format", "table", "--docs", "资料", "--out", "mine"), says=("旧.csv", "is not UTF-8; it can be read as GBK", "encoding"))
    assert desk.take("旧.csv", "mine", "--encoding", "gbk")[0] == 0
    assert [c.query for c in desk.bench().cases] == [r[0] for r in ROWS]
    (desk.folder / "资料" / "旧.txt").write_bytes("旧的规则。".encode("gbk"))
    desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", "other", says=("旧.txt", "GBK", "encoding"))
    code, _, err = desk.take("问题.csv", "other", "--encoding", "gbk")
    assert code == 0 and desk.bench("other").document("旧").text == "旧的规则。", err


def row(n, **change):
    at = {"query": 0, "answer": 1, "quote": 2, "file": 3, "type": 5, "risk": 6}
    rows = [list(r) for r in ROWS]
    for k, v in change.items(): rows[n - 2][at[k]] = v
    return rows


BAD = {"quote of no document": (row(3, quote="运费由顾客承担"), HEAD, ("问题.csv row 3, 原文", "'运费由顾客承担'", "Copy the words of the document", "退款规则 60-67", "'商城' for '顾客'")),
       "quote of another file": (row(2, file="发票.md"), HEAD, ("问题.csv row 2", "does not stand in 发票", "It stands in 退款规则")),
       "unknown file": (row(2, file="退款规责.md"), HEAD, ("问题.csv row 2", "'退款规责.md'", "退款规则")),
       "answer without quote": (row(4, quote=""), HEAD, ("问题.csv row 4", "no quote that holds it", "Copy the sentence")),
       "unknown type": (row(5, type="闲聊"), HEAD, ("问题.csv row 5", "'闲聊'", "Valid: ")),
       "unknown risk": (row(5, risk="P9"), HEAD, ("问题.csv row 5", "'P9'", "P0")),
       "no question": (row(6, query=""), HEAD, ("问题.csv row 6, 问题", "is missing")),
       "no column of questions": (ROWS, ["文", *HEAD[1:]], ("问题.csv row 1", "no column of questions", "问题")),
       "two columns of questions": (ROWS, ["问题", "提问", *HEAD[2:]], ("问题.csv row 1", "2 columns mean query")),
       "quote of an unanswerable": (row(11, quote="积分两年内有效。"), HEAD, ("问题.csv row 11", "unanswerable")),
       "no column of quotes": ([[r[0], r[1]] for r in ROWS], HEAD[:2], ("问题.csv row 1", "no column of quotes, though 9 rows have an answer", "原文"))}


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(desk, name, kind):
    rows, head, says = BAD[name]
    (write_csv if kind == "csv" else write_xlsx)(desk.folder / f"问题.{kind}", rows, head)
    desk.refused("dataset", "import", f"问题.{kind}", "--format", "table", "--docs", "资料", "--out", "mine", says=[s.replace(".csv", f".{kind}") for s in says])


MANY = [["退货的运费谁出？", "商城。", "运费由顾客承担", "", "", "P9"], ["电池保多久？", "半年。", "电池保修八个月", "保修说明.md", "闲聊", "中"], ["", "有。", "积分两年内无效", "", "事实", "低"],
        ["What about a hot speaker?", "A battery.", "Owners receive a new battery free of  charge within 10 days.", "", "事实", "高"], ["多久能退？", "十五天。", "", "", "事实", "高"],
        ["客服几点下班？", "21:00。", "客服热线……9:00 到 21:00", "门店.md", "事实", "低"], ["月亮多远？", "很远。", "月球距地球约三十八万公里", "", "事实", "低"], ["定制的能退吗？", "不能。", "刻字的商品不支持无理由退货", "退款规责.md", "事实", "中"]]
TOLD = [(2, "风险", "'P9'", "P0"), (2, "原文", "'运费由顾客承担' stands in no document", "the nearest passage, 退款规则 60-67, reads '运费由商城承担' (it has '商城' for '顾客')"), (3, "类型", "'闲聊'", "Valid"),
        (3, "原文", "does not stand in 保修说明", "reads '电池保修六个月' (it has '六' for '八')"), (4, "问题", "is missing", ""), (4, "原文", "'积分两年内无效'", "'积分两年内有效' (it has '有' for '无')"),
        (5, "原文", "stands in no document", "'get' for 'receive', 'ten' for '10'"), (6, "原文", "has an answer, but no quote", "Copy the sentence"), (7, "原文", "does not stand in 门店", "give each as a quote of its own"),
        (8, "原文", "stands in no document", "Copy the words of the document."), (9, "文件", "'退款规责.md'", "退款规则")]


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_all_faults_at_once(desk, kind):
    "A spreadsheet with eleven faults tells eleven, by row and column, and what to write instead; the remedy is a quote that is found."
    (write_csv if kind == "csv" else write_xlsx)(desk.folder / f"错.{kind}", MANY, ["问题", "答案", "原文", "文件", "类型", "风险"])
    before = sorted(desk.folder.rglob("*"))
    code, out, err = desk.take(f"错.{kind}")
    assert code == 2 and out == "" and sorted(desk.folder.rglob("*")) == before
    *lines, last = err.splitlines()
    assert last == "11 faults, nothing was written" and all(line.startswith(f"ragbench: 错.{kind} row ") for line in lines)
    code, out, err = desk.take(f"错.{kind}", "mine", "--json")
    found = json.loads(out)
    assert code == 2 and err == "" and found["ok"] is False and sorted(desk.folder.rglob("*")) == before
    at = lambda f: (f["line"], f["field"])  # noqa: E731
    assert sorted(map(at, found["faults"])) == sorted(t[:2] for t in TOLD) and [f["line"] for f in found["faults"]] == sorted(t[0] for t in TOLD)
    told = {at(f): f for f in found["faults"]}
    for n, column, says, remedy in TOLD: assert says in told[n, column]["found"] and remedy in told[n, column]["remedy"] and set(told[n, column]) == {"file", "line", "field", "found", "remedy"}
    assert "dataset validate" not in out + "".join(lines)
    mended = [["退货的运费谁出？", "商城。", "运费由商城承担", "", "", "P1"], ["hot?", "b", "Owners get a new battery free of charge within ten days", "", "事实", "高"]]
    write_csv(desk.folder / "mended.csv", mended, ["问题", "答案", "原文", "文件", "类型", "风险"])
    assert desk.take("mended.csv")[0] == 0


def test_broken_documents_and_labels_are_all_told(desk):
    for name in ("a.txt", "b.txt"): (desk.folder / "资料" / name).write_bytes("旧的规则。".encode("gbk"))
    code, _, err = desk.take()
    assert code == 2 and err.count("can be read as GBK") == 2 and "ragbench: a.txt" in err and "ragbench: b.txt" in err and "--encoding gbk" in err
    for name in ("a.txt", "b.txt"): (desk.folder / "资料" / name).unlink()
    (desk.folder / "资料" / "新.md").write_text("---\n状态: 没有\n---\n新规则。\n", encoding="utf-8")
    write_csv(desk.folder / "问题.csv", row(5, risk="P9"))
    code, _, err = desk.take()
    assert code == 2 and "新.md line 1, " in err and "问题.csv row 5, 风险" in err


def test_a_single_fault_is_one_line_and_one_record(desk):
    write_csv(desk.folder / "问题.csv", row(5, risk="P9"))
    code, out, err = desk.take("问题.csv", "mine", "--json")
    assert code == 2 and json.loads(out)["faults"][0]["line"] == 5 and err == ""
    code, out, _ = desk.take("none.csv", "mine", "--json")
    assert code == 2 and "no such file" in json.loads(out)["faults"][0]["found"]


def test_notes_say_what_became_of_cells_and_rows(desk):
    silent = [[f"第 {i} 问？", "", "", "", "顾客", "", "低"] for i in range(12)]
    write_csv(desk.folder / "问题.csv", [*ROWS, *silent])
    code, out, err = desk.take()
    assert code == 0 and "1 quote cell of several lines became 2 required groups: row 8." in out
    assert "12 rows without quote and answer became unanswerable: rows 12, 13, 14, 15, 16, 17, 18, 19, 20, 21 and 2 more." in out
    notes = json.loads(desk.take("问题.csv", "again", "--json")[1])["notes"]
    assert len(notes) == len(set(notes)) and sum("taken as alternatives" in n for n in notes) == 1 and sum("white space let differ" in n for n in notes) == 1


def test_replace_takes_the_place_of_a_bench(desk):
    desk.take()
    desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", "mine", says=("exists and is not empty", "--replace"))
    old = {p.name: p.read_bytes() for p in (desk.folder / "mine").iterdir()}
    (desk.folder / "mine" / "备注.txt").write_text("手写", encoding="utf-8")
    (desk.folder / "mine" / "raw").mkdir()
    (desk.folder / "mine" / "raw" / "a.csv").write_text("x")
    write_csv(desk.folder / "问题.csv", row(5, risk="P9"))
    code, _, err = desk.take("问题.csv", "mine", "--replace")
    assert code == 2 and {n: (desk.folder / "mine" / n).read_bytes() for n in old} == old
    write_csv(desk.folder / "问题.csv", ROWS[:4])
    code, out, err = desk.take("问题.csv", "mine", "--replace")
    assert code == 0 and err == "" and "Kept from its folder: raw/, 备注.txt." in out and "was replaced" in out
    assert len(desk.bench().cases) == 4 and (desk.folder / "mine" / "备注.txt").read_text(encoding="utf-8") == "手写" and (desk.folder / "mine" / "raw" / "a.csv").read_text() == "x"
    assert {n: (desk.folder / "mine" / ".previous" / n).read_bytes() for n in old} == old and not [p for p in desk.folder.iterdir() if p.name.startswith(".mine")]
    assert desk.go("dataset", "validate", "mine")[0] == 0 and desk.take("问题.csv", "new", "--replace")[0] == 0


def test_replace_refuses_anything_but_a_bench(desk, monkeypatch):
    (desk.folder / "other").mkdir()
    (desk.folder / "other" / "thesis.doc").write_text("years of work")
    for out in ("other", "资料", "问题.csv"): desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", out, "--replace", says=("is no bench", "Name a new folder"))
    desk.take()
    monkeypatch.chdir(desk.folder / "mine")
    desk.refused("dataset", "import", "../问题.csv", "--format", "table", "--docs", "../资料", "--out", ".", "--replace", says="the folder that this command runs in")


def test_a_failed_swap_leaves_the_old_bench(desk, monkeypatch):
    import os
    desk.take()
    old, real, calls = {p.name: p.read_bytes() for p in (desk.folder / "mine").iterdir()}, os.replace, []

    def replace(source, target):
        calls.append(1)
        if len(calls) == 2: raise OSError(28, "No space left on device")
        real(source, target)
    monkeypatch.setattr(os, "replace", replace)
    code, _, err = desk.take("问题.csv", "mine", "--replace")
    assert code == 2 and "nothing was changed" in err and {p.name: p.read_bytes() for p in (desk.folder / "mine").iterdir()} == old
    assert not [p for p in desk.folder.iterdir() if p.name.startswith(".mine")]


def test_other_formats_list_twenty_faults(desk):
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "Returns within 15 days.", "qas": [{"id": f"q{i}", "question": "?", "answers": [{"text": "15 days", "answer_start": i}]} for i in range(30)]}]}]}
    (desk.folder / "s.json").write_text(json.dumps(squad))
    code, out, err = desk.go("dataset", "import", "s.json", "--format", "squad", "--out", "mine")
    assert code == 2 and err.count("It stands at 15-22") == 20 and "… and 9 more faults" in err and err.splitlines()[-1] == "29 faults, nothing was written; --json lists all"
    assert len(json.loads(desk.go("dataset", "import", "s.json", "--format", "squad", "--out", "mine", "--json")[1])["faults"]) == 29
    records = [{"id": i, "question": "?", "relevant_doc_ids": [f"退款规贝{i}"]} for i in range(5)]
    (desk.folder / "c.json").write_text(json.dumps(records))
    code, _, err = desk.go("dataset", "import", "c.json", "--format", "cases", "--docs", "资料", "--out", "mine")
    assert code == 2 and err.count("unknown id") == 5 and "c.json record 3" in err and "5 faults, nothing was written" in err and not (desk.folder / "mine").exists()
    (desk.folder / "beir").mkdir()
    for name, text in {"corpus.jsonl": '{"_id": "d", "text": "wing"}', "queries.jsonl": '{"_id": "q", "text": "?"}', "qrels.tsv": "".join(f"q\tx{i}\t1\n" for i in range(5))}.items(): (desk.folder / "beir" / name).write_text(text)
    assert desk.go("dataset", "import", "beir", "--format", "beir", "--out", "mine")[2].count("unknown document") == 5


FRONT = {"open bracket": ("roles: [主管", "a.md line 2: the front matter cannot be read"), "key twice": ("roles: [主管]\nroles: [客服]", "a.md line 3: the front matter cannot be read"),
         "alias": ("x: &x [主管]\nroles: *x", "a.md line 3: the front matter cannot be read"), "tab": ("status:\n\t- draft", "a.md line 3: the front matter cannot be read"), "no blank": ("角色:[主管]", "a.md line 1, 角色: stands in line 2"),
         "wide colon": ("角色：主管", "a.md line 1, 角色: stands in line 2"), "list": ("- roles: 主管", "a.md line 1, roles: stands in line 2"), "near": ("rol: 主管", "Did you mean 'role'?"),
         "other order": ("role_allowed: 主管", "Did you mean 'allowed_roles'?"), "two of one meaning": ("roles: [主管]\n角色: [客服]", "roles is given twice"), "no value": ("status: hidden", "a.md line 1, status: unknown value 'hidden'")}


@pytest.mark.parametrize("name", FRONT)
def test_labels_that_cannot_be_read_hide_nothing_so_they_are_faults(desk, name):
    "The same for a table, for a list of cases, for Ragas records, and for a bench folder that names the file."
    block, says = FRONT[name]
    (desk.folder / "资料" / "a.md").write_text(f"---\n{block}\n---\n# 工资\n五号发。\n", encoding="utf-8")
    (desk.folder / "c.json").write_text(json.dumps([{"id": 1, "question": "?", "relevant_doc_ids": ["发票"]}]), encoding="utf-8")
    (desk.folder / "r.json").write_text(json.dumps([{"user_input": "?", "reference_contexts": ["积分两年内有效。"]}]), encoding="utf-8")
    for kind, source in (("table", "问题.csv"), ("cases", "c.json"), ("ragas", "r.json")): desk.refused("dataset", "import", source, "--format", kind, "--docs", "资料", "--out", "mine", says=says)
    (desk.folder / "资料" / "a.md").rename(desk.folder / "a.md")
    desk.take()
    bench = desk.folder / "mine"
    (bench / "a.md").write_bytes((desk.folder / "a.md").read_bytes())
    (bench / "documents.jsonl").write_text((bench / "documents.jsonl").read_text("utf-8") + '{"doc_id": "a", "path": "a.md"}\n', "utf-8")
    code, out, err = desk.go("dataset", "validate", "mine")
    assert code == 2 and "documents.jsonl line 13" in err and err.rstrip().endswith("fault in mine")


@pytest.mark.parametrize("text", ["---\n\n保修一年。\n\n---\n", "---\n注意：本文仅供参考。\n---\n正文。", "---\n", "# 标题\n---\n角色：主管\n---\n", "---\n第一条 保修一年。\n---\n"])
def test_a_rule_at_the_start_is_text(desk, text):
    (desk.folder / "资料" / "a.md").write_text(text, encoding="utf-8")
    assert desk.take()[0] == 0 and desk.bench().document("a").text == text and desk.bench().document("a").roles == ()


def test_labels_of_front_matter_hold_and_other_keys_are_said(desk):
    (desk.folder / "资料" / "a.md").write_text("---\n角色: [主管]\nowner: 财务\n---\n五号发工资。\n", encoding="utf-8")
    (desk.folder / "资料" / "b.md").write_text("")
    (desk.folder / "资料" / "手册.docx").write_bytes(b"PK")
    for n in range(5): (desk.folder / "资料" / f"{n}.png").write_bytes(b"x")
    code, out, _ = desk.take()
    assert code == 0 and "Front matter keys that are not read: owner (a.md)." in out and "1 document without text: b.md." in out
    assert "1 file (.docx) is not read in this version: 手册.docx." in out and "5 files (.png) are not read in this version: 0.png, 1.png, 2.png and 2 more." in out and desk.bench().document("a").roles == ("主管",)
    bench = desk.folder / "mine"
    (bench / "a.md").write_bytes((desk.folder / "资料" / "a.md").read_bytes())
    (bench / "documents.jsonl").write_text((bench / "documents.jsonl").read_text("utf-8") + '{"doc_id": "by path", "path": "a.md"}\n', "utf-8")
    assert desk.bench().document("by path").roles == ("主管",)


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_cells_under_no_header_are_faults(desk, kind):
    rows = [["能退吗？", "十五天内可申请无理由退货", "刻字的除外"], ["有卡吗？", "", ""]]
    (write_csv if kind == "csv" else write_xlsx)(desk.folder / f"宽.{kind}", rows, ["问题", "原文"])
    desk.refused("dataset", "import", f"宽.{kind}", "--format", "table", "--docs", "资料", "--out", "mine", says=(f"宽.{kind} row 2: has 3 cells, the header 2.", "quotation marks" if kind == "csv" else "Head the column"))
    (desk.folder / "资料" / "documents.csv").write_text("文件,角色\n发票.md,客服,主管\n", encoding="utf-8")
    desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", "mine", says="documents.csv row 2: has 3 cells, the header 2.")
    (desk.folder / "资料" / "documents.csv").write_text("文件,可见人角色\n发票.md,客服\n", encoding="utf-8")
    desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", "mine", says=("documents.csv row 1, 可见人角色", "Did you mean '可见角色'?"))


@pytest.mark.parametrize("label, column, value, why", [("角色: [主管]", "提问人", "顾客", "role"), ("租户: 港口", "租户", "岚岳", "tenant"), ("生效日期: 2026-09-01", "适用日期", "2026/8/1", "not_in_force"), ("状态: 草稿", "提问人", "顾客", "draft")])
def test_evidence_out_of_the_askers_view_is_a_fault_of_the_import(desk, label, column, value, why):
    label = label.replace("草稿", "draft")
    (desk.folder / "资料" / "内部.md").write_text(f"---\n{label}\n---\n押金上限为三百元。\n", encoding="utf-8")
    write_csv(desk.folder / "看.csv", [["押金多少？", "三百元。", "押金上限为三百元", value]], ["问题", "答案", "原文", column])
    desk.refused(*("dataset", "import", "看.csv", "--format", "table", "--docs", "资料", "--out", "mine"), says=("看.csv row 2, 原文", "out of the asker's view", f"内部 {why}", "Mend actor"))


def test_headers_and_files_that_were_meant(desk):
    for head, says in ((["问提", "答案"], "Did you mean 问题 for 问提?"), (["my question", "答案"], "Did you mean question for my question?"), (["甲", "答案"], "The headers are 甲, 答案; head one question or 问题.")):
        write_csv(desk.folder / "头.csv", [["?", "x"]], head)
        desk.refused("dataset", "import", "头.csv", "--format", "table", "--docs", "资料", "--out", "mine", says=says)
    write_csv(desk.folder / "文.csv", [["能退吗？", "电池保修六个月", "保修规定.md"]], ["问题", "原文", "文件"])
    desk.refused("dataset", "import", "文.csv", "--format", "table", "--docs", "资料", "--out", "mine", says="Did you mean '保修说明'?")
    write_csv(desk.folder / "文.csv", [["能退吗？", "电池保修六个月\n蓝灯闪烁表示成功", "保修说明.md,安装.txt"], ["?", "蓝灯闪烁表示成功", "保修说明.md，安装.txt"]], ["问题", "原文", "文件"])
    desk.refused("dataset", "import", "文.csv", "--format", "table", "--docs", "资料", "--out", "mine", says=("文.csv row 3, 文件: 2 files for 1 quote.", "each on a line of its own"))
    write_csv(desk.folder / "文.csv", [["能退吗？", "电池保修六个月\n蓝灯闪烁表示成功", "保修说明.md,安装.txt"]], ["问题", "原文", "文件"])
    assert desk.take("文.csv")[0] == 0 and [e.doc_id for e in desk.bench().cases[0].evidence] == ["保修说明", "安装"]


def test_the_folder_that_was_read_is_said(desk):
    write_csv(desk.folder / "资料" / "q.csv")
    code, out, _ = desk.go("dataset", "import", "资料/q.csv", "--format", "table", "--out", "mine")
    assert code == 0 and "12 documents read from 资料." in out
    assert "documents read from" not in desk.take("资料/q.csv", "other")[1]


def test_alternatives_of_a_quote(desk):
    rows = [["修好要多久？", "十四天。", "换主板的需要十四天", "收到机器后七个工作日内寄回\n检测免费"], ["两问？", "是。", "电池保修六个月\n检测免费", "-\n海岛地区多加四个工作日"]]
    write_csv(desk.folder / "或.csv", rows, ["问题", "答案", "原文", "替代原文"])
    code, out, err = desk.take("或.csv")
    assert code == 0, err
    one, two = desk.bench().cases
    assert [(e.doc_id, e.group, e.alt) for e in one.evidence] == [("维修流程", "1", "1"), ("维修流程", "1", "2"), ("门店", "1", "3")]
    assert [(e.doc_id, e.group, e.alt) for e in two.evidence] == [("保修说明", "1", "1"), ("门店", "2", "1"), ("配送", "2", "2")]


def test_languages_are_guessed_text_by_text(desk):
    def article(title, context, *asked): return {"title": title, "paragraphs": [{"context": context, "qas": [{"id": f"{title}{i}", "question": q, "answers": [{"text": context[:3], "answer_start": 0}]} for i, q in enumerate(asked)]}]}
    (desk.folder / "s.json").write_text(json.dumps({"data": [article("zh", "十五天内可以退货。" * 20, "多久？", "How long?"), article("en", "Fifteen days.", "How long?", "多久？")]}), encoding="utf-8")
    assert desk.go("dataset", "import", "s.json", "--format", "squad", "--out", "mine")[0] == 0
    assert {d.family: d.lang for d in desk.bench().documents} == {"zh": "zh", "en": "en"} and {c.query_id: (c.lang, c.type) for c in desk.bench().cases} == {
        "zh0": ("zh", "fact"), "zh1": ("en", "multilingual"), "en0": ("en", "fact"), "en1": ("zh", "multilingual")}


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["zh", "en"])
def test_hundreds_of_bad_quotes_are_told_in_time(tmp_path, lang):
    import random
    import time

    from ragbench.core.model import Document
    from ragbench.golden.anchor import Library
    rng = random.Random(5)
    words = [chr(rng.randrange(0x4e00, 0x5e00)) for _ in range(1500)] if lang == "zh" else ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9))) for _ in range(5000)]
    texts = [("" if lang == "zh" else " ").join(rng.choices(words, k=17_000 if lang == "zh" else 7500)) for _ in range(100)]
    shelf = Library(Document(f"d{i}", text) for i, text in enumerate(texts))
    assert sum(len(t.encode()) for t in texts) > 4_500_000
    start, right = time.perf_counter(), 0
    for _ in range(500):
        i, at = rng.randrange(100), rng.randrange(10_000)
        quote = texts[i][at:at + rng.randint(30, 150)]
        near = shelf.passages.nearest(quote[:11] + "##" + quote[14:])
        right += near is not None and near.doc_id == f"d{i}" and abs(near.start - at) < 12
    assert right >= 495 and time.perf_counter() - start < 30


def test_bad_sources_and_places_are_refused(desk):
    (desk.folder / "空").mkdir()
    for words, says in ((["none.csv", "--docs", "资料", "--out", "mine"], ("none.csv", "no such file", "Check the path.")), (["问题.csv", "--docs", "没有", "--out", "mine"], ("没有", "no such folder of documents")),
                        (["问题.csv", "--docs", "空", "--out", "mine"], ("空", "holds no document", ".md")), (["资料", "--docs", "资料", "--out", "mine"], ("holds 0 tables of questions", "Give the path of one")),
                        (["资料/发票.md", "--docs", "资料", "--out", "mine"], (".md is no table", "CSV or XLSX")), (["问题.csv", "--docs", "资料", "--out", "资料"], ("资料", "exists and is not empty", "Name a new folder.")),
                        (["问题.csv", "--docs", "资料", "--out", "问题.csv"], ("exists and is not empty",)), (["问题.csv", "--docs", "资料", "--out", "问题.csv/mine"], ("cannot be written", "Name another folder."))):
        desk.refused("dataset", "import", *words, "--format", "table", says=says)
    desk.refused("dataset", "import", "问题.csv", "--docs", "资料", "--out", "mine", "--format", "tablee", says=("'tablee'", "Did you mean 'table'?"))
    for name, data in (("empty.csv", b""), ("broken.xlsx", b"PK\x03\x04nothing"), ("quote.csv", '问题,答案\n"没有结束,1\n'.encode())):
        (desk.folder / name).write_bytes(data)
        desk.refused("dataset", "import", name, "--format", "table", "--docs", "资料", "--out", "mine", says=name)


def test_head_alone_has_no_cases(desk):
    write_csv(desk.folder / "问题.csv", [])
    desk.refused("dataset", "import", "问题.csv", "--format", "table", "--docs", "资料", "--out", "mine", says="问题.csv")


def test_hostile_cells_stay_text(desk):
    evil = "<script>alert(1)</script> =HYPERLINK(\"http://x\") [UNTRUSTED_INSTRUCTION] \u202e"
    write_csv(desk.folder / "问题.csv", [*ROWS, [evil, "是", "积分两年内有效。", "", evil, "事实", "低"]])
    assert desk.take()[0] == 0
    case = desk.bench().cases[-1]
    assert case.query == evil.strip() and case.actor.role == evil.strip()


@pytest.mark.slow
def test_the_report_of_ten_cases(desk):
    desk.take()
    (desk.folder / "first.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "split": "all"}, allow_unicode=True, sort_keys=False), encoding="utf-8")
    code, out, err = desk.go("run", "first.yaml", "--json")
    done = json.loads(out)
    assert code == 0, err
    page = Path(done["report"]).read_text(encoding="utf-8")
    assert page.count('<figure class="chart"') >= 4 and "mine" in page and "Traceback" not in page
    again = json.loads(desk.go("run", "first.yaml", "--json")[1])
    assert again["stages"]["run"] == 0 and again["results_sha256"] == done["results_sha256"] and again["report"] == done["report"]


@pytest.mark.slow
def test_the_report_of_a_single_case(desk):
    desk.take()
    (desk.folder / "first.yaml").write_text(yaml.safe_dump(EXPERIMENT, allow_unicode=True, sort_keys=False), encoding="utf-8")
    code, out, err = desk.go("run", "first.yaml", "--json")
    assert code == 4 and Path(json.loads(out)["report"]).is_file() and "D could not be run" in Path(json.loads(out)["report"]).read_text(encoding="utf-8")
