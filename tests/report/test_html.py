import html.parser
import re

import pytest

from spmdlab.report.html import comparison_page

VOID = {"meta", "link", "br", "img", "hr"}


class Checker(html.parser.HTMLParser):
    """Finds tags that are not closed and addresses outside the page."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & dict(attrs).keys(), f"<{tag}> needs another file"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(rows):
    config = {"model": {"embed_dim": 64}, "note": "</script><b>"}
    found = {"spmdlab": "0", "jax": "1", "libtpu": None, "config": config, "rows": rows}
    return comparison_page(found)


def test_is_whole_and_needs_nothing_else(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "url(" not in page
    assert "http" not in page


def test_names_and_logs_are_text_and_not_markup(page):
    assert "<b>" not in page
    assert "&lt;b&gt;oom" in page


def test_bars_compare_the_steps_of_a_target(page):
    """12.3 ms of the longest 20 ms, a quarter of each step exposed."""
    widths = re.findall(r'class="(compute|exposed)" style="width:([\d.]+)%', page)
    assert [kind for kind, _ in widths[:4]] == ["compute", "exposed"] * 2
    fastest, slowest = ([float(width) for _, width in widths[n : n + 2]] for n in (0, 2))
    assert slowest == [75.0, 25.0]
    assert fastest == pytest.approx([75 * 12.3 / 20, 25 * 12.3 / 20], abs=0.01)


def test_each_row_shows_its_reason_or_its_collectives(page):
    assert page.count("dim &#39;heads&#39; of size 6 does not divide 4 ways") == 1
    assert page.count("needs 20.0 GiB of 15.8 GiB") == 1
    assert page.count("params.layers.mlp.gate") == 2
    assert page.count(">spmdlab/models/mlp.py:24<") == 2
