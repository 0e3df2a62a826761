"""What README.md says can be typed, can be typed."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_two_commands_and_their_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README and re.search(rf"^{target}:", makefile, re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_command_exists():
    from ragbench.faces.cli import app
    from typer.main import get_command
    command = get_command(app)
    for line in re.findall(r"^ragbench (.*?)(?:\s+#.*)?$", "\n".join(blocks("bash")), re.M):
        found, words = command, line.split()
        while words and hasattr(found, "commands"): found = found.commands[words.pop(0)]
        options = {name for p in found.params for name in p.opts}
        assert {w for w in words if w.startswith("-")} <= options, line


def test_files_it_points_to_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README): assert (ROOT / target).exists(), target


def test_public_names():
    import ragbench as rb
    assert len(rb.__all__) <= 30
    for name in rb.__all__: assert getattr(rb, name) is not None


def test_import_is_fast_and_light():
    code = "import sys, time; t = time.perf_counter(); import ragbench; s = time.perf_counter() - t; print(s, [m for m in ('pandas', 'numpy', 'altair', 'sklearn', 'scipy', 'dask') if m in sys.modules])"
    seconds, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip().split(" ", 1)
    assert heavy == "[]" and float(seconds) < 0.5


@pytest.mark.slow
def test_five_lines_of_python(tmp_path):
    code = blocks("python")[0]
    more = 'print(results.compare("fixed | A", "fixed | C")["sentence"][0]); print(results.explain("INT-009", config="fixed | C"))'
    done = subprocess.run([sys.executable, "-c", code + more], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "has the highest EvidenceRecall@800t" in done.stdout and "INT-009 under fixed | C" in done.stdout


def test_own_chunker(tmp_path):
    code = blocks("python")[1] + "import ragbench as rb; print([c.text for c in rb.chunk('abcdef', 'halves')])"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip() == "['abc', 'def']"
