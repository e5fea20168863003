"""Cases by name, results read again, and two states of the library side by side."""

import subprocess
from pathlib import Path

import pytest
import torch

import gdn
from gdn.testing import cases
from gdn_bench.judging import pto
from gdn_bench.passes import step
from gdn_bench.problems import catalog, workloads
from gdn_bench.results import compare, rows
from gdn_bench.timing import measure, processes


def row(case="16/32 1x8192", provider="gdn", ms=1.0, **others):
    found = {"pass": "prefill", "case": case, "provider": provider, "dtype": "bfloat16", "state": "fp32"}
    return found | ({} if ms is None else {"ms": ms}) | others


# cases


def test_names_are_problems():
    for name in catalog.SETS["all"]:
        case = catalog.case(name)
        assert f"{case.heads[0]}/{case.heads[1]}" == name.split()[0] and case.heads[1] % case.heads[0] == 0
        assert case.lengths.B == 1 and case.lengths.ends[-1] == case.lengths.T
    assert catalog.case("8/24 short ladder").lengths is cases.SHORT_LADDER
    assert catalog.case(catalog.PTO).lengths.T == 262144 and catalog.case(catalog.PTO).lengths.N == 16
    assert {catalog.heads(name)[1] for name in catalog.PTO_GVA} == {16, 32, 48, 64}
    prompts = torch.tensor(catalog.case("16/32 1000 prompts").lengths.ends).diff()
    assert len(prompts) == 1000 and set(prompts.tolist()) == set(range(1, 301))
    few = {"256 prompts": (1, 64), "300 prompts": (1, 300), "32 prompts": (100, 2000)}
    for name, (least, most) in few.items():
        prompts = torch.tensor(catalog.case(f"2/8 {name}").lengths.ends).diff()
        assert (
            len(prompts) == int(name.split()[0]) and least <= int(prompts.min()) <= int(prompts.max()) <= most
        )
    assert [L.T for L in pto.LENGTHS][-1] == 4096 and len(pto.LENGTHS) == 15


@pytest.mark.parametrize("wrong", ["", "16", "16/32", "16/32 4", "x/y 4x8", "16/32 tall ladder"])
def test_what_is_no_name_is_refused(wrong):
    with pytest.raises(ValueError, match="expected H/HV"):
        catalog.case(wrong)


def test_sets_hold_the_table_and_the_family():
    assert {t.name for t in workloads.PREFILL} == set(catalog.TABLE)
    assert {name.split()[0] for name in catalog.SETS["family"]} == set(catalog.FAMILY)
    assert {name.partition(" ")[2] for name in catalog.SETS["lengths"]} == set(catalog.SEQUENCES)
    assert tuple(dict.fromkeys(t.case.lengths.B for t in workloads.DECODE)) == catalog.BATCHES
    assert step.SHAPE.rows == catalog.BATCHES
    found = workloads.choose_workloads("train", ["16/32 1x8192", "16/48 long ladder"])
    assert found[0] == workloads.TRAIN[0] and found[1].cost.bytes > 0


# files


def test_results_that_are_kept_can_be_read():
    found = rows.read(*sorted(measure.RESULTS.glob("*.jsonl")))
    wanted = {"versions", "commit", "date", "backend"}
    assert found and all(
        wanted <= set(x) and ("ms" not in x or x["p20"] <= x["ms"] <= x["p80"]) for x in found
    )


def test_a_line_that_is_no_row_is_named(tmp_path):
    file = tmp_path / "x.jsonl"
    for line in ("{", "[]", '{"pass": "prefill"}'):
        file.write_text(line + "\n")
        with pytest.raises(ValueError, match="x.jsonl:1: expected a row"):
            rows.read(file)


def test_what_is_done_hangs_on_commit_and_gpu():
    about = {"commit": "abc", "gpu": "H200"}
    found = [row(**about), row("2/8 1x8192", commit="abd", gpu="H200"), row("x", commit="abc", gpu="H100")]
    assert rows.done(found, about) == {("prefill", "16/32 1x8192", "gdn", "bfloat16")}
    assert rows.done(found, about | {"commit": "abc+"}) == rows.done(found, about | {"commit": None}) == set()


# comparisons


def verdicts(before, after, **options):
    return [change.verdict for change in compare.changes(before, after, **options)]


def test_five_percent_decide():
    assert verdicts([row(ms=1.0)], [row(ms=1.049)]) == ["same"]
    assert verdicts([row(ms=1.0)], [row(ms=1.051)]) == ["slower"]
    assert verdicts([row(ms=1.051)], [row(ms=1.0)]) == ["faster"]
    assert verdicts([row(ms=1.0)], [row(ms=1.051)], threshold=0.1) == ["same"]


def test_a_time_that_is_gone_is_lost():
    wrong = row(ms=None, ok=False, errors={"o": 1.0})
    assert verdicts([row()], [wrong]) == ["lost"] and compare.is_regression(compare.changes([row()], [wrong]))
    assert verdicts([wrong], [row()]) == ["new"]
    assert verdicts([row()], [row("another")]) == []
    assert verdicts([row(ms=2.0), wrong], [row()]) == ["new"]


def test_runs_of_one_thing_are_one_median():
    assert verdicts([row(ms=1.0), row(ms=9.0), row(ms=1.1)], [row(ms=1.12)]) == ["same"]


def test_only_ours_can_regress():
    found = compare.changes([row(provider="fla")], [row(provider="fla", ms=2.0)])
    assert found[0].verdict == "slower" and not compare.is_regression(found)


def test_a_slower_machine_is_not_a_slower_library():
    before = [row(), row(provider="fla", ms=2.0)]
    after = [row(ms=1.5), row(provider="fla", ms=3.0)]
    assert verdicts(before, after) == ["slower", "slower"] and verdicts(before, after, by="fla") == ["same"]
    assert compare.changes(before, after, by="fla")[0].before == pytest.approx(0.5)
    assert verdicts([row()], [row()], by="fla") == []


def test_ours_is_ours_by_any_name():
    before, after = [row(provider="gdn:triton")], [row(ms=2.0)]
    assert verdicts(before, after) == ["slower"] and compare.changes(before, after)[0].what[2] == "gdn"
    both = [row(provider="gdn:eager", ms=9.0), row(provider="gdn:triton")]
    assert verdicts(both, both) == ["same", "same"] and verdicts(both, [row(provider="gdn:hopper")]) == []


def test_a_file_holds_many_commits(tmp_path):
    file = tmp_path / "x.jsonl"
    measure.append(file, [row(commit="a"), row(commit="b", ms=2.0)])
    before, after = compare.sides((f"{file}@a", f"{file}@b"), [])
    assert verdicts(before, after) == ["slower"]
    with pytest.raises(ValueError, match="expected rows in"):
        compare.recorded(f"{file}@c")
    with pytest.raises(ValueError, match="expected two files"):
        compare.sides((str(file), "HEAD"), [])


@pytest.fixture
def repository(tmp_path):
    """Make a repository whose first commit holds the package in gdn, the second in src/gdn."""
    home = tmp_path / "repository"
    git = ["git", "-C", str(home), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "init", "-q", str(home)], check=True)
    for speed, folder in (("1.0", home / "gdn"), ("2.0", home / "src" / "gdn")):
        (folder / "testing").mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "speed").write_text(speed)
        (folder / "testing" / "old.py").write_text("old")
        (folder / "cli.py").write_text("old")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
        if speed == "1.0":
            subprocess.run([*git, "rm", "-q", "-r", "gdn"], check=True)
    return home


def test_commits_are_measured_by_one_yardstick_in_turn(repository, monkeypatch):
    order = []

    def measured(home, name, arguments):
        order.append(name)
        package = home / "src" / "gdn"
        for part in ("testing/accuracy.py", "cli/console.py"):
            assert (package / part).read_text() == (Path(gdn.__file__).parent / part).read_text()
        assert arguments == ["prefill"] and not (home / "gdn").exists()
        assert not (package / "testing" / "old.py").exists() and not (package / "cli.py").exists()
        return [row(ms=float((package / "speed").read_text()))]

    (repository / "src" / "gdn" / "speed").write_text("3.0")
    monkeypatch.setattr(compare, "_measured", measured)
    reports = []
    found = compare.sides(
        ("HEAD~1", str(repository)),
        ["prefill"],
        rounds=2,
        root=repository,
        report=lambda *x: reports.append(x),
    )
    assert order == ["HEAD~1", str(repository), str(repository), "HEAD~1"]
    assert [x[1:3] for x in reports] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert verdicts(*found) == ["slower"] and compare.changes(*found)[0].ratio == pytest.approx(3.0)
    found = compare.sides(("HEAD", "HEAD~1"), ["prefill"], rounds=1, root=repository)
    assert compare.changes(*found)[0].ratio == pytest.approx(0.5)


def test_a_folder_may_have_either_layout(repository, tmp_path):
    for place in ("gdn", "src/gdn"):
        folder = tmp_path / place.replace("/", "-")
        (folder / place).mkdir(parents=True)
        (folder / place / "__init__.py").write_text(place)
        compare.checkout(str(folder), tmp_path / f"home-{folder.name}", repository)
        assert (tmp_path / f"home-{folder.name}" / "src/gdn/__init__.py").read_text() == place


def test_a_name_is_no_option_of_git(repository, tmp_path):
    """Refuse names that git would read as options: `git archive --output=FILE` writes a file."""
    aim = tmp_path / "written"
    for name in (f"--output={aim}", "-h", "--all", "no-such-commit", "", "HEAD:gdn", "HEAD HEAD"):
        with pytest.raises(ValueError, match="expected a results file, a checkout or a commit"):
            compare.checkout(name, tmp_path / "home", repository)
    assert not aim.exists()


def test_a_side_runs_its_own_package(tmp_path, monkeypatch):
    """Import the side's package though PYTHONPATH names another one, in its child processes as well."""
    package = tmp_path / "src" / "gdn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    bench = tmp_path / "benchmarks" / "gdn_bench"
    bench.mkdir(parents=True)
    (bench / "__init__.py").write_text("")
    (bench / "__main__.py").write_text(
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'import gdn; print(gdn.__file__)']\n"
        "file = subprocess.run(child, cwd='/', capture_output=True, text=True).stdout.strip()\n"
        "rows = dict(argument.split('=', 1) for argument in sys.argv if argument.startswith('--'))\n"
        'text = f\'{{"pass": "{rows["--commit"]}", "case": "{file}", "provider": "gdn"}}\'\n'
        "open(rows['--out'], 'w').write(text)\n"
    )
    monkeypatch.setattr(processes, "BENCHMARKS", bench.parent)
    (found,) = compare._measured(tmp_path, "-x y", ["prefill"])
    assert found["pass"] == "-x y" and found["case"] == str(package / "__init__.py")


def test_the_table_says_what_changed():
    table = compare.build_table(compare.changes([row(), row("b")], [row(ms=2.0), row("b", ms=None)]))
    slower, lost = table.lines
    assert len(table.columns) == len(slower) == len(lost)
    assert "slower" in slower[-1] and slower[-2] == "2" and "lost" in lost[-1]
