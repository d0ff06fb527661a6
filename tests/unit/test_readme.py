"""The docs match the code: commands and settings parse; files, quoted messages and configuration keys exist."""

import ast
import re
import tomllib

import click
import pytest

from data_prep.download_config import DownloadConfig
from jobs.cli import COMMANDS, cli
from pipeline.config import keys
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.objectives import objective_names, parse_objective
from pipeline.training.recipe import RunConfig
from pipeline.training.recipe_file import RECIPE_KEYS
from tests.documents import BLOCK, PAGES, ROOT, Line, blocks, check, lines

TROUBLES = ROOT / "docs" / "troubleshooting.md"
FILES = (".json", ".jsonl", ".yaml", ".py", ".html", ".md")


def inline(page):
    """All inline `code` of a page, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text(encoding="utf-8")))


def test_the_pages_contain_commands():
    commands = {" ".join(line.words[:2]) for line in lines()}
    names = ("train", "download", "evaluate", "watch", "plan", "verify")
    assert {"make demo", "make test", *(f"neuclip {name}" for name in names)} <= commands
    assert {"deepspeed", "torchrun", "accelerate", "sbatch"} <= {line.words[0] for line in lines()}


@pytest.mark.filterwarnings("ignore:objective.npn_lr")
@pytest.mark.parametrize("line", lines(), ids=lambda line: str(line)[:70])
def test_every_command_parses(line):
    check(line)


def test_a_wrong_command_is_detected():
    for words in (
        "neuclip trian",
        "neuclip train --recipe jobs/recipes/cc3m.yaml objective.nmae=openclip",
        "neuclip download source.table=x output=y guard.contcat=z",
        "neuclip verify data/x image.size=3",
        "torchrun --nproc-per-node 8 -m jobs.train --recipe jobs/recipes/cc3m.yaml --resum latest",
        "sbatch --nodes=2 jobs/cluster/train.sbatch jobs/recipes/cc12m.yaml output=x datas.sources=x",
        "python -m jobs.bench.train --nonsense 3",
        "make demmo",
    ):
        with pytest.raises((Exception, SystemExit)):
            check(Line("a test", {}, tuple(words.split())))


def test_commands_in_inline_code_exist():
    for page in PAGES:
        for text in inline(page):
            words = text.split()
            if words[0] != "neuclip" or len(words) < 2 or not words[1].islower() or words[1].startswith("-"):
                continue
            assert words[1] in COMMANDS, f"{page.name}: {text}"
            command = cli.get_command(click.Context(cli), words[1])
            known = {"--help", *(name for option in command.params for name in option.opts)}
            assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: {text}"


def test_every_key_exists():
    """Of training, of ingestion, and of evaluation by `neuclip watch`."""
    known = {*RECIPE_KEYS, *keys(RunConfig), *keys(DownloadConfig)}
    known |= {*(f"evaluation.{key}" for key in keys(EvaluationConfig))}
    for name in objective_names():
        known |= {f"objective.{key}" for key in keys(type(parse_objective({"name": name})))}
    sections = {key.partition(".")[0] for key in known if "." in key}
    for page in PAGES:
        for text in inline(page):
            match = re.fullmatch(r"(([a-z_]+)\.[a-z_0-9.]+)(=.*)?", text.strip("'"))
            if match and match[2] in sections and not match[1].endswith(FILES):
                assert match[1] in known, f"{page.name}: {text}"


def test_quoted_messages_exist_in_the_code():
    """Messages quoted in the first column of the troubleshooting tables occur somewhere in the code."""
    paths = [path for folder in ("pipeline", "data_prep", "jobs") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    values = (node.value for node in nodes if isinstance(node, ast.Constant))  # f-strings in pieces
    constants = "\n".join(value for value in values if isinstance(value, str))
    rows = [line for line in TROUBLES.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0]) if " " in text]
    assert len(quoted) > 25
    for text in quoted:
        for piece in filter(None, (piece.strip() for piece in text.split("..."))):
            assert piece in constants, f"no message contains {piece!r} (of {text!r})"


def test_links_and_folders_exist():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(#[^)]*)?\)", text):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor[1:] in anchors(other), f"{page.name}: {target}{anchor}"
        for folder in re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE):
            assert (ROOT / folder).is_dir(), f"{page.name}: {folder}"
        for path in re.findall(r"`((?:jobs|pipeline|tests|data_prep|ds_configs|docs)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def anchors(page):
    """The anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_methods_page_describes_every_key_of_its_objectives():
    """An objective missing from the page is not an error: documenting a method is up to its author."""
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    described = [name for name in objective_names() if f"`{name}`" in text]
    assert "neuclip" in described
    for name in described:
        known = {*re.findall(r"`(?:objective\.)?(\w+)[`=]", text), "name"}
        assert known >= {*keys(type(parse_objective({"name": name})))}, name


def test_the_evaluation_page_lists_every_task_with_its_metric():
    from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS

    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = {row[2 : row.index("`", 3)].strip("`"): row for row in text.splitlines() if row.startswith("| `")}
    for key, task in TASKS.items():
        assert f"`{key}`" in rows[task.main_metric], key
    for name in AGGREGATES:
        assert f"| {name} |" in text


def test_the_library_snippets_run():
    """The README's training loop with any objective, on towers that are two linear layers, and the methods page's."""
    import torch

    snippet = next(body for body in blocks("python", ROOT / "README.md") if "build_objective" in body)
    torch.manual_seed(0)
    towers = [torch.nn.Linear(8, 512) for _ in range(2)]
    pairs, losses = torch.randn(512, 8), list[float]()
    halves = [torch.arange(512)[i::2] for i in range(2)]
    scope = {
        "encode_image": lambda x: torch.nn.functional.normalize(towers[0](x), dim=-1),
        "encode_text": lambda x: torch.nn.functional.normalize(towers[1](x), dim=-1),
        "loader": [(pairs[ids], pairs[ids] + 0.1 * torch.randn(256, 8), ids) for ids in halves] * 3,
        "optimizer": torch.optim.AdamW([p for tower in towers for p in tower.parameters()], lr=3e-3),
        "losses": losses,
        "model": torch.nn.ParameterDict({"logit_scale": torch.zeros(())}),
    }
    exec(snippet.replace("loss.backward()", "loss.backward(); losses.append(loss.item())"), scope)
    assert len(losses) == 6
    assert sum(losses[-2:]) < sum(losses[:2])
    exec(blocks("python", ROOT / "docs" / "methods.md")[0], scope)
    assert scope["objective"].config.name == "fastclip_v3"


def test_the_badges_are_correct():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = {path.stem.partition("-")[2]: path.read_text() for path in (ROOT / "docs/figures").glob("badge-*.svg")}
    assert f"version: {project['version']}" in badges["version"]
    assert project["license"] == "Apache-2.0"
    assert "Apache 2.0" in badges["licence"]
    lowest, below = re.findall(r"3\.(\d+)", project["requires-python"])
    assert " | ".join(f"3.{minor}" for minor in range(int(lowest), int(below))) in badges["python"]
