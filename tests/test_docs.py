"""What the documentation says to type exists: commands, options, recipes, pages of the site."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import COMMANDS
from paceline.cli.parameters import parameters_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
# Options that every command has.
COMMON = {"--json", "--debug", "--help", "--version"}


def _commands(page):
    """Command lines of a page's code blocks and inline code, continued lines joined."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    |\$ )(paceline [a-zA-Z].*)$", text, flags=re.M)
    return lines + re.findall(r"`(paceline [a-zA-Z][^`]*)`", text)


def _options(command):
    names = set(COMMON)
    for parameter in parameters_of(command.model):
        names.add(parameter.option)
        if parameter.kind == "flag":
            names.add("--no-" + parameter.option.removeprefix("--"))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_and_option_exists(page):
    known = {command.name: command for command in COMMANDS}
    for line in _commands(page):
        words = shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", line.partition("#")[0]))
        command = known.get(words[1])
        assert command is not None or words[1].isupper(), line
        given = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
        if command is not None:
            assert given <= _options(command), line


def test_there_are_commands_to_check():
    assert sum(len(_commands(page)) for page in PAGES) > 40


def test_every_page_is_in_the_site_s_navigation():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [p for value in entry.values() for e in _listed(value) for p in pages(e)]

    listed = [page for entry in settings["nav"] for page in pages(entry)]
    assert sorted(listed) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def _listed(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            found = (page.parent / target).resolve()
            assert found.exists(), target
            # The site holds nothing else.
            assert page.parent == ROOT or found.is_relative_to(page.parent), target
