"""The report of a run: one file, offline, alive, and deaf to what documents say."""
import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from ragbench.core.errors import BadInput, Incomplete
from ragbench.faces.report import bundled, write_report

HOSTILE = ("<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "javascript:window.pwned=1", "</script><script>window.pwned=1</script>",
           "{{7*7}}", "$\\href{javascript:window.pwned=1}{x}$", "[x](javascript:window.pwned=1)", "\u202egnp.exe\x00", "<style>*{display:none}</style>", "' onmouseover='window.pwned=1")

FAKE = '''
import numpy as np, pandas as pd
from types import SimpleNamespace
from ragbench.core.model import Actor, Case
EVIL = {evil!r}
CONFIGS = ["heading | hybrid >> ltr", "heading | hybrid", "fixed(size=200, overlap=40) | bm25", "页面 | dense"]
TYPES = ["fact", "numeric", "multi_hop", "table", "conditional", "unanswerable", "permission", "版本冲突"]
TEXT = "签收后七天内可以无理由退货。质量问题的商品自签收之日起十五天内可以退款，运费由商家承担。定制商品除外。"
SHORT = TEXT[:14]
TEXT_EN = "Goods with a quality defect may be returned within fifteen days of delivery; the seller bears the cost of shipping."


class Results:
    primary = main_measure = "EvidenceRecall@800t"
    notes = ["4 configurations were seen on the tune split; luck alone would have gained 0.021.", "12 cases have evidence by section only: the cut rate is undefined for them."]
    manifest = {{"design": {{"name": "chunk-ab", "split": "tune", "seed": 7}}, "bench": {{"name": "aftersales", "sha256": "9f2c4e…"}}, "versions": {{"ragbench": "0.1.0", "dataset": "1", "knowledge": "2026-08-01"}},
                "environment": {{"python": "3.11", "numpy": "2.4"}}, "configs": [{{"config": c, "spec": c}} for c in CONFIGS]}}

    def __init__(self, evil=False):
        self.configs, self.types, self.text = CONFIGS, TYPES, TEXT
        if evil:
            self.configs, self.types, self.text = EVIL[:4], EVIL[2:], "退款".join(EVIL)
            self.notes, self.manifest = list(EVIL), {{"design": {{"name": EVIL[0]}}, "bench": {{"name": EVIL[1]}}, **dict(zip(EVIL, EVIL))}}
            self.primary = self.main_measure = "MRR"
        self.evil = evil

    @classmethod
    def open(cls, folder): return cls({hostile})

    def headline(self):
        if self.evil: return EVIL[0] + EVIL[5]
        return "Heading chunks with the hybrid retriever and the reranker find the needed evidence more often than fixed chunks with BM25: +0.190 [+0.110, +0.270] at 800 tokens. The two heading configurations cannot be told apart on these 120 cases."

    def leaderboard(self):
        rows = []
        for m, drop in (("EvidenceRecall@800t", 0), ("Recall@5", .05), ("MRR", .12), ("nDCG@10", .09)):
            for c, mean, s in zip(self.configs, (.81, .78, .62, .55), ("in_play", "in_play", "ruled_out", "ruled_out")):
                rows.append(dict(config=c, spec=c, measure=m, mean=mean - drop, low=mean - drop - .07, high=mean - drop + .06, n=120, clusters=44, floor=.12, standing=s if m == self.primary else None))
        rows[-1].update(mean=np.nan, low=np.nan, high=np.nan, n=0, clusters=0)
        return pd.DataFrame(rows)

    def by_stratum(self, measure, by="type"):
        names = dict(type=self.types, risk=["P0", "P1", "P2"], lang=["en", "zh"], split=["tune"], group=["a"])[by]
        return pd.DataFrame([dict(config=c, stratum=t, mean=np.nan if t == "unanswerable" else round(max(.05, .93 - .09 * j - .08 * i), 3), low=.2, high=.9, n=0 if t == "unanswerable" else 44 - 6 * j, clusters=9) for i, c in enumerate(self.configs) for j, t in enumerate(names)])

    def curve(self, family, unit="k"):
        cuts = [400, 800, 1600, 3200] if unit == "t" else [1, 3, 5, 10]
        rows = [dict(config=c, k=k, mean=start + .09 * j, low=start + .09 * j - .07, high=min(1, start + .09 * j + .06), n=120) for c, start in zip(self.configs, (.66, .62, .45, .38)) for j, k in enumerate(cuts)]
        frame = pd.DataFrame(rows)
        return frame.assign(floor=[.06, .12, .21, .36] * len(self.configs)) if unit == "t" else frame

    def latency(self):
        return pd.DataFrame([dict(config=c, stage=s, p50=p * (1 + i / 4), p95=p * 2.4, n=120) for i, c in enumerate(self.configs) for s, p in (("embed", 3.1), ("search", .62), ("rerank", 5.3), ("end to end", 9.4))])

    def weakest(self, config=None):
        return dict(stratum=self.types[2], mean=.41, n=26, clusters=14, indistinguishable_from=self.types[3:5], measure=self.primary, named=True)

    def bad_cases(self, config=None, n=10):
        ask = [EVIL[i % len(EVIL)] for i in range(3)] if self.evil else ["签收8天的耳机质量故障能退款吗？", "Who pays for shipping when a defective headset goes back?", "定制商品可以七天无理由退货吗？"]
        ids = ask if self.evil else ["REFUND-028", "REFUND-031", "REFUND-044"]
        return pd.DataFrame([dict(query_id=i, query=q, type=self.types[4], risk=r, config=self.configs[2], value=v, lost_at=l) for i, q, r, v, l in zip(ids, ask, ("P0", "P1", "P2"), (0., .25, .5), ("intact", "candidates", "top"))])

    @property
    def bench(self):
        return SimpleNamespace(cases=[Case(q, q, actor=Actor(EVIL[1] if self.evil else "support_agent"), answer=self.text) for q in self.bad_cases()["query_id"]])

    def case_view(self, query_id, configs):
        tag = EVIL[0] if self.evil else "refund-v3:400-470"
        hit = lambda r, text, ev: dict(rank=r, chunk_id=tag, doc_id=tag, title=EVIL[1] if self.evil else "退款规则", section=["退款", tag if self.evil else "例外"], text=text, score=.91 - r / 10, evidence=ev, scores={{"bm25": 7.1, "dense": .64}})
        need = [dict(doc_id="refund-v3", quote=self.text[14:30], group="exception", grade=3), dict(doc_id="refund-v3", quote=self.text[30:40], group="shipping", grade=2)]
        full = [hit(1, self.text, [(14, 35, "exception", 3), (36, 43, "shipping", 2)]), *(hit(r, TEXT_EN, []) for r in range(2, 8))]
        part = [hit(1, self.text[:22], [(14, 22, "exception", 3)]), hit(2, TEXT_EN, []), hit(3, self.text[40:], [])]
        views = [(full, ("found", "found")), (part, ("cut", "in candidates at rank 41"))]
        return [dict(config=c, hits=h, evidence=[{{**n, "status": s}} for n, s in zip(need, st)]) for c, (h, st) in zip(configs, views)]

    def comparisons(self):
        best = self.configs[0]
        return pd.DataFrame([dict(a=c, b=best, measure=self.primary, difference=d, low=d - .06, high=d + .06, p=p, p_adjusted=min(1, 3 * p), win=int(9 + 90 * d), tie=90, loss=7, n=120, clusters=44, verdict=v,
                                  sentence=f"{{best}} against {{c}}: {{d:+.3f}} [{{d - .06:+.3f}}, {{d + .06:+.3f}}], {{v}}.") for c, d, p, v in zip(self.configs[1:], (.03, .19, .26), (.21, .0002, .00001), ("inconclusive", "better", "better"))])

    def legend(self):
        return pd.DataFrame(dict(config=self.configs, chunker="fixed(size=200, overlap=40, unit=char)", retriever="bm25(k1=1.2, b=0.75)"))

    def orders(self, family="EvidenceRecall"):
        return pd.DataFrame(dict(measure=[family + "@5", family + "@800t"], order=[" > ".join(self.configs), " > ".join(reversed(self.configs))], means="0.800 > 0.700"))

    def chunking(self):
        return pd.DataFrame(dict(chunker=["fixed(size=200, overlap=40)", "heading(max_size=400)", self.configs[3] if self.evil else "page"], chunks=[812, 377, 120], mean_tokens=[96., 171., 402.], evidence_cut_rate=[.31, .04, .01], cut=[46, 6, 1], groups=[148] * 3))
'''


def run_folder(tmp_path, name, evil=False):
    "A run folder and the report notebook with a stand-in for the engine's results."
    folder = tmp_path / name
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (tmp_path / f"fake_{name}.py").write_text(FAKE.format(evil=HOSTILE, hostile=evil), encoding="utf-8", errors="surrogatepass")
    notebook = json.loads(bundled("experiments/report.ipynb").read_text())
    for cell in notebook["cells"]:
        lines = [line.replace("from ragbench.engine.results import Results", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fake_{name} import Results") for line in cell["source"]]
        cell["source"] = lines
    (tmp_path / f"{name}.ipynb").write_text(json.dumps(notebook))
    return folder, tmp_path / f"{name}.ipynb"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    base = tmp_path_factory.mktemp("reports")
    return {name: write_report(*run_folder(base, name, name == "evil")) for name in ("plain", "evil")}


def without_scripts(path):
    return re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.DOTALL)


def test_every_section_is_there_in_order(reports):
    page = without_scripts(reports["plain"])
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert titles == ["Leaderboard", "Paired comparisons", "Evidence against token budget", "Where configurations fail", "Recall against cut-off", "Chunking",
                      "Latency by stage", "Weakest category", "Bad cases", "Notes", "How to read this report", "Provenance"]
    assert page.count('<figure class="chart"') == 7 and page.count('class="still"') == 7
    assert "<h1>chunk-ab</h1>" in page and "cannot be told apart" in page and "Results.open" not in page
    assert str(reports["plain"].parent) not in page
    assert reports["plain"].stat().st_size < 2_000_000


def test_headings_never_skip_a_level(reports):
    levels = [int(h) for h in re.findall(r"<h([1-6])[ >]", without_scripts(reports["plain"]))]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:]))


def test_scripts_are_named_by_hash_and_nothing_is_fetched(reports):
    for path in reports.values():
        page = path.read_text()
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
        scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        hashes = re.findall(r"'sha256-([^']+)'", policy)
        assert hashes == [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts] and len(scripts) == 2
        assert "default-src 'none'" in policy and "unsafe" not in re.search(r"script-src[^;]*", policy)[0]
        assert not re.search(r"<(script|link|img|iframe|object|embed)\b[^>]*\b(src|href|data)\s*=\s*[\"']?(?![\"']?data:)", without_scripts(path))


def test_same_run_same_bytes(reports, tmp_path):
    again = write_report(*run_folder(tmp_path, "plain"))
    assert again.read_bytes() == reports["plain"].read_bytes()


def small(tmp_path, *cells):
    "A run folder with an earlier report, and a notebook of a few cells."
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "report.html").write_text("previous")
    cell = lambda i, source, tags: {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tags}, "source": source, "outputs": [], "execution_count": None}
    cells = [cell(0, 'folder = "none"', ["parameters"]), *(cell(i, s, []) for i, s in enumerate(cells, 1))]
    (tmp_path / "small.ipynb").write_text(json.dumps({"cells": cells, "metadata": {"kernelspec": {"name": "python3", "display_name": "x", "language": "python"}}, "nbformat": 4, "nbformat_minor": 5}))
    return folder, tmp_path / "small.ipynb"


@pytest.mark.parametrize("cell, error, says", [
    ("raise KeyError('no notes')", Incomplete, r"cell 3 .*KeyError: 'no notes'"),
    ("from ragbench.core.errors import BadInput; raise BadInput('scores.parquet', 'is damaged.')", BadInput, "scores.parquet: is damaged"),
    ("import time; time.sleep(60)", Incomplete, "timed out"),
    ("import os; os._exit(3)", Incomplete, "died")])
def test_a_failing_cell_keeps_the_previous_report(tmp_path, cell, error, says):
    folder, notebook = small(tmp_path, cell)
    with pytest.raises(error, match=f"(?is){says}"): write_report(folder, notebook, timeout=5)
    assert (folder / "report.html").read_text() == "previous"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "report.html"]


def test_works_inside_a_running_event_loop(tmp_path):
    import asyncio
    async def in_jupyter(): return write_report(*small(tmp_path, "print(folder)"))
    assert "<pre>run\n</pre>" in asyncio.run(in_jupyter()).read_text()


def test_report_notebook_has_one_parameters_cell_and_defines_nothing():
    notebook = json.loads(bundled("experiments/report.ipynb").read_text())
    tagged = [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1 and not any(re.search(r"^\s*(def|class) ", "".join(c["source"]), re.MULTILINE) for c in notebook["cells"])


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
CHROMIUM = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None: pytest.skip("Chromium is not installed (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (test extra)")
    with sync_api.sync_playwright() as play:
        launched = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


def opened(browser, path, **options):
    "A page of a report, what it asked for beyond the file itself, and its errors."
    page = browser.new_context(viewport={"width": 1400, "height": 1000}, **options).new_page()
    asked, errors = [], []
    def answer(route):
        url = route.request.url
        if url == path.as_uri() or url.startswith(("data:", "blob:")): return route.continue_()
        asked.append(url)
        route.abort()
    page.context.route("**/*", answer)
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("popup", lambda p: asked.append("popup"))
    page.goto(path.as_uri())
    return page, asked, errors


@pytest.mark.browser
@pytest.mark.parametrize("name", ["plain", "evil"])
def test_opens_offline_with_live_charts_and_runs_nothing_else(browser, reports, name):
    page, asked, errors = opened(browser, reports[name])
    page.locator("figure.drawn .live svg.marks").nth(6).wait_for(timeout=60_000)
    assert page.locator("figure.chart .live svg.marks").count() == 7
    marks = page.evaluate("[...document.querySelectorAll('figure .live svg.marks')].map(s => s.querySelectorAll('path,text,line,rect').length)")
    assert min(marks) > 10
    folded = page.locator("details.case:not([open]) > summary")
    while folded.count(): folded.first.click()
    page.locator("figure.chart").first.hover()
    page.wait_for_timeout(300)
    assert page.evaluate("typeof window.pwned") == "undefined"
    assert (asked, errors) == ([], [])
    assert page.evaluate("[...document.links].every(a => a.getAttribute('href').startsWith('#'))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).display") == "block"
    page.context.close()


@pytest.mark.browser
def test_reads_without_javascript_in_the_dark_and_on_a_phone(browser, reports):
    page, asked, errors = opened(browser, reports["plain"], java_script_enabled=False)
    assert page.locator("img.still:visible").count() == 7 and page.locator("table").count() >= 8
    page.context.close()
    page, asked, errors = opened(browser, reports["plain"], color_scheme="dark")
    page.locator("figure.drawn .live svg.marks").nth(6).wait_for(timeout=60_000)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 30)"
    assert (asked, errors) == ([], [])
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.context.close()
