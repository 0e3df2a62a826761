"""What a cached result is kept under: a change of one thing makes exactly the stages that depend on it run again, wherever it was made."""
import sys
from dataclasses import replace

import pytest

from ragbench.core.model import Bench, Case, Document, Evidence
from ragbench.core.spec import REGISTRIES, load_plugins
from ragbench.engine.config import Matrix
from ragbench.engine.experiment import Experiment

TEXTS = ("Goods may be returned within seven days.", "Repairs take ten working days.", "The warranty lasts 24 months.", "Parcels leave on the same day.")
DOCUMENTS = tuple(Document(f"d{i}", text, family=f"f{i}") for i, text in enumerate(TEXTS))
CASES = tuple(Case(f"q{i}", text.split()[0] + "?", evidence=(Evidence(f"d{i}", 0, len(text), text),), split="tune") for i, text in enumerate(TEXTS))
BENCH = Bench("keys", DOCUMENTS, CASES)
MATRIX = {"retriever": {"A": "bm25", "C": "0.7*dense + 0.3*bm25", "D": "0.7*dense + 0.3*bm25 >> ltr(top_n=4)"}}
DEFAULTS = {"split": "tune", "measures": ["EvidenceRecall"], "cutoffs": [1], "budgets": [40]}
MEASURING = {"groups", "scores", "floors"}
LEARNING = {"fit", "rerank", "hits", "context", "scores", "probe"}


def stages(bench=BENCH, base=None, matrix=None, **design):
    experiment = Experiment(bench, Matrix(base or {}, **(matrix or MATRIX)), **{**DEFAULTS, **design})
    return {key: experiment.graph.stages[key].name for key in experiment.graph.stages}


def changed(before, after):
    return {name for key, name in after.items() if key not in before}


def other_case(**change): return replace(BENCH, cases=(replace(CASES[0], **change), *CASES[1:]))


EVERYTHING = {"chunk", "tokens", "embed", "search", "fuse", *MEASURING, *LEARNING}
CHANGES = {
    "nothing": ({}, set()),
    "rows in another order": ({"bench": replace(BENCH, documents=DOCUMENTS[::-1], cases=CASES[::-1])}, set()),
    "the text of a document": ({"bench": replace(BENCH, documents=(replace(DOCUMENTS[0], text=TEXTS[0] + " Really."), *DOCUMENTS[1:]))}, EVERYTHING),
    "the evidence of a case": ({"bench": other_case(evidence=(Evidence("d0", 0, 5, "Goods"),))}, MEASURING | LEARNING),
    "the question of a case": ({"bench": other_case(query="Return?")}, EVERYTHING - {"chunk", "tokens"}),
    "the seed": ({"seed": 8}, {"floors"} | LEARNING),
    "a budget": ({"budgets": [60]}, {"scores", "floors"}),
    "k": ({"base": {"k": 3}}, {"context"}),
    "the context": ({"base": {"context": "pack(max_tokens=20)"}}, {"context"}),
    "the depth": ({"base": {"depth": 2, "k": 2}}, {"search", "fuse", "context", "scores"} | LEARNING),
    "the name of the study": ({"name": "another"}, set())}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_reruns_what_depends_on_it(name):
    how, expected = CHANGES[name]
    assert changed(stages(), stages(**how)) == expected


HEAD = "from ragbench.core.spec import *\nfrom ragbench.core.model import Hit\nimport numpy as np\n"
ENCODER = "@encoder('mine')\nclass Mine:\n    dim, weights_hash = 2, 'w'\n    def encode(self, texts): return np.array([[1.0, 0.0]] * len(texts))  # VERSION\n"
FUSION = "from ragbench.pipeline.fuse import Plan\n@fusion('mine')\ndef mine(*sources: Call | Sum): return Plan({str(c): w for s in sources for w, c in s.terms}, 'rrf')  # VERSION\n"
CHUNKER = "@chunker('mine')\ndef mine(text): return [(0, len(text))]  # VERSION\n"
RETRIEVER = "@retriever('mine')\nclass Mine:\n    def index(self, chunks): pass\n    def search(self, query, depth): return []  # VERSION\n"
MEASURE = "@measure('mine')\ndef mine(case): return 0.5  # VERSION\n"
HELPED = "import own_helper\n@chunker('mine')\ndef mine(text): return own_helper.cut(text)\n"
AFTER_SEARCH = {"search", "fuse", "hits", "context", "scores", "probe"}
PLUGINS = {
    "encoder": (ENCODER, {"matrix": {"retriever": {"A": "bm25", "B": "dense"}}, "base": {"embedder": "mine"}}, {"embed", *AFTER_SEARCH}),
    "fusion": (FUSION, {"matrix": {"retriever": {"F": "mine(0.5*dense + 0.5*bm25)", "A": "bm25"}}}, AFTER_SEARCH - {"search"}),
    "chunker": (CHUNKER, {"matrix": {"chunker": ["mine", "fixed"]}}, {"chunk", "tokens", "groups", "floors", *AFTER_SEARCH}),
    "retriever": (RETRIEVER, {"matrix": {"retriever": {"A": "bm25", "M": "mine"}}}, AFTER_SEARCH),
    "measure": (MEASURE, {"measures": ["mine", "EvidenceRecall"]}, {"scores", "floors"}),
    "helper": (HELPED, {"matrix": {"chunker": ["mine", "fixed"]}}, {"chunk", "tokens", "groups", "floors", *AFTER_SEARCH})}


@pytest.fixture
def own_parts():
    yield
    for registry in REGISTRIES.values(): registry.entries.pop("mine", None)
    sys.modules.pop("own_helper", None)


@pytest.mark.parametrize("kind", PLUGINS)
def test_an_edited_plugin_reruns_what_depends_on_it(kind, tmp_path, own_parts, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    body, how, expected = PLUGINS[kind]
    file = tmp_path / "plug.py"
    seen, results = [], []
    for version in ("1", "1", "2"):
        file.write_text(HEAD + body.replace("VERSION", version))
        (tmp_path / "own_helper.py").write_text(f"def cut(text): return [(0, {version})]\n")
        load_plugins(["plug.py"], tmp_path)
        seen.append(stages(**how))
        if kind == "helper": results.append(sys.modules["own_helper"].cut(""))
    assert changed(seen[0], seen[1]) == set() and changed(seen[1], seen[2]) == expected
    assert results in ([], [[(0, 1)], [(0, 1)], [(0, 2)]]) and not list(tmp_path.rglob("*.pyc"))
