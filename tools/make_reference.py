"""Write docs/reference.md from the registries, records and verbs themselves; `--check` only compares."""
from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import typer

from ragbench.core.model import CASE_TYPES
from ragbench.core.settings import Settings
from ragbench.core.spec import REGISTRIES, Registry
from ragbench.engine.config import Config, Design
from ragbench.engine.files import KEYS
from ragbench.faces.cli import app
from ragbench.golden.formats import FORMATS
from ragbench.golden.records import CASE_FIELDS, CASE_NAMES, DOCUMENT_FIELDS, DOCUMENT_NAMES, EXPECTED_NAMES, RISK_NAMES, TYPE_NAMES
from ragbench.measures.names import ALIASES, FAMILIES
from ragbench.measures.projection import project

TARGET = Path(__file__).parents[1] / "docs" / "reference.md"
KINDS = {"chunker": "Chunkers", "retriever": "Retrievers", "fusion": "Fusions", "reranker": "Rerankers", "encoder": "Encoders", "context": "Context packers"}
KEY_WORDS = {
    "name": "name of the experiment and head of its run folders", "bench": "a bundled name, a bench folder, or {format, path, …}", "split": "tune, locked, challenge or all",
    "plugins": "Python files with parts of your own, relative to this file", "base": "what all configurations share: the fields of a configuration below",
    "matrix": "axes: a field of a configuration and its values, as a list or as a mapping of labels to values; the product is run", "cutoffs": "k of measures that stand without one",
    "budgets": "token budgets of measures that stand without one", "primary": "the measure that ranks; without it nothing is ranked", "measures": "names below, with or without a cut-off", "seed": "of everything that draws"}


POINT_AT, FOUND = (inspect.signature(project).parameters[name].default for name in ("point_at", "found"))
COUNTS = [
    "A value lies in [0, 1] unless it is undefined (–), which stays outside a mean and its n. `@5` counts hits, `@800t` tokens (cl100k_base).", "",
    "- A case needs all of its required *groups* of evidence (grade 2 or 3; evidence without a grade has 3); within a group any one *alternative* suffices, of which all spans are needed.",
    f"- A group is *found* in a union of hits when at least {FOUND:.0%} of the characters of each span are there; white space and invisible characters do not count. EvidenceRecall and Complete ask for that.",
    f"- A chunk is *relevant* when it holds at least {POINT_AT:.0%} of a span; Recall, Precision, Hit, MRR and nDCG ask for that, and are therefore more lenient at boundaries.",
    "- Evidence that is known only as a section or a document makes a chunk relevant when at least half of the chunk lies inside.",
    "- A group is *cut* when no single chunk holds it whole.",
    "- On plain judgements (TREC, BEIR, `rb.evaluate`) there are no groups: Recall, Precision, Hit, MRR, MAP, nDCG and bpref are trec_eval's."]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines] + [""]


def default(value: object) -> str:
    if value is None or value is MISSING or value is inspect.Parameter.empty: return ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def signature(name: str, params: tuple[inspect.Parameter, ...]) -> str:
    shown = [f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name if p.default is p.empty else f"{p.name}={p.default}" for p in params]
    return f"`{name}({', '.join(shown)})`" if shown else f"`{name}`"


def parts(kind: str, registry: Registry) -> list[str]:
    own = [registry.entries[n] for n in registry if not registry.entries[n].plugin]
    return [f"### {KINDS[kind]}", "", *table(["spec", "what it does"], [[signature(e.name, e.params), e.summary] for e in own])]


def experiment_keys() -> list[str]:
    known = {f.name: f.default for f in fields(Design)}
    rows = [[f"`{k}`", "required" if k in ("name", "bench", "matrix") else default(known.get(k)), KEY_WORDS[k]] for k in KEYS]
    about = dict(line.strip().split(" : ", 1) for line in (Config.__doc__ or "").splitlines() if " : " in line)
    return ["## Experiment file", "", *table(["key", "default", "meaning"], rows), "A configuration, as in `base:` and on the axes of `matrix:`", "",
            *table(["field", "default", "meaning"], [[f"`{f.name}`", default(f.default), about[f.name]] for f in fields(Config)]),
            "A weight may be swept: `retriever: {sweep: \"w*dense + (1-w)*bm25\", w: [0, 0.25, 0.5, 0.75, 1]}`.", ""]


def measures() -> list[str]:
    by_name: dict[str, list[str]] = {}
    for alias, name in ALIASES.items(): by_name.setdefault(name, []).append(alias)
    unit = {"k": "@5", "t": "@800t", "": "none"}
    rows = [[f"`{n}`", ", ".join(unit[u] for u in f.units), ", ".join(f"{k}={default(v)}" for k, v in f.params.items()), f.says, ", ".join(by_name.get(n, []))] for n, f in FAMILIES.items() if f.says]
    return ["## Measures", "", *COUNTS, "", *table(["name", "cut-off", "parameters", "definition", "also called"], rows)]


def formats() -> list[str]:
    rows = []
    for name, reader in FORMATS.items():
        options = [p for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]
        rows.append([f"`{name}`", ", ".join(f"{p.name}={p.default}" if p.default not in (p.empty, None) else p.name for p in options), (inspect.getdoc(reader) or "").split("\n")[0]])
    return ["### Formats", "", "In an experiment as `bench: {format: …, path: …}`; on the command line as `dataset import PATH --format …`.", "", *table(["format", "options", "what it reads"], rows)]


def columns(title: str, known: object, names: object) -> list[str]:
    spelt: dict[str, list[str]] = {}
    for given, name in names.items(): spelt.setdefault(name, []).append(given)
    return [f"### {title}", "", *table(["field", "read under these names too"], [[f"`{n}`", ", ".join(a.replace("_", " ") for a in spelt.get(n, []) if a.replace("_", "") != n.replace("_", ""))] for n in known])]


def values(field: str, names: object) -> list[str]:
    spelt: dict[str, list[str]] = {}
    for given, name in names.items(): spelt.setdefault(name, []).append(given)
    return [f"Values of `{field}`", "", *table(["value", "read for these words too"], [[f"`{n}`", ", ".join(a.replace("_", " ") for a in others if a.replace("_", "") != str(n).replace("_", "").casefold())] for n, others in spelt.items()])]


def verbs() -> list[str]:
    rows = []
    def walk(group: typer.core.TyperGroup, path: str) -> None:
        for name, command in sorted(group.commands.items()):
            if hasattr(command, "commands"): walk(command, f"{path}{name} ")
            else:
                words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if p.param_type_name == "argument"]
                options = [p.opts[0] for p in command.params if p.param_type_name == "option" and p.opts[0] != "--help"]
                rows.append([f"`{path}{name}{''.join(' ' + w for w in words)}`", " ".join(f"`{o}`" for o in options), (command.help or "").strip()])
    walk(typer.main.get_command(app), "ragbench ")
    return ["## Command line", "", "With `--json` standard output is one JSON document; notes and progress go to standard error. Exit codes: 0 done, 2 wrong usage or bad input, 4 incomplete.", "",
            *table(["verb", "options", "what it does"], rows)]


def settings() -> list[str]:
    rows = [[f"`{f.name}`", f"`RAGBENCH_{f.name.upper()}`", default(f.default)] for f in fields(Settings) if f.default is not MISSING]
    return ["## Settings", "", "From `settings.ini` in the working directory; an environment variable goes before it.", "", *table(["key", "environment", "default"], rows)]


def page() -> str:
    kinds: dict[str, list[str]] = {}
    for kind, group in CASE_TYPES.items(): kinds.setdefault(group, []).append(kind)
    lines = ["# Reference", "", "Made from the code by `tools/make_reference.py`; edit the code, not this page.", "", *experiment_keys(), "## Parts", "",
             "A retriever is sources with weights, then a reranker: `0.7*dense + 0.3*bm25 >> ltr(top_n=20)`. Names and values may be left out where a default stands.", "",
             *(line for kind, registry in REGISTRIES.items() if kind in KINDS for line in parts(kind, registry)), *measures(), "## Bench", "",
             *formats(),
             *columns("Cases, or columns of a spreadsheet of questions", CASE_FIELDS, CASE_NAMES), *columns("Documents, or columns of documents.csv", DOCUMENT_FIELDS, DOCUMENT_NAMES),
             "### Case types", "", *table(["group", "types"], [[group, ", ".join(own)] for group, own in kinds.items()]),
             *values("type", TYPE_NAMES), *values("risk", RISK_NAMES), *values("expected", EXPECTED_NAMES), *verbs(), *settings()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    made = page()
    if sys.argv[1:] == ["--check"]:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != made: sys.exit("docs/reference.md differs from the code: run python tools/make_reference.py")
    else: TARGET.write_text(made, encoding="utf-8")
