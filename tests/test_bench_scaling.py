"""Pages and pictures of several GPUs: rows of 2 and 4 ranks, of two kinds of GPU, of FLA, and the model."""

import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from kit.scaling_rows import FLA, GRAPH, SLOWER, rows_of_links, rows_of_ranks
from typer.testing import CliRunner

from gdn.cli.app import build_app
from gdn_bench.passes.ranks import Scaling
from gdn_bench.results import pages, scaling_pictures, summary, tables
from gdn_bench.results.pages import Results
from gdn_bench.timing import measure

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "flash-linear-attention": "0.6.0"}
ABOUT = {"gpu": "NVIDIA H200", "versions": VERSIONS, "commit": "abc", "date": "2026-11-28"}
H100 = {**ABOUT, "gpu": "NVIDIA H100 80GB HBM3"}
BOTH = ("gdn", "fla")
LENGTH = 131072


@pytest.fixture(scope="module")
def one():
    """Two runs with FLA, on 2 and on 4 ranks, one with other gates, and both runs of links."""
    runs = [rows_of_ranks(R, ABOUT, Scaling(providers=BOTH)) for R in (2, 4)]
    runs += [rows_of_ranks(4, ABOUT, Scaling(gate="mild", exchanges=("gather", "nodes")))]
    runs += [rows_of_links(R, ABOUT) for R in (2, 4)]
    return Results("h200", [row for run in runs for row in run])


def cells(table, label):
    """Return the cells of the line that begins with a label."""
    (line,) = [line for line in table if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


# pages


def test_runs_on_2_and_on_4_ranks_stand_side_by_side(one):
    """Only the times of one GPU with as many tokens are of the last run."""
    kept = [row for row in one.last("ranks") if row["pass"] == "ranks"]
    for R, totals in ((2, (LENGTH,)), (4, (LENGTH, 2 * LENGTH))):
        of_count = {(r["T"], r["provider"], r["exchange"]) for r in kept if r["num_ranks"] == R}
        exchanges = {("gdn", x) for x in ("gather", "owner", "heads")} | {("fla", "gather")}
        assert of_count == {(T, *x) for T in totals for x in exchanges}
    alone = [row for row in kept if row["num_ranks"] == 1]
    assert sorted(row["T"] for row in alone) == sorted(2 * [LENGTH // 4, LENGTH // 2, LENGTH])
    assert len(one.last("links")) == len(rows_of_links(2, ABOUT)) + len(rows_of_links(4, ABOUT))


def test_a_prediction_stands_beside_every_time_of_gdn(one):
    table = pages.section(one, "ranks")
    (head,) = [line for line in table if "one call" in line and line.startswith("|")]
    columns = [cell.strip() for cell in head.strip("|").split("|")][1:]
    of_times = ["speedup", "weak", "predicted"]
    assert columns == [
        "one call", *of_times, "8 in a row", *of_times, "CUDA graph", *of_times,
        "MB a rank", "FLA / gdn", "error",
    ]  # fmt: skip
    lines = [line for line in table if line.startswith("| 16/32") and not line.startswith("| 16/32 heads")]
    ours = [line for line in lines if ", FLA |" not in line]
    shares = [
        [re.search(r"\((\d\.\d\d)\)$", cells([line], line.split("|")[1].strip())[i])[1] for i in (3, 7, 11)]
        for line in ours
    ]
    assert (
        len(ours) == 2 * (3 + 3 * 3)
        and ["0.33", "0.33", "0.37"] in shares
        and ["1.00", "1.00", "1.11"] in shares
    )
    assert f"{1 / SLOWER['heads']:.2f}" == "0.33" and f"{1 / SLOWER['heads'] / GRAPH:.2f}" == "0.37"


def test_the_table_goes_from_one_gpu_to_many(one):
    lines = [
        line.split("|")[1].strip() for line in pages.section(one, "ranks") if line.startswith("| 16/32 ")
    ]
    kinds = ["gather", "owner", "heads", "FLA"]
    each = [
        *(f"1x{LENGTH // n} train, one GPU" for n in (4, 2, 1)),
        *(f"1x{LENGTH} train, {R} ranks, {x}" for R in (2, 4) for x in kinds),
        *(f"1x{2 * LENGTH} train, 4 ranks, {x}" for x in kinds),
    ]
    assert lines == [f"16/32 {x}" for x in (*each, *(x.replace("train", "forward") for x in each))]
    theirs = cells(pages.section(one, "ranks"), f"16/32 1x{LENGTH} train, 4 ranks, FLA")
    assert theirs[3] == "" and theirs[8:12] == ["", "", "", ""]  # no model, no graph
    ours = cells(pages.section(one, "ranks"), f"16/32 1x{LENGTH} train, 4 ranks, gather")
    assert ours[13] == f"{FLA:.2f}"


def test_other_gates_have_a_table_without_empty_columns(one):
    table = pages.section(one, "ranks:mild")
    assert "`gdn bench ranks --ranks 4 --gate mild`" in table[2] and not any("FLA" in line for line in table)
    assert sum(", 4 ranks, nodes |" in line for line in table) == 4


def test_a_page_explains_its_columns_and_begins_with_its_pictures(one):
    shown = [(title, f"results/h200-{kind}.svg") for kind, (title, _) in scaling_pictures.PICTURES.items()]
    made = pages.pass_pages([one], {"h200": [("Roofline", "results/h200-roofline.svg"), *shown]})
    assert set(made) == {"ranks", "links"}
    for name, words, kinds in (
        (
            "ranks",
            ("one call:", "weak (weak scaling)", "a CUDA graph is compared with"),
            ("ranks", "ranks-weak"),
        ),
        ("links", ("latency of a step", "without host time"), ("links",)),
    ):
        assert all(word in made[name] for word in words) and "Limit:" not in made[name]
        assert re.findall(r"\]\((h200-.*)\.svg\)", made[name]) == [f"h200-{kind}" for kind in kinds]
        assert made[name].index(".svg)") < made[name].index("### ")
    assert "`gdn bench ranks --ranks 2 --providers gdn,fla`, `gdn bench ranks --ranks 4 --" in made["ranks"]
    assert "[ranks](results/ranks.md), [links](results/links.md)" in pages.page([one], {})


def test_sentences_tell_the_speed_up_and_the_model(one):
    sentences = [x for x in pages.statements(one) if x.startswith("`ranks`: ")]
    of_ranks = [x for x in sentences if "times as fast as on one GPU" in x]
    assert len(of_ranks) == 4 and len(sentences) == 5
    (step,) = [x for x in of_ranks if "train on 4 ranks" in x]
    row = next(r for r in one.rows if r["case"] == f"16/32 1x{LENGTH} train, 4 ranks, gather")
    own, alone = (tables.format_time(x) for x in (row["ms"], row["ms"] * row["speedup"]))
    predicted = tables.format_time(row["predicted_ms"])
    assert f"{row['speedup']:.2f} (one call, gather: {own} against {alone}, predicted {predicted})" in step
    assert (
        f"{row['graph_speedup']:.2f} (CUDA graph, gather: " in step and "`gdn bench ranks --ranks 4`" in step
    )
    (beside,) = set(sentences) - set(of_ranks)
    for part in (
        f"{FLA:.2f} (16/32 ", "times as fast as FLA 0.6.0, by its context parallelism on the same ranks, in",
        "`gdn bench ranks --ranks 2 --providers gdn,fla`, `gdn bench ranks --ranks 4 --providers gdn,fla`",
    ):  # fmt: skip
        assert part in beside
    fits = [x for x in pages.statements(one) if x.startswith("`links`: ")]
    assert (
        len(fits) == 2 and "11.9 us a step with 163 GB/s (all_gather)" in fits[0] and "on 4 ranks" in fits[1]
    )
    assert "0.80 to 0.80 of those of collectives, 0.80 to 0.80 of those of exchanges of states" in fits[0]


def test_a_fit_without_a_bandwidth_and_a_run_without_a_model_have_sentences():
    found = [{**row, "link_gb_per_s": None} for row in rows_of_links(2, ABOUT) if "bytes" in row]
    toy = [{x: y for x, y in row.items() if "predicted" not in x} for row in rows_of_ranks(2, ABOUT)]
    sentences = pages.statements(Results("h200", [*toy, *found]))
    assert "predicted" not in sentences[0] and "11.9 us a step (all_gather) and 11.9" in sentences[-1]
    assert "predicted" not in "".join(pages.section(Results("h200", toy), "ranks"))


def test_several_gpus_leave_the_table_of_the_readme_alone():
    head = {**ABOUT, "provider": "gdn", "backend": "hopper", "dtype": "bfloat16", "ratio": {"fla": 2.0}}
    step = {**head, "pass": "train", "case": "16/32 1x8192", "ms": 1.0, "p20": 1.0, "p80": 1.0}
    later = [{**row, "date": "2026-12-24"} for row in rows_of_ranks(2, ABOUT, Scaling(providers=BOTH))]
    made = summary.readme([Results("h200", [step])])
    assert "FLA 0.6.0" in made
    assert summary.readme([Results("h200", [step, *later]), Results("h100", later)]) == made


def test_files_of_two_kinds_of_gpu_make_one_page(tmp_path):
    """The kind with most rows comes first, the CPU last."""
    cpu = {
        **ABOUT,
        "gpu": None,
        "cpu": "x",
        "threads": 1,
        "pass": "cpu",
        "case": "decode 1x1",
        "provider": "gdn",
    }
    measure.append(tmp_path / "cpu.jsonl", [{**cpu, "ms": 1.0, "p20": 1, "p80": 1, "ratio": {}}] * 200)
    measure.append(tmp_path / "h100-80gb-hbm3.jsonl", rows_of_ranks(2, H100))
    measure.append(tmp_path / "h200.jsonl", rows_of_ranks(4, ABOUT) + rows_of_links(4, ABOUT))
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(pages.MARKS))
    arguments = ["--results", str(tmp_path), "--page", str(page), "--readme", str(readme)]
    done = CliRunner().invoke(build_app(), ["bench", "plot", *arguments])
    assert done.exit_code == 0, done.output
    heads = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "x, 1 threads"]
    assert re.findall(r"^## (.*)", page.read_text(), re.M) == heads
    ranks = (tmp_path / "docs" / "results" / "ranks.md").read_text()
    assert re.findall(r"^## (.*)", ranks, re.M) == heads[:2]
    shown = re.findall(r"\]\((.*\.svg)\)", ranks)
    assert len(shown) == 4 and all((tmp_path / "docs" / "results" / name).exists() for name in shown)
    assert readme.read_text() == "\n".join([pages.MARKS[0], pages.MARKS[1]])


# pictures


def lines_of(axes, label):
    """Return the points of the measured line of a label, and of the model's line of the same mark."""
    (line,) = [x for x in axes.lines if x.get_label() == label]
    looks = (line.get_marker(), line.get_color(), "none")
    model = [x for x in axes.lines if (x.get_marker(), x.get_color(), x.get_fillstyle()) == looks]
    return [list(zip(*x.get_data(), strict=True)) for x in (line, *model)]


def test_speed_ups_and_the_model_are_drawn_by_exchange(one):
    figure = scaling_pictures.strong(one)
    assert figure.get_suptitle() == "Strong scaling of one sequence: NVIDIA H200, bfloat16, 2026-11-28"
    titles = [axes.get_title() for axes in figure.axes]
    ways = ("one call", "8 in a row", "CUDA graph")
    assert titles == 2 * [f"{job}, {way}" for job in ("training step", "forward") for way in ways]
    assert "gates mild" in figure.axes[6].get_ylabel() and "131,072 tokens" in figure.axes[0].get_ylabel()
    for axes, name in zip(figure.axes[:3], ("", "queued_", "graph_"), strict=True):
        for exchange in ("gather", "owner", "heads"):
            measured, model = lines_of(axes, exchange)
            cases = [f"16/32 1x{LENGTH} train, {R} ranks, {exchange}" for R in (2, 4)]
            found = [next(r for r in one.rows if r["case"] == case)[f"{name}speedup"] for case in cases]
            assert [y for _, y in measured[-2:]] == pytest.approx(found)
            shares = SLOWER[exchange] * (GRAPH if name == "graph_" else 1)
            assert [y for _, y in model] == pytest.approx([shares * y for y in found])
            assert (measured[0] == (1, 1)) == (exchange != "heads")
        (ideal,) = lines_of(axes, "ideal")
        assert ideal == [(1, 1), (2, 2), (4, 4)]
        assert {f"{best:.2f}x" for best in _best(one, f"{name}speedup")} == {x.get_text() for x in axes.texts}
        assert [x.get_text() for x in axes.get_xticklabels()] == ["1", "2", "4"]
    (theirs,) = lines_of(figure.axes[0], "FLA")
    assert [y for _, y in theirs] == pytest.approx(
        [y / FLA for _, y in lines_of(figure.axes[0], "gather")[0][1:]]
    )
    assert "FLA" not in [line.get_label() for line in figure.axes[2].lines]


def _best(one, field):
    rows = [r for r in one.rows if r["provider"] == "gdn" and r["pass"] == "ranks" and " train" in r["case"]]
    return [max(r[field] for r in rows if r["num_ranks"] == R and field in r) for R in (2, 4)]


def test_weak_scaling_is_drawn_of_the_size_that_all_runs_have(one):
    figure = scaling_pictures.weak(one)
    assert "65,536 tokens a GPU" in figure.axes[0].get_ylabel()
    measured, model = lines_of(figure.axes[0], "owner")
    weak = [
        next(row["weak"] for row in one.rows if row["case"] == f"16/32 1x{T} train, {R} ranks, owner")
        for R, T in ((2, LENGTH), (4, 2 * LENGTH))
    ]
    assert [y for _, y in measured] == pytest.approx([1, *(1 / x for x in weak)])
    assert [y for _, y in model] == pytest.approx([SLOWER["owner"] / x for x in weak])


def test_links_are_drawn_beside_the_model(one):
    figure = scaling_pictures.links(one)
    assert len(figure.axes) == 6 and "collectives of 4 GPUs" in figure.axes[3].get_title()
    assert "all_to_all: 11.9 us a step, 163 GB/s" in figure.axes[0].get_title()
    for axes, label in (
        (figure.axes[0], "all_gather"),
        (figure.axes[4], "owner"),
        (figure.axes[5], "gather"),
    ):
        measured, model = lines_of(axes, label)
        assert [x for x, _ in measured] == [x for x, _ in model]
        assert [y for _, y in measured] == pytest.approx([1.25 * y for _, y in model])
    assert [x for x, _ in lines_of(figure.axes[5], "gather")[0]] == [16, 32, 64]


def test_one_run_on_a_cpu_has_its_pictures():
    """Draw rows without graphs, predictions and FLA, of one number of ranks."""
    drop = ("graph_", "predicted", "queued_predicted")
    about = {**ABOUT, "gpu": None, "cpu": "x", "threads": 1}
    rows = [{x: y for x, y in r.items() if not x.startswith(drop)} for r in rows_of_ranks(4, about)]
    for draw in (scaling_pictures.strong, scaling_pictures.weak):
        figure = draw(Results("cpu", rows))
        assert len(figure.axes) == 4 and "x, 1 threads" in figure.get_suptitle()
        assert len(lines_of(figure.axes[0], "gather")) == 1
