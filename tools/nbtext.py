"""Edit notebooks as text.

    python tools/nbtext.py text nbs/core/01_text.ipynb > text.py      # notebook -> `# %%` text
    python tools/nbtext.py write text.py nbs/core/01_text.ipynb       # text -> clean notebook, exported module

Cell ids come from the cells' text, so that the same text always gives the same file.
"""
import fcntl, hashlib, os, sys
from pathlib import Path


def read_text(path):
    import jupytext
    return jupytext.writes(jupytext.read(path), fmt={"extension": ".py", "format_name": "percent", "rst2md": False})


def write(text_path, nb_path):
    import jupytext, nbformat
    from nbdev.export import nb_export
    nb = jupytext.reads(Path(text_path).read_text(encoding="utf-8"), fmt="py:percent")
    seen = {}
    for cell in nb.cells:
        key = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[key] = seen.get(key, 0) + 1
        cell["id"] = key if seen[key] == 1 else f"{key}-{seen[key]}"
        cell["metadata"] = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
    nb.metadata = nbformat.from_dict({"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    nb.nbformat, nb.nbformat_minor = 4, 5
    Path(nb_path).parent.mkdir(parents=True, exist_ok=True)
    from nbdev.clean import clean_nb
    from fastcore.nbio import dict2nb, write_nb
    clean = dict2nb(nbformat.from_dict(nb)); clean_nb(clean, allowed_cell_metadata_keys=["tags"])
    write_nb(clean, nb_path)
    if "#| default_exp" not in Path(text_path).read_text(encoding="utf-8"): return
    os.environ.pop("IN_TEST", None)
    with open(Path(__file__).resolve().parents[1] / ".git" / "nbtext.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nb_export(str(nb_path))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "text": sys.stdout.write(read_text(sys.argv[2]))
    elif len(sys.argv) == 4 and sys.argv[1] == "write": write(sys.argv[2], sys.argv[3])
    else: sys.exit(__doc__)
