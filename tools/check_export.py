"""Exit 0 when every module of ragbench/ is exactly what the notebooks export and every notebook is clean.

Exports into a temporary copy that starts without any module, then compares both ways: a hand edit, a module that no notebook
exports and a notebook that was never exported all show. Hand-written modules are listed in `HAND_WRITTEN`.
"""
import os, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HAND_WRITTEN: set[str] = set()


def modules(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted((root / "ragbench").rglob("*.py"))
            if "_bundled" not in p.parts and p.relative_to(root).as_posix() not in HAND_WRITTEN}


def notebooks(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for d in ("nbs", "experiments") for p in sorted((root / d).rglob("*.ipynb"))
            if ".ipynb_checkpoints" not in p.parts and "examples" not in p.parts}


def run(command: list[str], folder: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode: sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def main() -> int:
    bin_dir = Path(sys.executable).parent
    faults = []
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for file in ("pyproject.toml", "README.md"): shutil.copy2(ROOT / file, copy / file)
        for folder in ("nbs", "experiments"): shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        (copy / "ragbench").mkdir()
        for p in (ROOT / "ragbench").rglob("__init__.py"):      # empty wing markers; the top one is exported
            if p.parent != ROOT / "ragbench" and not p.read_bytes().strip():
                target = copy / p.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(p.read_bytes())
        (copy / "ragbench" / "__init__.py").write_text('__version__ = "0"\n')
        run([str(bin_dir / "nbdev-export")], copy)
        here, made = modules(ROOT), modules(copy)
        for path in sorted(here.keys() | made.keys()):
            if path not in made: faults.append(f"{path}: no notebook exports it")
            elif path not in here: faults.append(f"{path}: missing, run nbdev-export")
            elif here[path] != made[path]: faults.append(f"{path}: differs from its notebook, run nbdev-export")
        before = notebooks(copy)
        for folder in ("nbs", "experiments"): run([str(bin_dir / "nbdev-clean"), "--fname", folder], copy)
        faults += [f"{path}: not clean, run nbdev-clean" for path, data in notebooks(copy).items() if before[path] != data]
    print("\n".join(faults) or "in sync")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
