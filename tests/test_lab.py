"""The workbench: widgets that show what a run holds, `ragbench lab`, and JupyterLab in a real browser on a hostile bench."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ragbench.core.errors import BadInput
from ragbench.engine.config import Config, Matrix
from ragbench.engine.experiment import Experiment
from ragbench.engine.results import Results
from ragbench.engine.store import Store
from ragbench.faces import cli
from ragbench.faces.widgets import CaseView, FusionSlider, LeaderboardView, Workbench, find_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>window.pwned=1</script>"
IMAGE = "<img src=x onerror=window.pwned=1>"
MORE = "</script><script>window.pwned=1</script> javascript:window.pwned=1 $\\href{javascript:window.pwned=1}{x}$ {{7*7}} \u202e"
FACTS = [("Refunds for opened headphones are paid within nine working days.", "How long until money comes back for opened headphones?"),
         ("The spare battery of the cordless drill ships from the Leipzig depot.", "Where is the drill's second accumulator sent from?"),
         ("A cracked display is repaired free of charge once in two years.", "Is glass damage on the screen fixed at no cost?"),
         ("Invoices older than six years are deleted from the archive.", "When do old bills vanish from the archive?"),
         ("Night deliveries need a signature from an adult in the household.", "Who has to sign for a parcel that comes at night?"),
         ("The help line answers between seven and nineteen on weekdays.", "On which days can I phone the help line?"),
         ("Gift cards cannot be exchanged for cash under any condition.", "Can a voucher be turned into money?"),
         ("The router restarts itself after three failed firmware updates.", "What does the router do when updating fails thrice?"),
         ("Loyalty points expire eighteen months after the last purchase.", "How long do bonus points stay valid?"),
         ("Damaged pallets are photographed before the driver leaves the yard.", "What must be done with broken pallets while the driver waits?"),
         ("A courier collects returns only where the label was printed in the shop.", "Will somebody pick up what I send back?"),
         ("Paint buckets are shipped upright in a carton with two layers.", "How is paint packed for transport?"),
         ("Members of the workshop borrow measuring tools for fourteen days.", "For how long may measuring tools be borrowed?"),
         ("Oven spare parts are listed by serial number and never by name.", "How do I find parts for my oven in the list?")]
EXTRA = "Please ask the shop, the driver, the depot or the help line about parts, days, labels, tools and returns."


def hostile_bench(folder: Path, split: str = "tune") -> Path:
    "A bench whose ids, titles, texts, groups and queries carry markup."
    folder.mkdir()
    (folder / "bench.yaml").write_text(json.dumps({"name": "hostile", "dataset_version": "1", "knowledge_version": "1", "languages": ["en"]}))
    documents, cases = [], []
    for i, (fact, question) in enumerate(FACTS):
        lead = f"# {IMAGE} {i}\n\n{EVIL} {EXTRA} "
        doc_id, text = f"d{i}{EVIL if i % 2 else IMAGE}", f"{lead}{fact} {MORE}"
        documents.append({"doc_id": doc_id, "text": text, "title": f"{IMAGE}{EVIL} {i}", "lang": "en"})
        cases.append({"query_id": f"q{i:02}{IMAGE}", "query": f"{question} {EVIL if i == 3 else ''}", "lang": "en", "type": "fact" if i % 3 else "paraphrase", "risk": f"P{i % 3}", "answer": f"{fact}{IMAGE}",
                      "actor": {"role": f"agent{IMAGE}", "tenant": None}, "split": split,
                      "evidence": [{"doc_id": doc_id, "start": len(lead), "end": len(lead) + len(fact), "quote": fact, "grade": 3, "group": f"g{IMAGE}"}]})
    for name, rows in (("documents", documents), ("cases", cases)): (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def experiment(bench: Path, retrievers: dict[str, str], split: str = "tune") -> Experiment:
    matrix = Matrix(Config(depth=10, k=3), chunker={"small": "fixed(size=90, overlap=10)", "large": "fixed(size=160, overlap=10)"}, retriever=retrievers)
    return Experiment(str(bench), matrix, name="tiny", split=split, measures=("EvidenceRecall", "Recall", "Hit", "Precision", "MRR@3", "nDCG"), primary="EvidenceRecall@20t", cutoffs=(1, 3, 10), budgets=(20,))


RETRIEVERS = {"A": "bm25", f"C{IMAGE}": "0.7*dense + 0.3*bm25", f"E{EVIL}": "0.2*dense + 0.8*bm25"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def store(place):
    return Store(place / "cache")


@pytest.fixture(scope="module")
def bench(place):
    return hostile_bench(place / "bench")


@pytest.fixture(scope="module")
def results(place, bench, store):
    return experiment(bench, RETRIEVERS).run(place / "work" / "runs", store=store)


def shown_rows(results: Results, config: str, measures: list[str]) -> list[tuple[str, ...]]:
    "Measure, mean, interval, n, clusters as the tables write them."
    board = results.leaderboard(measures)
    return [(r.measure, f"{r.mean:.3f}", f"[{r.low:.3f},\u00a0{r.high:.3f}]", str(r.n), str(r.clusters)) for r in board[board["config"] == config].itertuples(index=False)]


class _Tags(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def harmless(html: str) -> bool:
    "Only the elements and attributes that the panels make themselves."
    made = _Tags(html)
    return (made.tags <= set("div p h3 h4 dl dt dd table caption thead tbody tr th td span i b code section ol li mark sup".split())
            and made.attributes <= {"class", "lang", "style", "title", "tabindex", "role", "scope", "aria-label", "aria-hidden"} and "\u202e" not in html)


# -- without a browser


@pytest.mark.parametrize("weight", [0.0, 0.35, 0.5, 1.0])
def test_slider_equals_a_run_at_that_weight(results, place, bench, store, weight):
    slider = FusionSlider(results)
    slider.weight.value = weight
    again = experiment(bench, {"X": slider.retriever}).run(place / "again", store=store)
    for chunker, label in zip([c for _, c in slider.chunker.options], again.configs):
        slider.chunker.value = chunker
        assert again.specs[label]["chunker"] == chunker
        board = again.leaderboard([r["measure"] for r in slider.state["rows"]]).query("config == @label")
        for shown, measured in zip(slider.state["rows"], board.to_dict("records")):
            for key in ("measure", "mean", "low", "high", "n", "clusters"): assert shown[key] == measured[key], (chunker, key)


def test_slider_starts_at_a_stored_configuration_and_compares_with_it(results):
    slider = FusionSlider(results)
    assert slider.against.value.endswith(f"C{IMAGE}") and slider.weight.value == 0.7 and slider.k.value == 3
    assert all(r["difference"] == 0 for r in slider.state["rows"])
    slider.weight.value, slider.k.value = 0.2, 2
    assert [r["measure"] for r in slider.state["rows"]] == ["EvidenceRecall@20t", "Recall@2", "Hit@2", "Precision@2", "MRR@2", "nDCG@2"]
    d = results.difference(slider.against.value, slider.against.value.replace(f"C{IMAGE}", f"E{EVIL}"), "EvidenceRecall@20t")
    row = slider.state["rows"][0]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == (d.difference, d.low, d.high)
    slider.chunker.value = slider.chunker.options[1][1]
    assert slider.against.value == f"large | C{IMAGE}"


def test_locked_cases_get_a_reason_instead_of_a_slider(place, store):
    locked = hostile_bench(place / "locked", split="locked")
    opened = experiment(locked, {"A": "bm25", "C": "0.7*dense + 0.3*bm25"}, split="locked").run(place / "locked-runs", store=store)
    slider = FusionSlider(opened)
    assert "would tune on locked cases" in slider.state["message"] and not hasattr(slider, "weight")
    assert "rb-message" in slider.children[1].value and Workbench(opened).state["fusion"] == slider.state


def test_one_source_alone_has_nothing_to_weigh(place, bench, store):
    assert "bm25 only" in FusionSlider(experiment(bench, {"A": "bm25"}).run(place / "one", store=store)).state["message"]


def test_every_panel_is_escaped_in_both_languages(results):
    for lang in ("en", "zh"):
        board, slider, cases = LeaderboardView(results, lang), FusionSlider(results, lang), CaseView(results, lang)
        for measure in ("Recall@3", "nDCG@10"):
            board.measure.value = measure
            assert harmless(board.table.value) and "&lt;img" in board.table.value
        for w in (0, 0.35, 1):
            slider.weight.value = w
            assert harmless(slider.table.value)
        for _, query_id in cases.case.options:
            cases.case.value = query_id
            assert harmless(cases.page.value) and "&lt;script&gt;window.pwned=1&lt;/script&gt;" in cases.page.value
        json.dumps([board.state, slider.state, cases.state], allow_nan=False)


def test_cases_are_filtered_and_their_evidence_marked(results):
    view = CaseView(results)
    assert view.state["listed"] == len(FACTS)
    view.type.value, view.risk.value = "paraphrase", "P0"
    wanted = {f"q{i:02}{IMAGE}" for i in range(len(FACTS)) if i % 3 == 0}
    assert {q for _, q in view.case.options} == wanted
    view.type.value = view.risk.value = ""
    view.bad.value = True
    low = results.values("EvidenceRecall@20t")[view.a.value]
    assert {q for _, q in view.case.options} == set(low[low < 1].index)
    view.bad.value = False
    view.a.value, view.case.value = "small | A", f"q05{IMAGE}"
    marks = "".join(re.findall(r"<mark[^>]*>(.*?)<sup>", view.page.value))
    assert "help line answers" in marks and 'class="badge' in view.page.value
    view.risk.value, view.type.value = "P1", "paraphrase"
    assert view.state["query_id"] is None and "No case fits" in view.page.value


def test_a_bench_that_changed_is_named(results, place):
    moved = Results.open(shutil.copytree(results.folder, place / "moved"))
    moved.manifest["bench"]["bench_sha256"] = "0"
    assert "has changed since this run" in CaseView(moved).state["message"]
    assert "has changed since this run" in FusionSlider(moved).state["message"]
    assert Workbench(moved).state["leaderboard"]["rows"]


def test_a_workbench_finds_its_run(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAGBENCH_RUN", raising=False)
    assert "ragbench demo" in Workbench("").state["message"] and "ragbench demo" in Workbench("", "zh").children[1].value
    with pytest.raises(BadInput, match="no run folder"): Workbench("runs/none")
    shutil.copytree(results.folder, tmp_path / "runs" / "old")
    shutil.copytree(results.folder, tmp_path / "runs" / "new")
    os.utime(tmp_path / "runs" / "old" / "manifest.json", (1, 1))
    assert find_run("") == Path("runs/new") and find_run("old") == Path("runs/old") and find_run("runs/old") == Path("runs/old")
    monkeypatch.setenv("RAGBENCH_RUN", "runs/old")
    assert find_run("") == Path("runs/old")
    bench = Workbench("runs/new")
    assert bench.state["run"] == results.manifest["run_id"] and bench.state["tab"] == "leaderboard"
    assert "application/vnd.jupyter.widget-view+json" in bench._repr_mimebundle_()


def test_lab_places_the_notebook_once_and_hands_over_the_run(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(cli.os, "execve", lambda *call: calls.append(call))
    for words in (["lab", str(results.folder), "--port", "8899", "--no-browser"], ["lab"]):
        with pytest.raises(SystemExit) as done: cli.main(words)
        assert done.value.code == 0
        if words != ["lab"]: assert "rb.Workbench(run)" in (tmp_path / "workbench.ipynb").read_text()
        (tmp_path / "workbench.ipynb").write_text("mine")
    assert (tmp_path / "workbench.ipynb").read_text() == "mine"
    (path, command, env), (_, plain, _) = calls
    assert path == sys.executable and env["RAGBENCH_RUN"] == str(results.folder.resolve()) and "--no-browser" in command and "--ServerApp.port=8899" in command
    assert {"--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly"} <= set(plain)
    with pytest.raises(SystemExit) as done: cli.main(["lab", "no-such-run"])
    assert done.value.code == 2 and len(calls) == 2


# -- in JupyterLab

TOKEN = "lab-test"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
READY = ("(() => { const w = window.jupyterapp?.shell.currentWidget; const k = w?.sessionContext?.session?.kernel;"
         " return w?.context?.isReady && k?.connectionStatus === 'connected' && k?.status === 'idle'; })()")


@pytest.fixture(scope="module")
def server(results, place):
    "`ragbench lab` in a folder of its own; yields its port."
    if CHROMIUM is None: pytest.skip("no chromium on this machine")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install ragbench[test])")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own = {name: str(place / "jupyter" / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")}
    for folder in own.values(): Path(folder).mkdir(parents=True, exist_ok=True)
    # `allow_root` for containers; the test reaches JupyterLab's own object to see when its kernel is ready
    config = {"ServerApp": {"ip": "127.0.0.1", "allow_root": True, "terminals_enabled": False}, "LabApp": {"expose_app_in_browser": True}}
    (Path(own["JUPYTER_CONFIG_DIR"]) / "jupyter_server_config.json").write_text(json.dumps(config))
    log = (place / "server.log").open("w")
    process = subprocess.Popen([str(Path(sys.executable).with_name("ragbench")), "lab", f"runs/{results.folder.name}", "--no-browser", "--port", str(port)], cwd=place / "work",
                               env={**os.environ, **own, "JUPYTER_TOKEN": TOKEN}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", process)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try: process.wait(20)
        except subprocess.TimeoutExpired: os.killpg(process.pid, signal.SIGKILL)
        log.close()


def _wait_for(url: str, process: subprocess.Popen, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError: time.sleep(0.3)
    raise AssertionError("the server did not answer")


@pytest.fixture
def lab(server):
    "The workbench, all cells run: page, requests that left the machine (refused), console errors."
    from playwright.sync_api import sync_playwright
    outside, errors = [], []
    home = f"http://127.0.0.1:{server}"

    def route(handler):
        if handler.request.url.startswith((home, "data:", "blob:")): handler.continue_()
        else:
            outside.append(handler.request.url)
            handler.abort()

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1400, "height": 1500})
        context.route("**/*", route)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("websocket", lambda w: None if w.url.startswith(f"ws://127.0.0.1:{server}") else outside.append(w.url))
        page.goto(f"{home}/lab/tree/workbench.ipynb?reset&token={TOKEN}")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.wait_for_function(READY)
        assert page.locator(".jp-Dialog").count() == 0
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_selector(".rb-leaderboard table")
        yield page, outside, errors
        browser.close()


def _tab(page, name: str) -> None:
    page.locator(".lm-TabBar-tab", has_text=name).filter(visible=True).last.click()


def _table(page, kind: str) -> list[list[str]]:
    return page.locator(f".{kind} tbody tr").evaluate_all("rows => rows.map(r => [...r.children].map(c => c.innerText))")


def _drag(page, slider, share: float) -> None:
    handle, track = slider.locator(".noUi-handle").bounding_box(), slider.locator(".noUi-target").bounding_box()
    y = handle["y"] + handle["height"] / 2
    page.mouse.move(handle["x"] + handle["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * share, y, steps=10)
    page.mouse.up()


@pytest.mark.browser
def test_workbench_in_jupyterlab(lab, results, place, bench, store):
    page, outside, errors = lab
    # the leaderboard shows every configuration, its hostile name as text
    rows = {r[0]: r for r in _table(page, "rb-leaderboard")}
    assert set(rows) == set(results.configs)
    for config in results.configs:
        name, mean, interval, n, clusters = shown_rows(results, config, [results.primary])[0]
        assert rows[config][2:6] == [mean, interval, n, clusters], config
    # a mouse drags the weight, the numbers follow and equal those of a run at that weight
    _tab(page, "Fusion weight")
    slider = page.locator(".widget-slider").filter(has_text="Weight of dense")
    slider.wait_for()
    before = _table(page, "rb-fusion")
    _drag(page, slider, 0.1)
    lead = page.locator(".rb-fusion .lead")
    page.wait_for_function("() => { const t = document.querySelector('.rb-fusion .lead').innerText, r = [...document.querySelectorAll('.widget-readout')].map(e => e.innerText.trim());"
                           " return !t.startsWith('0.7*dense') && r.some(x => t.startsWith(parseFloat(x) + '*dense') || (x === '0.00' && t.startsWith('bm25'))); }")
    retriever = lead.inner_text().split(" at k")[0]
    assert re.fullmatch(r"0\.\d+\*dense \+ 0\.\d+\*bm25", retriever) and not retriever.startswith("0.7*")
    after = _table(page, "rb-fusion")
    again = experiment(bench, {"X": retriever}).run(place / "again", store=store)
    assert [tuple(r[:5]) for r in after] == shown_rows(again, again.configs[0], [r[0] for r in after])
    assert [r[1:5] for r in after] != [r[1:5] for r in before], "this drag should change a number"
    # and the keyboard moves it by one step
    slider.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"document.querySelector('.rb-fusion .lead').innerText.split(' at k')[0] !== {json.dumps(retriever)}")
    stepped = float(lead.inner_text().split("*")[0])
    assert stepped == pytest.approx(float(retriever.split("*")[0]) + 0.05)
    # a case is opened, its evidence marked with the gold text
    _tab(page, "Cases")
    page.get_by_label("Configuration A").select_option(label=results.configs[0])
    chosen = page.get_by_label("Case", exact=True)
    option = next(t for t in chosen.locator("option").all_inner_texts() if "q05" in t)
    assert IMAGE in option.replace("\u00a0", " ")
    chosen.select_option(label=option)
    page.wait_for_selector(".rb-case mark")
    page.wait_for_function("document.querySelector('.rb-case h3').innerText.includes('phone the help line')")
    marks = page.locator(".rb-case mark").evaluate_all("ms => ms.map(m => [...m.childNodes].filter(n => n.nodeName !== 'SUP').map(n => n.textContent).join(''))")
    assert marks and all(m.strip() and m in FACTS[5][0] for m in marks) and any("help line" in m for m in marks)
    assert EVIL in page.locator(".rb-case").inner_text() and page.locator(".rb-case .badge").count() >= 2
    # readable in the dark theme too
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    assert _brightness(page, ".rb-case mark", "color") > 180 and _brightness(page, ".jp-Notebook", "backgroundColor") < 60
    # nothing ran, nothing left the machine, nothing complained
    assert page.evaluate("typeof window.pwned") == "undefined"
    assert page.locator(".rb script, .rb img, .rb [onerror]").count() == 0
    assert page.locator(".Toastify__toast").count() == 0  # nobody is asked about news or updates
    assert outside == [] and errors == []


def _brightness(page, selector: str, what: str) -> float:
    return page.evaluate(f"() => {{ const c = getComputedStyle(document.querySelector({json.dumps(selector)})).{what}.match(/[\\d.]+/g).map(Number); return (c[0] + c[1] + c[2]) / 3; }}")
