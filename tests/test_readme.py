"""Programs and commands of the README and the documents run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from olla_fx.cli import main as cli

ROOT = Path(__file__).parents[1]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
PROGRAMS = [name for name, text in DOCUMENTS.items() if "```python" in text]
SPANS = "id,lower,upper,size\na,0,3,64\nb,2,5,64\n"
GRAPH = re.findall(r"```json\n(.*?)```", DOCUMENTS["docs/solvers.md"], re.DOTALL)[0]
COMMANDS = [
    line
    for text in DOCUMENTS.values()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("olla-fx ")
]


@pytest.mark.parametrize("document", PROGRAMS)
def test_python_blocks_run_one_after_the_other(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENTS[document], re.DOTALL)
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks:
        exec(compile(block, document, "exec"), names)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 3
    assert {"README.md", "docs/solvers.md"} <= set(PROGRAMS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graph.json").write_text(GRAPH, encoding="utf-8")
    (tmp_path / "spans.csv").write_text(SPANS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(command, comments=True)
    assert cli.main(arguments) == 0


def test_relative_links_lead_somewhere() -> None:
    for name, text in DOCUMENTS.items():
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"
