"""Pages and pictures made from results files show what the rows have."""

import re
import shutil

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from kit import scaling_rows
from typer.testing import CliRunner

from gdn.cli.app import build_app
from gdn_bench.commands import bench as commands
from gdn_bench.judging import readings
from gdn_bench.problems import workloads
from gdn_bench.results import pages, picture_files, pictures, summary, tables
from gdn_bench.results.pages import Results
from gdn_bench.timing import measure

VERSIONS = {"gdn": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "flash-linear-attention": "0.6.0"}
ABOUT = {
    "gpu": "NVIDIA H200",
    "versions": VERSIONS,
    "commit": "abc",
    "date": "2026-11-21",
    "cpu": "x",
    "threads": 2,
}
PEERS = {"fla": 4.0, "flash_qla": 1.7, "flashinfer": 1.05, "transformers": 30.0}


def timed(target, ms, provider="gdn", ratio=None, **others):
    """A row as `gdn bench` writes it."""
    case, L = target.case, target.case.lengths
    return {
        "pass": target.job, "case": target.name, "provider": provider, "backend": "triton",
        "H": case.heads[0], "HV": case.heads[1], "N": L.N, "T": L.T // (L.N if L.ends else 1),
        "dtype": "bfloat16", "state": "fp32" if case.state == "wide" else "bf16", "ok": True,
        "ms": ms, "p20": ms, "p80": 1.1 * ms,
        "bytes": target.cost.bytes, "flop": target.cost.flop, "gb_per_s": target.cost.bytes / ms / 1e6,
        "tflop_per_s": target.cost.flop / ms / 1e9, "copy_gb_per_s": 4254, "matmul_tflop_per_s": 779,
        "ratio": ratio or {}, **ABOUT, **others,
    }  # fmt: skip


def everything():
    """A file that has all of it: every workload, every peer, every distribution."""
    rows = []
    for job in ("prefill", "train", "decode"):
        for target in workloads.WORKLOADS[job]:
            own = 2e3 * max(target.cost.bytes / 4254e9, target.cost.flop / 779e12)
            who = {p: x for p, x in PEERS.items() if p != "flashinfer" or job != "train"}
            rows.append(timed(target, own, ratio=who))
            rows += [timed(target, own * x, p) for p, x in who.items()]
    for i, case in enumerate(readings.DISTRIBUTIONS):
        for j, provider in enumerate(("gdn", *PEERS)):
            errors = dict.fromkeys(("o", "final_state", "dq", "dg"), 0.001 * (1 + i / 5 + j / 3))
            head = {
                "pass": "accuracy",
                "case": case,
                "provider": provider,
                "backend": None,
                "dtype": "bfloat16",
            }
            rows.append({**head, "ok": True, "error": 2e-3, "errors": errors, **ABOUT})
    return rows + scaling_rows.rows_of_ranks(2, ABOUT) + scaling_rows.rows_of_links(2, ABOUT)


@pytest.fixture
def folder(tmp_path):
    measure.append(tmp_path / "h200.jsonl", everything())
    return tmp_path


# what rows say


def test_the_last_row_counts_whatever_the_backend():
    target = workloads.PREFILL[0]
    one = Results("h200", [timed(target, 2.0), timed(target, 1.0, "gdn:triton"), timed(target, 9.0, "fla")])
    assert [row["ms"] for row in one.ours("prefill")] == [1.0] and len(one.last("prefill")) == 2
    wrong = {**timed(target, 3.0), "ok": False}
    del wrong["ms"]
    assert [row["ms"] for row in Results("x", [*one.rows, wrong]).ours("prefill")] == [1.0]


def test_a_limit_is_never_passed():
    """A copy rate that a job went past was no ceiling."""
    target = workloads.DECODE[-2]
    slow = timed(target, 0.25, copy_gb_per_s=2714)
    one = Results("h200", [slow, timed(workloads.PREFILL[0], 0.5)])
    assert one.ceilings[0] == pytest.approx(max(4254, slow["gb_per_s"]))
    assert one.of_limit(slow) <= 1 and one.of_limit({"pass": "host"}) is None


def test_a_statement_names_what_it_stands_on():
    two = [
        timed(workloads.PREFILL[6], 0.3, ratio={"fla": 1.5}),
        timed(workloads.PREFILL[7], 1.0, ratio={"fla": 0.8}, date="2026-11-22", commit="abd"),
    ]
    (sentence,) = pages.statements(Results("h200", two))
    for part in (
        "0.80 (16/32 4x8192: 1 ms against 0.8 ms) to 1.50 (16/32 1x8192: 0.3 ms against 0.45 ms)",
        "FLA 0.6.0", "2 problems", "gdn at abc to abd", "torch 2.11.0", "2026-11-21 to 2026-11-22",
        "`gdn bench prefill`", "NVIDIA H200",
    ):  # fmt: skip
        assert part in sentence, (part, sentence)
    (sentence,) = pages.statements(Results("h200", two[:1]))
    assert "`gdn bench prefill --only '16/32 1x8192'`" in sentence and "one problem" in sentence


def test_the_table_of_the_readme_names_losses_in_bold():
    """Compare with the fastest peer of each problem; name the slowest problems first."""
    cases = workloads.PREFILL[6:10]
    factors = ((1.5, 2.0), (1.2, 0.8), (3.0, 0.999), (0.95, 4.0))
    rows = [
        timed(case, 1.0, ratio={"fla": fla, "flashinfer": other})
        for case, (fla, other) in zip(cases, factors, strict=True)
    ]
    lines = summary.readme([Results("h200", rows), Results("empty", [])]).splitlines()
    slow, slower, slowest = (cases[i].name for i in (1, 3, 2))
    assert lines[2:] == [
        f"| prefill: forward, packed | 4 | FLA 0.6.0, FlashInfer ? | **0.80** to 1.50 | **3 of 4: {slow}, "
        f"{slower}, {slowest}** |",
        "",
        "GPU: NVIDIA H200, bfloat16, torch 2.11.0, triton 3.6.0, 2026-11-21.",
    ]
    (faster,) = [line for line in summary.readme([Results("h200", rows[:1])]).splitlines() if "FLA" in line]
    assert faster.endswith("| 1 | FLA 0.6.0 | 1.50 | none |")
    assert summary.readme([Results("h200", [timed(cases[0], 1.0)])]) == ""


def test_a_history_that_is_not_chosen_is_no_problem_of_the_readme():
    """On one row `decode_with_history` appends only where the caller asks for it; on 64 it does by itself."""
    timing = timed(workloads.PREFILL[6], 1.0, ratio={"flashinfer": 0.5}) | {"pass": "spec"}
    rows = [timing | {"case": f"B={B} T=1 fp32 history", "N": B, "HV": 32} for B in (1, 8, 64)]
    (line,) = [x for x in summary.readme([Results("h200", rows)]).splitlines() if "speculation" in x]
    assert "| 1 |" in line and "**1 of 1: B=64 T=1 fp32 history**" in line


def test_the_version_of_a_peer_is_that_of_its_last_run():
    """Take the version from a run that timed the peer: a later run may have had another peer alone."""
    first = timed(workloads.PREFILL[6], 1.0, ratio={"fla": 1.5})
    last = timed(workloads.PREFILL[7], 1.0, ratio={"flashinfer": 1.2})
    last["versions"] = {**last["versions"], "flashinfer-python": "0.7.2"}
    del last["versions"]["flash-linear-attention"]
    table = summary.readme([Results("h200", [first, last])])
    assert "| FLA 0.6.0, FlashInfer 0.7.2 |" in table


def test_the_picture_of_prefill_names_gpu_dtype_and_date():
    rows = [timed(t, 1.0, p) for t in workloads.PREFILL for p in ("gdn", "fla")]
    figure = pictures.prefill(Results("h200", rows))
    assert figure.get_suptitle() == "Prefill of one sequence: NVIDIA H200, bfloat16, 2026-11-21"
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == pytest.approx([2.048, 8.192, 32.768])
    assert list(right.lines[1].get_xdata()) == [8192, 32768] and left.get_ylim()[0] == 0


def test_peers_of_two_runs_of_a_commit_stand_side_by_side():
    first = timed(workloads.PREFILL[6], 0.3, ratio={"fla": 1.5, "flash_qla": 1.2})
    last = timed(workloads.PREFILL[6], 0.31, ratio={"flashinfer": 1.1, "flash_qla": 1.3})
    (both,) = Results("h200", [first, last]).ours("prefill")
    assert both["ratio"] == {"fla": 1.5, "flash_qla": 1.3, "flashinfer": 1.1} and both["ms"] == 0.31
    (alone,) = Results("h200", [first, {**last, "commit": "abd"}]).ours("prefill")
    assert alone["ratio"] == last["ratio"]
    wrong = {**last, "ok": False, "errors": {"o": 1.0}, "share_of_limit": 200.0, "ratio": {}}
    del wrong["ms"]
    one = Results("h200", [first, wrong])
    assert not one.ours("prefill")[0]["ratio"] and not pages.statements(one)


def test_a_row_without_a_state_is_of_the_same_thing():
    """Rows of old files say less of themselves; the last one counts all the same."""
    old = {"pass": "host", "case": "decode", "provider": "gdn:triton", "ms": 2.0, **ABOUT}
    new = {**old, "provider": "gdn", "ms": 1.0, "dtype": "bfloat16", "state": "fp32"}
    assert [row["ms"] for row in Results("h200", [old, new]).last("host")] == [1.0]
    failed = {**new, "provider": "gdn:triton", "ok": False, "failed": "OSError: x"}
    del failed["ms"]
    assert not Results("h200", [failed, new]).without_time and Results("h200", [new, failed]).without_time


def every_page(found, drawn=None):
    """Return the page of all results and those of the passes as one text."""
    return "\n".join([pages.page(found, drawn or {}), *pages.pass_pages(found).values()])


def test_a_peer_of_an_older_commit_keeps_its_column():
    old = timed(workloads.PREFILL[6], 2.0, ratio={"fla": 1.5}, commit="old")
    new = timed(workloads.PREFILL[6], 1.0)
    one = Results("h200", [old, timed(workloads.PREFILL[6], 3.0, "fla", commit="old"), new])
    assert one.ours("prefill")[0]["ratio"] == {} and not pages.statements(one)
    page = every_page([one])
    assert "| FLA (ratio) |" in page and "| 3 ms (1.50 at old) |" in page


@pytest.mark.parametrize(
    "says, cell, note",
    [
        ({"refused": "fp32 only"}, "refused", "refused, fp32 only."),
        ({"failed": "OSError: x", "errors": {"o": 1e-3}}, "failed", "failed, OSError: x."),
        (
            {"errors": {"dg": 6.3e-3}, "share_of_limit": 1.05},
            "wrong",
            "wrong, an error 1.05 times its limit.",
        ),
        ({"errors": {"dg": None}, "share_of_limit": None}, "wrong", "wrong, no finite answer."),
    ],
)
def test_a_peer_without_a_time_has_a_reason(says, cell, note):
    """Also where it had one beside an older commit."""
    first, second = workloads.TRAIN[:2]
    told = {"pass": "train", "case": first.name, "provider": "fla", "ok": False, **says, **ABOUT}
    one = Results("h200", [
        timed(first, 2.0, ratio={"fla": 1.5}, commit="old"), timed(first, 3.0, "fla", commit="old"),
        timed(first, 1.0), told, timed(second, 1.0, ratio={"fla": 2.0}),
    ])  # fmt: skip
    page = every_page([one])
    assert f"| {cell} | triton | abc |" in page and f"no time of FLA in {first.name}: {note}" in page
    assert "1.50" not in page


def test_rates_and_memory_are_shown():
    target = workloads.TRAIN[0]
    rows = [timed(target, 1.0, ratio={"fla": 2.0}, peak_mb=548.1), timed(target, 2.0, "fla", peak_mb=947.9)]
    page = every_page([Results("h200", rows)])
    assert "| limit | GB/s | TFLOP/s | MB | FLA (ratio) |" in page
    assert f"| {rows[0]['gb_per_s']:.0f} | {rows[0]['tflop_per_s']:.3g} | 548 | 2 ms (2.00), 948 MB |" in page


def accurate(provider, error, name="accuracy", **others):
    head = {"pass": name, "case": "mild", "provider": provider, "dtype": "bfloat16", "ok": True, **ABOUT}
    return {**head, "error": error, "errors": {"o": error, "dg": error and error / 2}, **others}


def test_other_sets_and_profiles_stand_apart():
    pto = {"name": "accuracy:pto", "set": "pto", "profile": "pto"}
    one = Results("h200", [accurate("gdn", 1e-3), accurate("gdn", 9e-3, **pto), accurate("fla", 9e-3, **pto)])
    page = every_page([one])
    assert "### accuracy\n" in page and "### accuracy:pto\n" in page and "by pto-kernels' gates" in page
    assert "`gdn verify --set pto --append`" in page and not pages.statements(one)
    (axes, *_) = pictures.errors(one).axes
    assert [len(c.get_offsets()) for c in axes.collections] == [1]


def test_accuracy_beside_peers_is_a_statement():
    rows = [accurate("gdn", 1e-3), accurate("fla", 2e-3), accurate("flash_qla", None)]
    (sentence,) = pages.statements(Results("h200", rows))
    assert (
        "0.50 (mild: o) to 0.50 (mild: o) times those of FLA 0.6.0, of dg and dbeta 0.50 to 0.50" in sentence
    )
    assert "`gdn verify --set distributions --append`" in sentence


@pytest.mark.parametrize(
    "name, case, command",
    [
        ("prefill", None, "gdn bench prefill"), ("prefill:gated", None, "gdn bench prefill --variant gated"),
        ("decode:eager", "B=1", "gdn bench decode --only B=1 --eager"), ("cpu", "x", "gdn bench cpu"),
        ("accuracy", None, "gdn verify --set distributions --append"),
        ("accuracy:ladders", None, "gdn verify --set ladders --append"),
        ("accuracy:pto:gdn", None, "gdn verify --set pto --profile gdn --append"),
    ],
)  # fmt: skip
def test_commands_measure_it_again(name, case, command):
    assert pages.command(name, case) == command


def test_a_page_holds_every_row_of_ours(folder):
    (one,) = pages.load(folder)
    page = every_page([one], {"h200": [("Roofline", "results/h200-roofline.png")]})
    for row in one.ours("prefill", "train", "decode"):
        assert f"| {row['case']} | {tables.format_time(row['ms'])} |" in page
    assert "![Roofline](results/h200-roofline.png)" in page and "## NVIDIA H200" in page
    widths = {
        line.count("|") for line in re.search(r"### train.*?\n\n(\|.*?)\n\n", page, re.S)[1].splitlines()
    }
    assert len(widths) == 1
    assert pages.load(folder, {"h200": 3})[0].rows == one.rows[:3]


def test_other_passes_have_tables_of_their_own():
    head = {"backend": None, "dtype": "bfloat16", **ABOUT}
    cold = {**head, "pass": "cold", "case": "new process", "provider": "gdn", "compiled_again": 2}
    cold["seconds"] = {"first: forward": 3.81, "first: backward": 6.3}
    e2e = {**head, "pass": "e2e", "case": "512+128", "provider": "gdn", "tokens_per_s": 100.0}
    e2e |= {"first_token_ms": 12.5, "logit_error": 1e-3, "same_tokens": 1.0}
    page = every_page([Results("h200", [cold, e2e])])
    assert (
        "| gdn | 3.8 s | 6.3 s |  | 2 |" in page
        and "| 512+128, gdn | 100 | 12.5 ms | 1.0e-03 |  |  | 100% |  |  |  |" in page
    )
    more = {"rms_error": 0.02, "decided": 0.25, "decided_plain": 0.5, "same_plain": 1.0, "same_all": 0.75}
    wrong = {x: value for x, value in e2e.items() if x not in ("tokens_per_s", "first_token_ms")}
    wrong |= {
        "provider": "fla",
        "ok": False,
        "errors": {"logits": 0.1},
        "share_of_limit": 0.5,
        "same_plain": 0.5,
    }
    page = every_page([Results("h200", [{**e2e, **more}, {**wrong, "decided_plain": 0.5}])])
    assert "| 100 | 12.5 ms | 1.0e-03 | 2.0e-02 | 25% | 100% | 50% | 100% | 75% |" in page
    assert "| 512+128, fla | wrong |  | 1.0e-03 |  |  | 100% | 50% | 50% |  |" in page
    assert "no time of FLA in 512+128: wrong, another token than the reference's" in page


def test_stages_say_what_is_inside():
    row = timed(workloads.PREFILL[-1], 1.0, ratio={"fla": 2.0}, best_chunk=32, inside="kernels")
    rows = [{**row, "pass": "stages", "case": f"16/16 16x16384 {stage}"} for stage in ("kkt", "solve")]
    page = every_page([Results("h200", rows)])
    assert "2 ms (2.00, chunks of 32)" in page and "inside the time of kkt, solve: kernels." in page


def test_only_what_stands_between_the_marks_is_made_anew():
    start, end = pages.MARKS
    assert pages.between(f"a\n{start}\nold\n{end}\nb", "new\n") == f"a\n{start}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match="expected a page with"):
        pages.between("a", "b")


# what is committed


def test_committed_pages_are_what_the_files_say():
    """A page names the number of rows that it is made from. If this fails, run `gdn bench plot`."""
    page = (measure.ROOT / "docs" / "results.md").read_text()
    limits = {name: int(count) for count, name in re.findall(r"(\d+) rows of ([\w-]+)\.jsonl", page)}
    found = pages.load(measure.RESULTS, limits)
    drawn = re.findall(r"^!\[(.*)\]\((results/.*)\)$", page, re.M)
    held = {x.name: [pair for pair in drawn if pair[1].startswith(f"results/{x.name}-")] for x in found}
    assert limits and pages.page(found, held) == page
    written = {path.stem: path.read_text() for path in (measure.ROOT / "docs" / "results").glob("*.md")}
    assert written == pages.pass_pages(found, held)
    readme = (measure.ROOT / "README.md").read_text()
    assert pages.between(readme, summary.readme(found)) == readme


def test_every_part_of_the_benchmark_is_named():
    line = re.search(r"make bench-gpu PART=.*", (measure.ROOT / "docs" / "measuring.md").read_text())[0]
    parts = re.search(r"# parts of .*: (.*)", (measure.ROOT / "Makefile").read_text())[1].split()
    assert set(parts) == {*commands.HELP, "accuracy"} and all(part in line for part in parts)


# pictures


def test_every_picture_is_drawn_from_a_full_file(folder):
    (one,) = pages.load(folder)
    drawn = pictures.draw(one, folder / "pictures")
    drawn_jobs = {f"ratios-{job}" for job in ("prefill", "train", "decode")}
    absent = {kind for kind in pictures.PICTURES if kind.startswith("ratios-")} - drawn_jobs
    assert {file for _, file in drawn} == {f"h200-{kind}.svg" for kind in set(pictures.PICTURES) - absent}
    for _, file in drawn:
        text = (folder / "pictures" / file).read_text()
        dtype = "float32" if file.endswith("links.svg") else "bfloat16"
        assert "<svg" in text and "NVIDIA H200" in text and f"{dtype}, 2026-11-21" in text


@pytest.mark.slow
def test_pictures_of_an_untouched_clone_stay_as_they_are(tmp_path):
    """Draw again what another machine drew: no file is written."""
    import matplotlib

    committed = measure.ROOT / "docs" / "results"
    (drawn_by,) = {re.search(r"Matplotlib v([\d.]+)", x.read_text())[1] for x in committed.glob("*.svg")}
    if drawn_by != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {drawn_by}, whose layout differs from {matplotlib.__version__}'s")
    page, readme = tmp_path / "results.md", tmp_path / "README.md"
    shutil.copytree(committed, tmp_path / "results")
    shutil.copy(measure.ROOT / "README.md", readme)
    drawn = lambda: {x: (x.read_bytes(), x.stat().st_mtime_ns) for x in (tmp_path / "results").glob("*.svg")}  # noqa: E731
    before = drawn()
    arguments = ["--results", str(measure.RESULTS), "--page", str(page), "--readme", str(readme)]
    assert CliRunner().invoke(build_app(), ["bench", "plot", *arguments]).exit_code == 0
    after = drawn()
    assert [path.name for path in before | after if before.get(path) != after.get(path)] == []


def test_a_picture_is_written_where_it_differs(tmp_path):
    from matplotlib.figure import Figure

    def draw(y):
        figure = Figure(figsize=(2, 2))
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, y])
        axes.set_ylim(0, 3)
        picture_files.save_svg(figure, tmp_path / "x.svg")
        picture_files.save_png(figure, tmp_path / "x.png", 100)
        return [(tmp_path / name).stat().st_mtime_ns for name in ("x.svg", "x.png")]

    first = draw(1.0)
    # in the sixth decimal of a coordinate
    assert draw(1.0 + 1e-7) == first
    assert all(x != y for x, y in zip(draw(1.5), first, strict=True))


@pytest.mark.parametrize(
    "a, b, same",
    [
        ("M 52.629146 16.598677", "M 52.629145 16.598678", True),
        ("M 52.63", "M 52.629999", True),
        ("M 52.629146", "M 52.639146", False),
        # labels have few decimals
        ("<text>0.0001</text>", "<text>0.0002</text>", False),
        ("M 1 2", "M 1 2 3", False),
        ("M 1 2", "L 1 2", False),
        ("Matplotlib v3.11.2, ", "Matplotlib v3.12.0, ", True),
    ],
)
def test_noise_of_coordinates_is_no_difference(a, b, same):
    assert picture_files.equal_svg(a, b) == same


def test_nothing_is_drawn_from_nothing():
    assert all(make(Results("x", [])) is None for _, make in pictures.PICTURES.values())


def test_lines_go_through_the_numbers():
    rows = [
        timed(t, 1.0, p) for t in workloads.PREFILL for p in ("gdn", "fla") if t.name.startswith("16/32 1x")
    ]
    figure = pictures.lengths(Results("h200", rows))
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Speed against sequence length: NVIDIA H200, bfloat16, 2026-11-21"
    assert [line.get_label() for line in axes.lines] == ["gdn", "FLA"]
    assert list(axes.lines[0].get_xdata()) == [2048, 8192, 32768]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([2.048, 8.192, 32.768])


def test_points_lie_under_the_roof(folder):
    (one,) = pages.load(folder)
    axes = pictures.roofline(one).axes[0]
    copy, matmul = one.ceilings
    points = [xy for c in axes.collections for xy in c.get_offsets()]
    assert len(points) == sum(row["pass"] in ("prefill", "train") for row in one.rows)
    assert all(y <= min(x * copy / 1e3, matmul) * 1.001 for x, y in points)


def test_every_ratio_is_a_number_in_the_table(folder):
    """Write each ratio in its cell, bold where gdn is slower."""
    (one,) = pages.load(folder)
    for job in ("prefill", "train", "decode"):
        axes = pictures.ratios(one, job=job).axes[0]
        wanted = sorted(f"{x:.2f}" for row in one.ours(job) for x in row.get("ratio", {}).values())
        assert sorted(text.get_text() for text in axes.texts) == wanted != []
    slow = timed(workloads.TRAIN[0], 1.0, ratio={"fla": 0.8, "flash_qla": 1.6})
    axes = pictures.ratios(Results("h200", [slow]), job="train").axes[0]
    one_number = timed(workloads.TRAIN[0], 1.0, ratio={"fla": 0.8})
    assert pictures.ratios(Results("h200", [one_number]), job="train") is None
    assert {text.get_text(): text.get_weight() for text in axes.texts} == {"0.80": "bold", "1.60": "normal"}


def test_ways_of_speculation_are_columns():
    head = {**ABOUT, "pass": "spec", "provider": "gdn", "ms": 1.0, "dtype": "bfloat16"}
    rows = [
        {**head, "case": case, "ratio": {"flashinfer": x}}
        for case, x in (("B=1 T=4 fp32 chunk final", 0.8), ("B=1 T=16 fp32 states", 2.0))
    ]
    axes = pictures.ratios(Results("h200", rows), job="spec").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["B=1 T=4", "B=1 T=16"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["fp32\nchunk final", "fp32\nstates"]
    # of several peers the fastest
    rows[0]["ratio"] = {"fla": 1.5, "flashinfer": 1.25, "flash_qla": 3.0}
    axes = pictures.ratios(Results("h200", rows), job="spec").axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["1.25", "2.00"]


def test_distributions_have_their_limits():
    assert pictures.limit("mild", "o") == 5e-3 and pictures.limit("mild identical keys", "dg") == 6e-2


def test_the_command_makes_them_all(folder):
    readme = folder / "README.md"
    readme.write_text("\n".join(pages.MARKS))
    page = folder / "docs" / "results.md"
    page.parent.mkdir()
    arguments = ["bench", "plot", "--results", str(folder), "--page", str(page), "--readme", str(readme)]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    assert "| prefill: forward, packed |" in readme.read_text() and readme.read_text() in "\n".join(
        [pages.MARKS[0], summary.readme(pages.load(folder)) + pages.MARKS[1]]
    )
    for path in re.findall(r"\]\((results/[^)]*)\)", page.read_text()):
        assert (page.parent / path).exists()
    assert (
        CliRunner().invoke(build_app(), ["bench", "plot", "--results", str(folder / "docs")]).exit_code == 2
    )
