"""The HTML of a run's report: no scripts, nothing loaded, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import attrs

from fppo.report import timeline
from fppo.report.charts import COLORS, Panel, columns_of, short, svg
from fppo.report.timeline import Bar

MAX_TOKENS = 1500  # shown of a sample


@attrs.frozen
class Tile:
    """A number with a caption and a note."""

    caption: str
    value: str
    note: str


@attrs.frozen(kw_only=True)
class Page:
    """The contents of the report."""

    title: str
    lost: Sequence[str]  # messages on steps without metrics
    tiles: Sequence[Tile]
    panels: Sequence[Panel]
    truth: Sequence[tuple[Panel, Panel]]  # of responses: values and advantages, token by token
    stages: Mapping[str, float]  # seconds per step
    work: Sequence[Bar]  # of the last steps
    samples: Mapping[int, Sequence[Mapping[str, Any]]]  # by step
    extremes: Mapping[str, Sequence[Mapping[str, Any]]]  # the best and the worst samples of late steps, by heading
    chosen: Mapping[str, Any]  # settings that differ from the defaults
    rest: Mapping[str, Any]
    metrics: Mapping[str, tuple[float, float, float, float]]  # first, last, least, greatest


def render(page: Page) -> str:
    """The page as one HTML document."""
    style = resources.files("fppo.report").joinpath("report.css").read_text(encoding="utf-8")
    title = escape(page.title)
    lost = "".join(f"<p class=note>{escape(text)}</p>" for text in page.lost)
    parts = (_tiles, _curves, _truth, _samples, _settings, _stages, _timeline, _metrics)
    sections = [part(page) for part in parts]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{style}</style></head>\n<body><main>"
        f"<header><h1>{title}</h1>{lost}</header>\n" + "\n".join(s for s in sections if s) + "</main></body></html>\n"
    )


def _tiles(page: Page) -> str:
    markup = "".join(
        f"<div class=tile><div class=caption>{escape(t.caption)}</div><div class=big>{escape(t.value)}</div>"
        f"<div class=note>{escape(t.note)}</div></div>"
        for t in page.tiles
    )
    return f"<section class='tiles n{columns_of(len(page.tiles), (4, 5, 3, 2))}'>{markup}</section>"


def _curves(page: Page) -> str:
    markup = "".join(_figure(panel) for panel in page.panels)
    return f"<section><h2>Curves</h2>{_grid(markup, len(page.panels))}</section>" if markup else ""


def _grid(markup: str, count: int) -> str:
    """Charts in rows of several, where the window is wide enough."""
    return f"<div class='charts n{columns_of(count)}'>{markup}</div>"


def _figure(panel: Panel) -> str:
    last = next(iter(panel.lines.values()))[-1][1] if len(panel.lines) == 1 else None
    shown = "" if last is None else f"<b>{short(last)}</b>"
    keys = "".join(
        f"<span class='key c{i % len(COLORS)}'>{escape(name)} <b>{short(line[-1][1])}</b></span>"
        for i, (name, line) in enumerate(panel.lines.items())
        if len(panel.lines) > 1
    )
    legend = f"<div class=keys>{keys}</div>" if keys else ""
    head = f"<h3>{escape(panel.title)} {shown}</h3><p class=note>{escape(panel.note)}</p>{legend}"
    return f"<figure>{head}{svg(panel)}</figure>"


def _truth(page: Page) -> str:
    if not page.truth:
        return ""
    note = "Held-out responses of the last evaluation: the critic's value before each token, and the exact one."
    markup = "".join(_figure(panel) for pair in page.truth for panel in pair)
    head = f"<h2>Critic against exact values, by token</h2><p class=note>{note}</p>"
    return f"<section>{head}{_grid(markup, 2 * len(page.truth))}</section>"


# samples


@attrs.frozen
class ColourScale:
    """The numbers of the strongest token colours."""

    log_prob: float
    advantage: float
    value_low: float
    value_high: float


def _numbers(samples: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [x for s in samples for x in s.get(name) or [] if isinstance(x, int | float) and math.isfinite(x)]


def scale_of(samples: Sequence[Mapping[str, Any]]) -> ColourScale:
    """The colour scale of samples; the 2 % largest advantages are ignored, so that an outlier does not pale the
    rest."""
    sizes = sorted(abs(x) for x in _numbers(samples, "advantages"))
    values = _numbers(samples, "values")
    advantage = sizes[min(int(0.98 * len(sizes)), len(sizes) - 1)] if sizes else 1.0
    return ColourScale(5.0, advantage or 1.0, min(values, default=0.0), max(values, default=1.0))


def _samples(page: Page) -> str:
    shown = [sample for group in (*page.samples.values(), *page.extremes.values()) for sample in group]
    if not shown:
        return "<section><h2>Samples</h2><p class=note>This run wrote none.</p></section>"
    scale = scale_of(shown)
    has_values = bool(_numbers(shown, "values"))
    views = [
        ("lp", "log-prob", f"<i class='bar lp'></i> likely to unlikely (log-prob -{scale.log_prob:.0f} and below)"),
        ("ad", "advantage", f"<i class='bar ad'></i> -{short(scale.advantage)} to +{short(scale.advantage)}"),
    ]
    if has_values:
        low, high = short(scale.value_low), short(scale.value_high)
        views.append(("va", "value", f"<i class='bar va'></i> {low} to {high}"))
    views.append(("no", "plain", "the text alone"))
    inputs = "".join(
        f"<input type=radio name=view id=v-{css}{' checked' if css == 'ad' else ''}>" for css, _, _ in views
    )
    labels = "".join(f"<label for=v-{css}>{name}</label>" for css, name, _ in views)
    legends = "".join(f"<span class='legend l-{css}'>{legend}</span>" for css, _, legend in views)
    last = max(page.samples)
    named = [(f"Step {step}", step == last, group) for step, group in sorted(page.samples.items(), reverse=True)]
    groups = "".join(
        f"<details{' open' if is_open else ''}><summary>{escape(name)}</summary>"
        + "".join(_card(sample, scale) for sample in group)
        + "</details>"
        for name, is_open, group in [*((name, False, group) for name, group in page.extremes.items()), *named]
    )
    note = (
        "<p class=note>Point at a token, touch it, or go to it by the tab key for its numbers. Dotted tokens are not "
        "trained on.</p>"
    )
    switch = f"<div class=switch>Colour by {labels} {legends}</div>"
    return f"<section class=samples><h2>Samples</h2>{inputs}{switch}{note}{groups}</section>"


def _card(sample: Mapping[str, Any], scale: ColourScale) -> str:
    score = sample.get("score")
    named = sample.get("named_scores") or {}
    facts = [
        f"<b class=score>score {_number(score)}</b>",
        *(f"<span>{escape(str(name))} {_number(value)}</span>" for name, value in named.items()),
        f"<span>step {escape(str(sample.get('step', 'unknown')))}</span>",
        *(f"<span>{escape(str(sample[key]))}</span>" for key in ("source", "id") if sample.get(key) is not None),
    ]
    if sample.get("finish") == "length":
        facts.append("<span class=warn>cut off at the length limit</span>")
    truth = sample.get("ground_truth")
    expected = "" if truth is None else f"<div class=truth><h4>Expected</h4><pre>{escape(str(truth))}</pre></div>"
    return (
        f"<article><div class=facts>{''.join(facts)}</div>"
        f"<div class=prompt><h4>Prompt</h4>{_images(sample)}<pre>{escape(str(sample.get('prompt', '')))}</pre></div>"
        f"<div class=response><h4>Response</h4><pre>{_tokens(sample, scale)}</pre></div>{expected}</article>"
    )


def _images(sample: Mapping[str, Any]) -> str:
    """The images of a sample; the frames of a video (a list) side by side in one element."""
    shown = [_frames(item, n) for n, item in enumerate(sample.get("images") or (), start=1)]
    return f"<div class=images>{''.join(shown)}</div>" if any(shown) else ""


def _frames(item: Any, number: int) -> str:
    urls = item if isinstance(item, list) else [item]
    safe = [escape(url, quote=True) for url in urls if str(url).startswith("data:image/png;base64,")]
    if not isinstance(item, list):
        return "".join(f"<img src='{url}' alt='image {number}'>" for url in safe)
    frames = [f"<img src='{url}' alt='video {number}, frame {n}'>" for n, url in enumerate(safe, start=1)]
    return f"<span class=film>{''.join(frames)}</span>"


def _tokens(sample: Mapping[str, Any], scale: ColourScale) -> str:
    tokens = sample.get("tokens") or []
    if not tokens:
        return escape(str(sample.get("response", ""))) or "<span class=note>(empty)</span>"
    columns = [sample.get(name) or [None] * len(tokens) for name in ("log_probs", "advantages", "values")]
    cells = list(zip(tokens, *columns, strict=False))[:MAX_TOKENS]
    markup = "".join(_token(text, log_prob, advantage, value, scale) for text, log_prob, advantage, value in cells)
    more = f"<span class=note> … {len(tokens) - MAX_TOKENS} more tokens</span>" if len(tokens) > MAX_TOKENS else ""
    return markup + more


def _token(text: str, log_prob: float | None, advantage: float | None, value: float | None, scale: ColourScale) -> str:
    """A token as a span whose style holds the strengths of its three colours, from 0 to 1."""
    style, tip, css = [], [], ["t"]
    if log_prob is not None:
        style.append(f"--l:{_strength(-log_prob / scale.log_prob)}")
        tip.append(f"log-prob {log_prob:.3f}  (p = {math.exp(min(log_prob, 0.0)):.3g})")
    if advantage is not None:
        css.append("neg" if advantage < 0 else "pos")
        style.append(f"--a:{_strength(abs(advantage) / scale.advantage)}")
        tip.append(f"advantage {advantage:+.3f}")
    if value is not None:
        span = scale.value_high - scale.value_low
        style.append(f"--v:{_strength((value - scale.value_low) / span if span > 0 else 0.5)}")
        tip.append(f"value {value:.3f}")
    if log_prob is None and advantage is None:
        css.append("off")
        tip.append("not trained on")
    shown = escape(text).replace("\n", "<i>↵</i>\n") or "<i>·</i>"
    return (
        f'<span class="{" ".join(css)}" style="{";".join(style)}" tabindex="0" '
        f'data-t="{escape(chr(10).join(tip))}">{shown}</span>'
    )


def _strength(x: float) -> str:
    return f"{min(max(x, 0.0), 1.0):.2f}"


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "unknown"


# tables


def _settings(page: Page) -> str:
    if not page.chosen and not page.rest:
        return "<section><h2>Settings</h2><p class=note>This run wrote none.</p></section>"
    rest = f"<details><summary>{len(page.rest)} settings at their defaults</summary>{_pairs(page.rest)}</details>"
    return f"<section><h2>Settings</h2>{_pairs(page.chosen)}{rest if page.rest else ''}</section>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_value(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table class=pairs>{rows}</table>"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value) or "none"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _stages(page: Page) -> str:
    if not page.stages:
        return ""
    longest = max(page.stages.values()) or 1.0
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class=num>{seconds:.3f} s</td>"
        f"<td class=wide><div class=share style='width:{100 * seconds / longest:.1f}%'></div></td></tr>"
        for name, seconds in page.stages.items()
    )
    return f"<section><h2>Where a step's time goes</h2><table>{rows}</table></section>"


def _timeline(page: Page) -> str:
    if not page.work:
        return ""
    note = "Each bar is a stage, or a call to a rank of a pool. Point at one for its numbers."
    figure = f"<figure class=timeline>{timeline.svg(page.work)}</figure>"
    return f"<section><h2>Timeline of the last steps</h2><p class=note>{note}</p>{figure}</section>"


def _metrics(page: Page) -> str:
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>least</th><th>greatest</th></tr>"
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td>{''.join(f'<td class=num>{short(x)}</td>' for x in numbers)}</tr>"
        for name, numbers in page.metrics.items()
    )
    summary = f"<summary>All {len(page.metrics)} metrics</summary>"
    return f"<section><h2>Metrics</h2><details>{summary}<table>{head}{rows}</table></details></section>"
