"""Test `gdn info --engines`: who serves each phase, what changes it, and the counts of other processes."""

import json

import pytest
from kit import forks

from gdn.integrations import engine_report, sglang_dispatch, usage, vllm_layer

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "lmdeploy": "0.18.0"}
HOPPER, AMPERE = ((9, 0), 13), ((8, 0), 13)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Forget counts, and set no variable that decides."""
    for name in ("GDN_ENGINES", "GDN_CALLS", "VLLM_GDN_DECODE_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vllm_layer, "is_registered", lambda: False)
    usage.reset()
    yield
    usage.reset()


def served(gpu, **options):
    rows, _ = engine_report.report(VERSIONS, gpu, **options)
    return {(row.engine, row.phase): row for row in rows if row.layer == engine_report.RULE}


def test_without_a_setting_the_engines_serve(monkeypatch):
    rows = served(HOPPER)
    assert len(rows) == 9 and not any(row.server == "gdn" for row in rows.values())
    assert rows["vllm", "prefill"].server == "vllm: FlashInfer"
    assert rows["vllm", "verify"].server == "vllm: CUDA operator"
    assert "--gdn-prefill-backend triton" in rows["vllm", "prefill"].setting
    assert rows["sglang", "prefill"].server == "sglang: FlashInfer, for some models"
    assert served(AMPERE)["vllm", "prefill"].server == "vllm: Triton"
    assert served(AMPERE)["sglang", "prefill"].server == "sglang: Triton"
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "triton")
    assert served(HOPPER)["vllm", "verify"].server == "vllm: Triton"
    assert all("GDN_ENGINES" in row.setting for (name, _), row in rows.items() if name != "lmdeploy")
    assert "PytorchEngineConfig" in rows["lmdeploy", "decode"].setting


def channels(gpu, layer=engine_report.CHANNEL):
    rows, _ = engine_report.report(VERSIONS, gpu)
    return {(row.engine, row.phase): row for row in rows if row.layer == layer}


def test_layers_with_a_decay_per_key_channel_have_rows_of_their_own(monkeypatch):
    """Engines that have such models: who serves them, which setting changes it, and counts of their own."""
    rows = channels(HOPPER)
    assert len(rows) == 6 and "lmdeploy" not in {engine for engine, _ in rows}
    assert not any(row.server == "gdn" for row in rows.values())
    assert "FlashKDA" in rows["vllm", "prefill"].server
    assert channels(AMPERE)["vllm", "prefill"].server == "vllm: Triton"
    assert rows["sglang", "verify"].server == "sglang: Triton"
    assert "verify-backend gdn" in rows["sglang", "verify"].setting
    rows = channels(((10, 0), 13))
    assert rows["sglang", "prefill"].server == "sglang: FlashInfer, with a lower bound"
    assert rows["sglang", "verify"].server == "sglang: CuTe DSL, for some models"
    kimi = channels(HOPPER, engine_report.KIMI_K3)
    assert {engine for engine, _ in kimi} == {"vllm", "sglang"}
    assert kimi["sglang", "decode"].server == "sglang: fused kernel"
    own = [kimi["vllm", phase].server for phase in usage.ROLES]
    assert own == ["vllm: FlashKDA", "vllm: fused kernel", "vllm: Triton"]
    monkeypatch.setenv("GDN_ENGINES", "vllm,sglang")
    usage.count_served("sglang", usage.CHANNEL_ROLES["verify"])
    rows = channels(HOPPER)
    kimi = channels(HOPPER, engine_report.KIMI_K3)
    assert {table["vllm", phase].server for phase in usage.ROLES for table in (rows, kimi)} == {"gdn"}
    assert "latency_specialized" in kimi["vllm", "decode"].setting
    assert (rows["sglang", "verify"].server, rows["sglang", "verify"].calls) == ("gdn", 1)
    assert served(HOPPER)["sglang", "verify"].calls == 0
    assert rows["sglang", "prefill"].setting == "--linear-attn-prefill-backend gdn"


def test_the_plugin_serves_vllm_whatever_its_flags_are(monkeypatch):
    monkeypatch.setenv("GDN_ENGINES", "vllm,sglang")
    rows = served(HOPPER)
    assert {rows["vllm", phase].server for phase in usage.ROLES} == {"gdn"}
    assert rows["sglang", "decode"].setting == "--linear-attn-decode-backend gdn"


def test_counts_of_another_process(monkeypatch, tmp_path):
    """A process writes what gdn served and what it rejected; the command adds them up."""
    code = (
        "from gdn.integrations import usage, fallback\n"
        "for _ in range(5): usage.count_served('sglang', 'decode')\n"
        "usage.count_served('sglang', 'verify')\n"
        "def serve(): raise ValueError('k: expected this')\n"
        "for _ in range(3): fallback.call_with_fallback('Kernel.extend', serve, int)\n"
    )
    monkeypatch.setenv("GDN_CALLS", str(tmp_path))
    forks.python("-c", code, check=True)
    # of a second process
    (file,) = tmp_path.glob("*.json")
    (tmp_path / "2.json").write_text(file.read_text())
    rows, rejected = engine_report.report(VERSIONS, HOPPER)
    calls = {(row.engine, row.phase): (row.server, row.calls) for row in rows if row.calls}
    assert calls == {("sglang", "decode"): ("gdn", 10), ("sglang", "verify"): ("gdn", 2)}
    assert rejected == {("Kernel.extend", "k: expected this"): 6}


def test_a_server_that_is_killed_has_written_its_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("GDN_CALLS", str(tmp_path))
    for _ in range(9):
        usage.count_served("vllm", "decode")
    (file,) = tmp_path.glob("*.json")
    # at 1, 2, 4 and 8 calls, and at the end of the process
    assert json.loads(file.read_text())["served"] == [["vllm", "decode", 8]]
    usage.write()
    assert json.loads(file.read_text())["served"] == [["vllm", "decode", 9]]


def test_the_table_of_reasons_stays_small():
    """Reasons contain shapes, so there may be as many as there are batches."""
    for n in range(300):
        usage.count_rejected("f", f"q: expected 1, got {n}")
    assert len(usage.rejected) == 257 and usage.rejected["f", "other reasons"] == 44


@pytest.mark.parametrize("engine, module", [("vllm", vllm_layer), ("sglang", sglang_dispatch)])
def test_a_patch_names_the_flags(monkeypatch, engine, module):
    """On a GPU where an engine's default is another kernel, patch_... warns and names the flag."""
    from gdn.integrations import sglang, vllm

    adapter = {"vllm": vllm, "sglang": sglang}[engine]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(adapter.PACKAGE, "patch", lambda: "patched")
    with pytest.warns(UserWarning) as found:
        assert getattr(adapter, f"patch_{engine}")() == "patched"
    assert any("FlashInfer unless" in str(w.message) and "-backend triton" in str(w.message) for w in found)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "triton")
    assert module.needed_flags((8, 0), 13) == []
