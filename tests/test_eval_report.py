"""The HTML report: what it shows, that it opens offline, and that nothing a model wrote becomes markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from palestra.agents.evaluation.records import latest
from palestra.agents.evaluation.report import EPISODES, render_report, write_report
from palestra.agents.evaluation.report.charts import HEIGHT, WIDTH, histogram, pass_curve
from palestra.agents.evaluation.summary import summarise
from palestra.agents.evaluation.types import PlannedTask
from palestra.envs.types import Message, Reward
from tests.evals import header_of, row_of

HOSTILE = (
    "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)> {{ 7 * 7 }} "
    "{% include 'x' %} &lt;b&gt; javascript:alert(4) \u2028 \ud800 \x00"
)
CONVERSATION: tuple[Message, ...] = (
    {"role": HOSTILE, "content": HOSTILE},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": HOSTILE}],
        "reasoning_content": HOSTILE,
        "tool_calls": [{"id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}, {"function": None}, {}],
    },
    {"role": "tool", "content": None},
)


class Tags(HTMLParser):
    """Elements, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "circle", "rect", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def page() -> str:
    header = header_of(3, 4, args={HOSTILE: HOSTILE})
    tasks = tuple(PlannedTask(task.hash, HOSTILE, task.index) for task in header.tasks)
    rows = [
        row_of(
            f"t{i}",
            k,
            None if i + k == 5 else float(k > i),
            components={HOSTILE: 1.0},
            messages=CONVERSATION,
            answer=HOSTILE,
        )
        for i in range(3)
        for k in range(4)
    ]
    rows = [replace(row, task_id=HOSTILE, error=row.error and HOSTILE) for row in rows]
    rows[0] = replace(rows[0], reward=Reward(0.0, {HOSTILE: 0.0}, HOSTILE))
    changed = ({"at": "then", "differences": [HOSTILE]},)
    return render_report(
        replace(header, tasks=tasks, changes=changed, rescored_from=HOSTILE, provenance={HOSTILE: [HOSTILE]}),
        latest(rows),
    )


def test_hostile_text_stays_text(page: str) -> None:
    parsed = Tags(page)
    names = {name for name, _ in parsed.tags}
    assert not names & {"script", "img", "iframe", "link", "object", "form", "a", "b>"}
    for name, attributes in parsed.tags:
        assert not any(key.startswith("on") or key in ("href", "src", "xlink:href") for key in attributes), name
    assert parsed.open == [], "every element is closed: no text closed one of ours"
    text = "".join(parsed.text)
    assert "<script>alert(1)</script>" in text
    assert "{{ 7 * 7 }}" in text
    assert "49" not in text.split("{{ 7 * 7 }}")[0][-5:]


def test_it_opens_offline(page: str) -> None:
    assert "http://" not in page.replace(header_of().spec.base_url, "")
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_it_shows_the_table_the_charts_the_stops_and_the_episodes(page: str) -> None:
    parsed = Tags(page)
    text = "".join(parsed.text)
    for word in ("reward", "pass@4", "pass^2", "Why episodes ended", "standard error", "infra", "answer of the task"):
        assert word in text, word
    assert sum(name == "svg" for name, _ in parsed.tags) == 2
    assert sum(name == "details" for name, _ in parsed.tags) == 12
    assert text.index("1 episodes have no reward") < text.index("Figures")


def test_episodes_and_messages_are_capped_and_the_worst_come_first(tmp_path: Path) -> None:
    header = header_of(EPISODES + 20, 1)
    long = ({"role": "assistant", "content": "word " * 10_000},)
    rows = latest([row_of(f"t{i}", 0, i / 200, messages=long) for i in range(EPISODES + 20)])
    write_report(tmp_path / "new" / "r.html", header, rows)
    page = (tmp_path / "new" / "r.html").read_text(encoding="utf-8")
    parsed = Tags(page)
    assert sum(name == "details" for name, _ in parsed.tags) == EPISODES
    assert "20 more episodes are in the folder" in page
    assert "46000 more characters" in page
    assert page.index("id t0 #0") < page.index("id t1 #0") < page.index("id t50 #0")
    assert len(page) < 1_000_000


def test_a_report_of_nothing_is_a_page() -> None:
    parsed = Tags(render_report(header_of(), {}))
    assert "6 of 6 episodes were not played yet" in "".join(parsed.text)
    assert all(name != "svg" for name, _ in parsed.tags)


def test_charts_stay_within_their_frame() -> None:
    header = header_of(4, 8)
    rows = latest([row_of(f"t{i}", k, float((i * k) % 3 == 0)) for i in range(4) for k in range(8)])
    curve = pass_curve(summarise(header, rows).passes)
    assert curve is not None
    assert [dot.label for dot in curve.dots] == ["k=1", "k=2", "k=4", "k=8"]
    ys = [dot.y for dot in curve.dots]
    assert ys == sorted(ys, reverse=True), "pass@k rises"
    assert all(0 <= y <= HEIGHT for dot in curve.dots for y in (dot.y, dot.low, dot.high))
    bars = histogram([-1.0, 0.0, 0.5, 1.0, 2.0])
    assert bars is not None
    assert sum(bar.count for bar in bars.bars) == 5
    assert (bars.bars[0].label, bars.last, bars.bars[-1].count) == ("-1", "2", 1)
    assert all(0 <= bar.x <= WIDTH and 0 <= bar.y <= HEIGHT for bar in bars.bars)
    assert histogram([]) is None
    assert pass_curve(summarise(header_of(2, 1), {}).passes) is None
