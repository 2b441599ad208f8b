"""A result as one HTML page: no network, no other file, and no script for whoever reads only its tables.

What comes from a user's files is text here and never markup: Python escapes it, the script sets it by ``textContent``, and a
policy in the page lets no script run but its own.
"""

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradflow import verdicts
from gradflow.auditing import columns as audit_columns
from gradflow.auditing.result import Audit, C
from gradflow.factors import CURVES, ENDS, FACTORS, Profile, plain
from gradflow.files import new_file, whole
from gradflow.plots import FACTOR_COLOURS, STYLE
from gradflow.report import number

ITEMS_SHOWN = 12  # of a setting that is a list
_MARKERS = {"affine": "D", "projection": "v", "norm": "s", "skip": "x", "branch": "^", "net": "o"}
_GREY = "#808080"
_FIGURES = {
    "stream_rms": ("stream", "rms of x as it enters"),
    "branch_rms": ("f", "rms of the branch as it is added"),
    "stream_cosine": ("cos(x, u)", "cosine of x with u = αx + βf, mean over tokens"),
    "alignment": ("align", "cosine of the arriving gradient with û"),
    "affine": ("affine", "‖γ⊙g‖/‖g‖, the norm's gain"),
    "projection": ("projection", "what the norm's projection leaves; the argument's 1 − c"),
    "norm": ("norm", "what 1/‖u‖ leaves"),
    "skip": ("skip", "|α|"),
    "branch": ("branch", "‖(αI + βF)ᵀv‖/(|α|‖v‖), what the argument leaves out"),
    "net": ("net", "the sub-layer's gain, the product of its factors"),
    "exact": ("exact", "gain of the true gradient, from the output back to the sub-layer's input"),
    "trunk": ("trunk", "the same with F = 0"),
    "local": ("local", "product of affine, projection, norm and skip along the true gradient"),
    "bound": ("bound", "the argument's ∏ (1/‖u‖)(1 − c)"),
}


def save(result: Audit | Profile, path: str | Path, command: str | None = None, law: Profile | None = None) -> None:
    """Write `page`; an older file is replaced whole or not at all.

    Raises
    ------
    ValueError
        If no file can stand at ``path``.
    """
    with whole(new_file("html", path, ".html")) as fresh, fresh.open("x", encoding="utf-8") as stream:
        stream.write(page(result, command, law))


def page(result: Audit | Profile, command: str | None = None, law: Profile | None = None) -> str:
    """Render an audit or a profile as one self-contained HTML page; the same bytes from the same numbers.

    Parameters
    ----------
    result : Audit or Profile
        Figures are geometric means over its texts or networks.
    command : str, optional
        What made it, as it was typed.
    law : Profile, optional
        The law of the same stack, drawn beside it.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If ``law`` is of other sub-layers.
    """
    from gradflow import __version__

    p, beside = (result.profile, result.encoder) if isinstance(result, Audit) else (result, None)
    if law is not None and len(law.labels) != len(p.labels):
        raise ValueError(f"law: has {len(law.labels)} rows and the profile {len(p.labels)}; give the same stack's")
    if isinstance(result, Audit):
        title, verdict, settings = f"gradflow audit: {result.settings['model']}", result.verdict, _audited(result)
    else:
        what = p.settings.get("scheme", "profile")
        title, verdict, settings = f"gradflow profile: {what}", verdicts.profile(p, law), p.settings
    template, policy = _template()
    fields = {
        "policy": policy,
        "title": html.escape(title),
        "verdict": html.escape(verdict),
        "command": f"<pre><code>{html.escape(command)}</code></pre>" if command else "<p>Called from Python.</p>",
        "settings": "".join(
            f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in settings.items() if v is not None and v != []
        ),
        "over": html.escape(_over(result)),
        "band": "; the band holds 95 % of them" if len(p.net) > 1 else "",
        "gains": _gains(result, law),
        "factors": _factors(p, law) + ("" if beside is None else _encoder(beside)),
        "further": _further(result) if isinstance(result, Audit) else "",
        "glossary": "".join(f"<dt>{_text(_FIGURES[n][0])}</dt><dd>{_text(_FIGURES[n][1])}</dd>" for n in _present(p)),
        "version": __version__,
        "data": json.dumps(data(result, law), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda field: fields[field[1]], template)  # in one pass: no text is a template


def data(result: Audit | Profile, law: Profile | None = None) -> dict[str, Any]:
    """What the page's charts draw: natural logs, JSON-ready; what is undefined or 0 is ``None``."""
    p = result.profile if isinstance(result, Audit) else result
    factors, gains = [], []
    for name in (*FACTORS, "net"):
        logs, shown = _log(p.summary(name).mean), name in _present(p)
        factors.append(_series(name, FACTOR_COLOURS[name], _MARKERS[name], logs, shown=shown))
    for name in CURVES:
        logs, colour = getattr(p, f"log_{name}"), STYLE[name][0]
        band = np.quantile(logs, [0.025, 0.975], axis=0) if len(logs) > 1 else None
        gains.append(_series(name, colour, STYLE[name][1], logs.mean(0), band=band))
        if law is not None and name in ("exact", "trunk"):
            gains.append(_series(f"{name}, law", colour, "", getattr(law, f"log_{name}")[0]))
    if isinstance(result, Audit):
        gains.append(_series(f"(1 − {C:g})^(L − l)", _GREY, "", _estimate(p)))
        if result.apart is not None:
            alone = result.apart.profile
            gains.append(_series("exact, other tokens", STYLE["exact"][0], "x", alone.log_exact.mean(0)))
            gains.append(_series("trunk, other tokens", STYLE["trunk"][0], "x", alone.log_trunk.mean(0), shown=False))
    return {"labels": list(p.labels), "charts": {"factors": factors, "gains": gains}}


def _series(
    name: str, colour: str, marker: str, logs: np.ndarray, band: np.ndarray | None = None, shown: bool = True
) -> dict[str, Any]:
    """One line of a chart; without a marker it is dashed."""
    return {
        "name": name,
        "colour": colour,
        "marker": marker,
        "logs": plain(logs),
        "band": plain(band),
        "shown": shown and bool(np.isfinite(logs).any()),
    }


def _sublayers(p: Profile) -> int:
    """L; a final norm is a row of its own, and no sub-layer."""
    return sum(label not in ENDS for label in p.labels)


def _estimate(p: Profile) -> np.ndarray:
    """Log of (1 − c)^(L − l) at each row's input."""
    return np.maximum(_sublayers(p) - np.arange(len(p.labels) + 1), 0) * np.log1p(-C)


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(values)


def _audited(a: Audit) -> dict[str, Any]:
    """An audit's settings, with its folder and what vouches for it."""
    vouched = f"{a.parity.tested}: {a.parity.states} states, off by {a.parity.worst:.1e} of their rms at most"
    return {"model": None, "folder": a.path, "parity": vouched} | dict(a.settings)


def _over(result: Audit | Profile) -> str:
    """What a figure is the mean of."""
    each, p = ("text", result.profile) if isinstance(result, Audit) else ("network", result)
    if p.settings.get("batch") and p is result:
        each = "batch row"
    return f"Geometric mean over {len(p.net)} {each}s" if len(p.net) > 1 else f"Of one {each}"


def _present(p: Profile) -> list[str]:
    """The figures that this profile has, without gains and skips that are 1 everywhere."""
    found = {
        name: values for name in _FIGURES if (values := getattr(p, name)) is not None and np.isfinite(values).any()
    }
    return [name for name, values in found.items() if not (name in ("affine", "skip") and np.allclose(values, 1))]


def _gains(result: Audit | Profile, law: Profile | None) -> str:
    """End to end and per sub-layer: the four curves, and what they stand beside."""
    p = result.profile if isinstance(result, Audit) else result
    ends = {name: float(getattr(p, f"log_{name}")[:, 0].mean()) for name in CURVES}
    if law is not None:
        ends |= {f"{name}, law": float(getattr(law, f"log_{name}")[0, 0]) for name in ("exact", "trunk")}
    if isinstance(result, Audit):
        ends[f"estimate (1 − {C:g})^L"] = float(_estimate(p)[0])
    rows = [(name, [np.exp(log), np.exp(log / _sublayers(p))]) for name, log in ends.items()]
    return _table("Gain of the gradient from the output back to the input", ("", "end to end", "per sub-layer"), rows)


def _factors(p: Profile, law: Profile | None, caption: str = "Factors per sub-layer, input to output") -> str:
    """One row a sub-layer, every figure a column."""
    n = len(p.labels)
    columns = {_FIGURES[name][0]: p.summary(name).mean[:n] for name in _present(p)}
    if law is not None:
        columns |= {f"{name}, law": getattr(law, name)[0, :n] for name in ("net", "exact", "trunk")}
    rows = [(label, [values[i] for values in columns.values()]) for i, label in enumerate(p.labels)]
    return _table(caption, ("sub-layer", *columns), rows)


def _further(a: Audit) -> str:
    """An audit's further tables, each where there is something to show, and the architecture's contradictions."""
    parts = [_table(*each) for each in audit_columns.tables(a)]
    if a.apart is not None:
        caption = "Factors over the other tokens (gradient of the whole network; exchange is in 'branch')"
        parts.insert(1, _factors(a.apart.profile, None, caption))
    rows = "".join(f"<dt>{_text(f.level)}: {_text(f.key)}</dt><dd>{_text(f.text)}</dd>" for f in a.findings)
    return "".join(parts) + (f"<h2>Architecture</h2><dl>{rows}</dl>" if rows else "")


def _encoder(a: Audit) -> str:
    """The same tables of an encoder beside the stack."""
    return f"<h3>Encoder</h3>{_gains(a, None)}{_factors(a.profile, None)}"


def _table(caption: str, columns: Sequence[str], rows: Iterable[tuple[str, list[Any]]]) -> str:
    """A table that its script can sort: a cell's ``data-value`` has all digits, and none where there is no number."""
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{_text(name).replace(":", ":<wbr>")}</th>'
        + "".join(f'<td data-value="{float(v)!r}">{number(v)}</td>' if np.isfinite(v) else "<td>–</td>" for v in values)
        + "</tr>"
        for name, values in rows
    )
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}">'
    table = f"<table><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"{region}{table}</div>"


def _text(value: Any) -> str:
    """A setting as escaped text."""
    return html.escape(_said(value))


def _said(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        shown = (" · " if any(isinstance(item, str) for item in value) else ", ").join(map(_said, value[:ITEMS_SHOWN]))
        return shown + (f", and {len(value) - ITEMS_SHOWN} more" if len(value) > ITEMS_SHOWN else "")
    return str(value)


@functools.cache
def _template() -> tuple[str, str]:
    """The page around the fields, and a policy that allows its own script and style and no request."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")

    def own(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {own('script')}; style-src {own('style')}; base-uri 'none'; form-action 'none'"
    )
    return template, policy
