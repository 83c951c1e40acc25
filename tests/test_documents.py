"""README and docs say what is there: the example runs, links lead somewhere, and every folder has its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_example_runs_as_it_says(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    done = run_python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "mine.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'masters'") == 2 and done.stdout.count("'bytes_sent'") == 2
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step10"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing


def test_every_folder_and_file_of_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*) \|$", text, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "src" / "onecopy").glob("*/*.py")}
    assert len(rows) > 10 and {folder for folder, _ in rows} <= folders
    for folder, files in rows:
        for file in re.findall(r"`([\w.]+)`", files):
            assert (ROOT / "src" / "onecopy" / folder / file).exists(), f"{folder}/{file}"


def test_make_commands_of_the_documents_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        assert set(re.findall(r"`?make ([a-z][\w-]*)`", document.read_text())) <= targets
