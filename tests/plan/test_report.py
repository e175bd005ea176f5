"""The HTML report: self-contained, well-formed, with the redrawn figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from serai.plan import Cluster, Layout, Model, predict, search
from serai.plan.figures import announced_comparison, headline_model, scaling_figure, size_figure
from serai.plan.report import budget, render


def _svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, flags=re.S)]


def test_figures_show_prediction_interval_and_published_points() -> None:
    sizes = _svgs(size_figure())[0]
    marks = list(sizes.iter("circle"))
    assert sum("c1" in (m.get("class") or "") for m in marks) == 4
    assert sum("c2" in (m.get("class") or "") for m in marks) == 4
    assert len(list(sizes.iter("polygon"))) == 1
    scale = _svgs(scaling_figure())[0]
    assert sum("c2" in (m.get("class") or "") for m in scale.iter("circle")) == 4
    for svg in (sizes, scale):
        for mark in svg.iter("circle"):
            assert 0 <= float(mark.get("cx") or -1) <= 640
            assert 0 <= float(mark.get("cy") or -1) <= 360


def test_the_announced_comparison_adds_up() -> None:
    both = announced_comparison()
    assert both.large.model.params / both.small.model.params > 1.9
    assert both.large.cluster.gpus == 2 * both.small.cluster.gpus
    assert both.large.tflops("hardware") > 1.5 * both.small.tflops("hardware")
    assert sum(share for share, _ in both.shares.values()) > 0.98
    assert headline_model(2000).params > 2.0e12


def test_the_page_is_self_contained() -> None:
    model, cluster = (
        Model("llama", 32, 4096, 32, 8, 14336, 128256, name="a <b> & c"),
        Cluster.named("dgx-h100", 2),
    )
    found = search(model, cluster, seq_len=4096, global_batch=256)
    page = render(found.best[0], found=found, tokens=1e12)
    assert not re.search(r"(?:src|href)\s*=", page)
    assert "<b>" not in page
    assert "a &lt;b&gt; &amp; c" in page

    class Counter(HTMLParser):
        depth = 0

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.depth += tag != "meta"

        def handle_endtag(self, tag: str) -> None:
            self.depth -= 1

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag in ("line", "circle", "polygon", "polyline")

    counter = Counter()
    counter.feed(page)
    assert counter.depth == 0
    assert len(_svgs(page)) >= 4
    for term in found.best[0].time_terms():
        assert found.best[0].time_terms()[term] == 0 or term in page


def test_budget_is_consistent() -> None:
    p = predict(Model("gpt", 24, 2048, 16), Cluster.named("dgx-a100", 4), Layout(zero=1, micro_batch=4))
    b = budget(p, tokens=1e10)
    parts = b["goodput_parts"]
    assert abs(b["goodput"] + parts["saving"] + parts["lost"] + parts["recovering"] - 1) < 1e-9
    assert b["seconds"] * b["goodput"] * p.tokens_per_s - 1e10 < 1
    assert b["save_interval_s"] >= b["save_durable_s"]
