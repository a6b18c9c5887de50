"""Every command and example of README.md and docs/ runs, here or in .ci/run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from dsgdac_accel import GossipConfig, __version__
from dsgdac_accel.cli import build_parser
from dsgdac_accel.topology import TOPOLOGIES
from tasks.benchmarks.config import BenchmarkConfig
from tasks.common.config import parse_config
from tasks.images.config import CifarConfig
from tasks.language.config import LanguageConfig
from tasks.studies.config import load_sweep
from tasks.studies.plan import planned_runs
from tasks.translation.config import TranslationConfig

CONFIG_CLASSES = {
    "tasks/cifar.py": CifarConfig,
    "tasks/trainer_language.py": LanguageConfig,
    "tasks/wmt14.py": TranslationConfig,
    "tasks/benchmark.py": BenchmarkConfig,
}
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<marker>[^\n]*) -->\n)?```bash\n(?P<commands>.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(found["marker"], found["commands"].strip(), id=f"{page.stem}-{number}")
    for page in PAGES
    for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_examples_run(page, capsys, monkeypatch):
    """The blocks of a page run one after the other, and print what the page shows as their output."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page.name, "exec"), {})
    printed = capsys.readouterr().out
    for shown in re.findall(r"```python\n.*?```\n\n```text\n(.*?)```", text, re.DOTALL):
        assert shown in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:configs|tasks|dsgdac_accel|docs)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_the_readme_is_short_and_names_every_page():
    readme = PAGES[0].read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 200
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in readme


def test_all_settings_and_topologies_are_in_the_tables():
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(GossipConfig):
        default = str(field.default) if not isinstance(field.default, str) else f'"{field.default}"'
        assert f"| `{field.name}` | {default} |" in page
    for name in TOPOLOGIES:
        assert f"| `{name}` " in page


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(("marker", "commands"), BLOCKS)
def test_every_command_is_run_or_parsed(marker, commands):
    """`ci: NAME` runs in .ci/run; `parsed` needs hardware, data or time, so its words are parsed here instead."""
    if marker is not None and marker.startswith("ci: "):
        assert f'documented "{marker.removeprefix("ci: ")}"' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
        return
    assert marker == "parsed", f"mark this block as <!-- ci: NAME --> or <!-- parsed -->: {commands}"
    for command in commands.replace(" && ", "\n").splitlines():
        words = shlex.split(command, comments=True)
        if words[0] == "dsgdac":
            assert build_parser()[0].parse_args(words[1:]).run
            assert planned_runs(load_sweep(ROOT / words[2]), ROOT)
            continue
        number = next(number for number, word in enumerate(words) if word.startswith("tasks/"))
        config_class = CONFIG_CLASSES[words[number]]
        parse_config(config_class, words[number + 1 :])
