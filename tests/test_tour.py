"""What the README names exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PATHS = sorted(
    set(re.findall(r"\b(?:spmdlab|configs|tests|benchmarks|requirements)/[\w/.]+\w", README))
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path):
    assert (ROOT / path).exists()


def test_the_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z]+)", README))
    assert {"compare", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tour_has_the_files_it_promises():
    tour = README.split("## The tour")[1].split("## To add")[0]
    assert len(re.findall(r"^\| `", tour, re.MULTILINE)) >= 7


def test_the_first_screen_has_both_commands_and_real_output():
    screen = "\n".join(README.splitlines()[:50])
    assert "make compare" in screen
    assert "make test" in screen
    assert "v5e:2x4" in screen
    assert "replayed" in screen
    assert "mermaid" in README
    assert "REAL OUTPUT" not in README
