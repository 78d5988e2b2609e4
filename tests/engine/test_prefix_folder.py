"""Prefix cache on disk: hits after a restart are bit-identical; damaged or mismatched files are misses."""

from __future__ import annotations

import array
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.pairwise import slow_but
from support.pools import check_pool
from support.programs import started
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, NotSupported, SamplingParams
from verbatim.common import files as files_module

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
PROMPT = random_ids(70, seed=3)
Opens, Folders, Patch = Callable[..., LLM], Callable[[str], Path], pytest.MonkeyPatch


def result(llm: LLM, prompt: list[int] = PROMPT) -> tuple[Any, int]:
    """Return the completion with its log-probs, and the number of cached prompt tokens."""
    (found,) = llm.generate([prompt], GREEDY)
    (made,) = found.outputs
    return (made.token_ids, made.logprobs, made.top_logprobs), found.num_cached_tokens


@pytest.fixture
def open_(folders: Folders, tmp_path: Path) -> Opens:
    """Open a toy model with a prefix folder."""

    def open_toy(name: str = "llama", **options: Any) -> LLM:
        settings: dict[str, Any] = dict(
            block_size=8, max_sequences=8, max_length=128, kv_memory="64MB"
        )
        settings |= {"prefix_folder": tmp_path / "kept", **options}
        return LLM(folders(name), **settings)

    return open_toy


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "sliding window": ("mistral", {}),
    "MLA": ("deepseek_v3", {}),
    "indexer": ("deepseek_v32", {}),
    "experts": ("qwen3_moe", {}),
    "delta net": ("qwen3_5", {}),
    "Mamba-2": ("granite_dense", {}),
    "no attention": ("mamba", {}),
    "int8": ("llama", dict(kv_dtype="int8")),
    "int4 weights": ("llama", dict(quantization="int4")),
}


@pytest.mark.parametrize("kind", slow_but(["plain", "MLA", "experts", "delta net", "int8"], KINDS))
def test_every_cache_kind_survives_a_restart(kind: str, open_: Opens) -> None:
    name, options = KINDS[kind]
    with open_(name, **options) as llm:
        first = [result(llm, PROMPT[:n]) for n in (70, 70, 33)]
        assert first[0][1] == 0
    with open_(name, **options) as llm:
        again = [result(llm, PROMPT[:n]) for n in (70, 33)]
        assert [made for made, _ in again] == [first[0][0], first[2][0]]
        assert again[0][1] == first[1][1] > 0
        assert llm.stats()["prefix_folder"]["hits"] > 0


def test_folder_stays_the_same_when_the_working_directory_changes(
    open_: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_(prefix_folder="kept") as llm:
        monkeypatch.chdir("/")
        result(llm)
    with open_() as llm:
        assert result(llm)[1] > 0


def test_next_conversation_turn_hits_the_saved_prefix(open_: Opens) -> None:
    params = GREEDY.replace(max_tokens=30)
    with open_("qwen3_5") as llm:
        (found,) = llm.generate([PROMPT], params)
        turn = PROMPT + found.outputs[0].token_ids[:20] + [5, 6, 7]
    with LLM(llm.name, prefix_cache=False) as plain:
        expected, _ = result(plain, turn)
    with open_("qwen3_5") as llm:
        made, cached = result(llm, turn)
        assert made == expected and cached >= 64


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    spoilt = {
        "truncated": data[:middle],
        "empty": b"",
        "longer": data + b"x",
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "zeros": bytes(len(data)),
    }
    path.write_bytes(spoilt[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "longer", "flipped", "zeros", "external"])
def test_damaged_file_is_a_miss_and_is_rewritten(how: str, open_: Opens, tmp_path: Path) -> None:
    with open_() as llm:
        first, _ = result(llm)
    kept = files(tmp_path)  # the last block first
    if how == "external":  # an intact file under the name of another
        kept[0].write_bytes(kept[1].read_bytes())
        kept[3].write_bytes(kept[1].read_bytes())
    else:
        spoil(kept[0], how)
        spoil(kept[3], how)
    with open_() as llm:
        again, cached = result(llm)
        assert again == first and cached < 64
    with open_() as llm:
        again, cached = result(llm)
        assert again == first and cached == 64


def test_other_settings_or_salt_are_a_miss(open_: Opens) -> None:
    with open_() as llm:
        result(llm)
    others = dict(
        block_size=4, dtype="bfloat16", kv_dtype="int8", quantization="int8", name="qwen2"
    )
    for option, value in others.items():
        with open_(**{option: value}) as llm:
            assert result(llm)[1] == 0
    with open_() as llm:
        salted = GREEDY.replace(cache_salt="another tenant")
        (found,) = llm.generate([PROMPT], salted)
        assert found.num_cached_tokens == 0


def scale_norm(path: Path) -> None:
    """Change the weights in a file."""
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})


def test_other_weights_under_the_same_name_are_a_miss(open_: Opens, folders: Folders) -> None:
    """Even if the size and the modification time of the weights file stay the same."""
    with open_("qwen2") as llm:
        result(llm)
    path = folders("qwen2") / "model.safetensors"
    before = path.stat()
    scale_norm(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with open_("qwen2") as llm:
        assert result(llm)[1] == 0


def test_other_weights_in_a_subfolder_are_a_miss(tmp_path: Path) -> None:
    folder, settings = tmp_path / "model", dict(block_size=8, prefix_folder=tmp_path / "kept")
    make_toy("llama").save_pretrained(folder)
    (folder / "inside").mkdir()
    path = (folder / "model.safetensors").rename(folder / "inside" / "weights.safetensors")
    config = json.loads((folder / "config.json").read_text())
    named = {"transformers_weights": "inside/weights.safetensors"}
    (folder / "config.json").write_text(json.dumps(config | named))
    (folder / "model.safetensors").write_bytes(path.read_bytes())  # a decoy, which is not read
    with LLM(folder, **settings) as llm:  # type: ignore[arg-type]
        result(llm)
    scale_norm(path)
    with LLM(folder, **settings) as llm:  # type: ignore[arg-type]
        assert result(llm)[1] == 0


def test_changed_sampling_defaults_keep_prefixes_valid(open_: Opens, folders: Folders) -> None:
    with open_("phi3") as llm:
        result(llm)
    path = folders("phi3") / "generation_config.json"
    path.write_text(path.read_text() + "\n")
    with open_("phi3") as llm:
        assert result(llm)[1] > 0


def test_updated_weights_neither_read_nor_write_prefixes(open_: Opens, tmp_path: Path) -> None:
    with open_() as llm:
        first, _ = result(llm)
    kept = {path: path.read_bytes() for path in files(tmp_path)}
    with open_() as llm:
        new = {name: p * 1.5 for name, p in llm.engine.runner.module.named_parameters()}  # type: ignore[attr-defined]
        llm.update_weights(new)
        changed, cached = result(llm)
        assert changed != first and cached == 0
        result(llm, PROMPT[::-1])
        assert llm.stats()["prefix_folder"]["off"] == "the weights were updated"
    assert {path: path.read_bytes() for path in files(tmp_path)} == kept
    with open_() as llm:
        assert result(llm) == (first, 64)


def test_budget_is_kept_and_first_blocks_stay_longest(open_: Opens, tmp_path: Path) -> None:
    with open_() as llm:
        result(llm)
    size = files(tmp_path)[0].stat().st_size
    with open_(prefix_folder_bytes=12 * size) as llm:
        other, _ = result(llm, PROMPT[::-1])  # the same number of blocks
    assert len(files(tmp_path)) <= 12
    with open_(prefix_folder_bytes=12 * size) as llm:
        again, cached = result(llm, PROMPT[::-1])
        assert again == other and 0 < cached < 64
        assert 0 < result(llm)[1] < 64
    with open_(prefix_folder_bytes=5 * size) as llm:
        assert len(files(tmp_path)) <= 5
    (tmp_path / "folder.kv").mkdir()  # not a prefix file
    with open_(prefix_folder_bytes=size - 1) as llm:
        (tmp_path / "folder.kv").rmdir()
        assert not files(tmp_path)
        result(llm)
    assert not files(tmp_path)


def test_full_disk_ends_writing_with_one_warning(
    open_: Opens, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_full(*args: Any, **kwargs: Any) -> Any:
        file = open(*args, **kwargs)  # noqa: SIM115
        file.write = full
        return file

    with open_() as llm:
        first, _ = result(llm)
        monkeypatch.setattr(files_module, "open", open_full, raising=False)
        other, _ = result(llm, PROMPT[::-1])
        assert result(llm, PROMPT[1:])[1] == 0
    assert [record.name for record in caplog.records] == ["verbatim"]
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / "kept").glob("*.part"))
    monkeypatch.undo()
    with open_() as llm:
        assert result(llm)[0] == first
        assert result(llm, PROMPT[::-1])[0] == other


def fail(*_: Any) -> Any:
    raise RuntimeError("no such block")


def test_any_error_of_reading_the_cache_ends_writing_with_one_warning(
    open_: Opens, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_() as llm:
        monkeypatch.setattr(llm.engine.runner, "read_cache", fail)
        result(llm)
        result(llm, PROMPT[::-1])
        llm.sleep()  # which writes the rest first
        assert "no such block" in llm.stats()["prefix_folder"]["off"]
    assert [record.name for record in caplog.records] == ["verbatim"]


def test_failed_restore_of_a_prefix_frees_its_blocks(open_: Opens, monkeypatch: Patch) -> None:
    with open_() as llm:
        expected, _ = result(llm)
    with open_() as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "write_cache", fail)
            with pytest.raises(RuntimeError, match="no such block"):
                result(llm)
        assert llm.stats()["blocks_used"] == 0
        assert result(llm)[0] == expected


def test_two_engines_share_a_folder(open_: Opens, tmp_path: Path) -> None:
    with open_() as one, open_() as two:
        first, _ = result(one)
        assert result(two) == (first, 0) or result(two) == (first, 64)
        other, _ = result(two, PROMPT[::-1])
    assert len(files(tmp_path)) == 18
    with open_() as one, open_() as two:
        assert result(one) == result(two) == (first, 64)
        for path in files(tmp_path):  # like another process with a smaller budget
            path.unlink()
        assert result(two, PROMPT[::-1]) == (other, 0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(prefix_folder=5), InvalidRequest, "prefix_folder=5: must be a path"),
        (dict(prefix_folder=""), InvalidRequest, "must be a path"),
        (dict(prefix_folder="a\0b"), InvalidRequest, "must be a path"),
        (dict(prefix_cache=False), InvalidRequest, "prefix_cache=False"),
        (dict(prefix_folder_bytes="much"), InvalidRequest, "prefix_folder_bytes='much'"),
        (dict(trust_remote_code=True), NotSupported, "trust_remote_code"),
    ],
)
def test_invalid_options_are_rejected(
    options: dict[str, Any], error: type[Exception], match: str, open_: Opens
) -> None:
    with pytest.raises(error, match=match):
        open_(**options)


def test_live_module_and_unsafe_folder_are_rejected(open_: Opens, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="live module"):
        LLM(make_toy("llama"), prefix_folder=tmp_path / "kept")
    (tmp_path / "kept").mkdir(mode=0o755)
    with pytest.raises(InvalidRequest, match="chmod 700"):
        open_()
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").touch()
    with pytest.raises(InvalidRequest, match="File exists"):
        open_()


def test_stale_temporary_files_are_deleted(open_: Opens, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    old, new, other = (tmp_path / "kept" / name for name in ("a.part", "b.part", "notes.txt"))
    for path in (old, new, other):
        path.touch()
    os.utime(old, (1, 1))
    os.utime(other, (1, 1))
    with open_(prefix_folder_bytes=1):
        assert not old.exists() and new.exists() and other.exists()


def test_file_names_and_contents_hold_no_token_ids(open_: Opens, tmp_path: Path) -> None:
    with open_() as llm:
        result(llm)
    kept = files(tmp_path)
    assert len(kept) == 9 and all(re.fullmatch(r"[0-9a-f]{64}\.kv", path.name) for path in kept)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*kept, tmp_path / "kept"])
    ids = array.array("q", PROMPT[:4]).tobytes()
    assert not any(ids in path.read_bytes() for path in kept)


def test_full_pool_keeps_results_and_limits_folder_hits(open_: Opens) -> None:
    with open_() as llm:
        expected = [result(llm, random_ids(70, seed)) for seed in range(4)]
    per_token = 3 * 2 * 2 * 16 * 4
    with open_(kv_memory=per_token * 8 * 21, max_sequences=3) as llm:
        prompts = [random_ids(70, seed) for seed in range(4)]
        found = llm.generate(prompts * 2, GREEDY)
        made = [(o.token_ids, o.logprobs, o.top_logprobs) for r in found for o in r.outputs]
        assert made == [first for first, _ in expected] * 2
        stats = llm.stats()["prefix_folder"]
        assert 0 < stats["hits"] <= 8 * 8
        check_pool(llm.engine.scheduler.pool)


KILLED = """
import sys
from verbatim import LLM, SamplingParams
llm = LLM(sys.argv[1], block_size=4, prefix_folder=sys.argv[2], max_length=128, kv_memory="64MB")
params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
for seed in range(10_000):
    llm.generate([[3 + (seed * 31 + i * i) % 100 for i in range(70)]], params)
    print(seed, flush=True)
"""


@pytest.mark.slow
def test_killed_processes_leave_whole_files(open_: Opens, folders: Folders, tmp_path: Path) -> None:
    prompts = [[3 + (seed * 31 + i * i) % 100 for i in range(70)] for seed in range(3)]
    with LLM(folders("llama"), prefix_cache=False) as llm:
        expected = [result(llm, prompt)[0] for prompt in prompts]
    command = [sys.executable, "-c", KILLED, str(folders("llama")), str(tmp_path / "kept")]
    for _ in range(2):  # two processes at a time
        program = partial(started, command, stdout=subprocess.PIPE, text=True)
        with program() as one, program() as other:
            for each in (one, other):
                assert each.stdout is not None and "4\n" in each.stdout
    assert any(path.suffix == ".kv" for path in files(tmp_path))
    assert len([path for path in files(tmp_path) if path.suffix == ".part"]) <= 4
    with open_(block_size=4) as llm:
        found = [result(llm, prompt) for prompt in prompts]
        assert [made for made, _ in found] == expected
        assert sum(cached for _, cached in found) > 0
        assert llm.stats()["prefix_folder"]["off"] is None
