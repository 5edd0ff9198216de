"""The builder of the development cluster's programs: when it rebuilds, and what a failure leaves."""

import hashlib
import io
import json
import os
import re
import tarfile
import threading
import time
from pathlib import Path

import pytest

from deploy.devcluster.builder import cache, gobuild, modules, process, tools
from deploy.devcluster.builder.archive import ImageConfig, LayerEntry, archive_at
from deploy.devcluster.builder.errors import BuildError
from deploy.devcluster.builder.paths import Paths, find_paths
from deploy.devcluster.builder.progress import Reporter
from deploy.devcluster.builder.toolchain import Toolchain, find_or_install
from tests.support.devcluster import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
DEVCLUSTER = ROOT / "deploy" / "devcluster"


def nothing() -> None:
    """Do nothing; for callbacks whose call does not matter."""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "module"
    write(
        folder,
        main_DOT_go="package main\nfunc main() {}\n",
        go_DOT_mod="module m\n\ngo 1.26.0\n",
        data_DOT_txt="x",
    )
    write(folder, other__go_DOT_mod="module other\n", other__o_DOT_go="package other\n")
    return folder


@pytest.mark.unit
@pytest.mark.parametrize("name", ["main.go", "go.mod", "data.txt", "internal/new.go"])
def test_key_changes_with_every_source(sources: Path, name: str) -> None:
    before = cache.content_key(sources, ["go1.26"])
    (sources / name).parent.mkdir(exist_ok=True)
    (sources / name).write_text("changed")
    assert cache.content_key(sources, ["go1.26"]) != before


@pytest.mark.unit
@pytest.mark.parametrize("name", ["main_test.go", "README.md", "tool.py", "other/o.go", ".hidden"])
def test_key_ignores_what_is_not_compiled(sources: Path, name: str) -> None:
    before = cache.content_key(sources, ["go1.26"])
    (sources / name).write_text("changed")
    assert cache.content_key(sources, ["go1.26"]) == before


@pytest.mark.unit
def test_key_depends_on_settings_and_not_on_how_they_are_cut(sources: Path) -> None:
    keys = {cache.content_key(sources, settings) for settings in (["a", "b"], ["ab"], ["b", "a"], [])}
    assert len(keys) == 4


@pytest.mark.unit
def test_a_rename_changes_the_key(sources: Path) -> None:
    before = cache.content_key(sources, [])
    (sources / "data.txt").rename(sources / "data2.txt")
    assert cache.content_key(sources, []) != before


@pytest.mark.unit
def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise BuildError("no")

    with pytest.raises(BuildError):
        cache.build_once(tmp_path / "tool-1", fail, on_wait=nothing, on_found=nothing)
    assert [path.name for path in tmp_path.iterdir()] == [".tool-1.lock"]


@pytest.mark.unit
def test_entry_appears_only_when_complete_and_is_built_once(tmp_path: Path) -> None:
    entry, calls = tmp_path / "tool-1", 0
    (tmp_path / ".tool-1.tmp-left-by-a-killed-build").mkdir()

    def build(folder: Path) -> None:
        nonlocal calls
        calls += 1
        assert not entry.exists()
        (folder / "program").write_text("x")

    for _ in range(2):
        cache.build_once(entry, build, on_wait=nothing, on_found=nothing)
    assert calls == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tool-1.lock", "tool-1"]


@pytest.mark.unit
def test_builders_side_by_side_take_turns(tmp_path: Path) -> None:
    entry, inside, built = tmp_path / "tool-1", threading.Event(), []
    waited: list[str] = []

    def build(folder: Path) -> None:
        inside.set()
        # Ends only once the other builder has reported that it waits.
        deadline = time.monotonic() + PATIENCE_S
        while not waited and time.monotonic() < deadline:
            time.sleep(0.01)
        built.append(folder)

    def run() -> None:
        cache.build_once(entry, build, on_wait=lambda: waited.append("waits"), on_found=nothing)

    first, second = threading.Thread(target=run), threading.Thread(target=run)
    first.start()
    assert inside.wait(PATIENCE_S)
    second.start()
    first.join()
    second.join()
    assert len(built) == 1
    assert waited == ["waits"]


@pytest.mark.unit
def test_only_entries_unused_for_long_are_removed(tmp_path: Path) -> None:
    for name in (".gone.tmp-killed", "fresh", "old", "old-but-kept"):
        (tmp_path / name).mkdir()
    for name in (".gone.lock", ".old-but-kept.lock"):
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        if path.name != "fresh":
            os.utime(path, (0, 0))
    removed = cache.remove_unused(tmp_path, keep=[tmp_path / "old-but-kept"])
    assert removed == [tmp_path / ".gone.tmp-killed", tmp_path / "old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".old-but-kept.lock", "fresh", "old-but-kept"]


@pytest.mark.unit
def test_link_replaces_what_was_there(tmp_path: Path) -> None:
    at = tmp_path / "bin" / "tool"
    for target in ("a", "b"):
        (tmp_path / target).write_text(target)
        cache.link(tmp_path / target, at)
    assert at.read_text() == "b"
    assert list(at.parent.iterdir()) == [at]


@pytest.mark.unit
@pytest.mark.parametrize("profile", list(modules.Profile))
def test_every_module_of_a_profile_names_what_it_needs(profile: modules.Profile) -> None:
    for module in modules.MODULES_OF[profile]:
        assert modules.required_go(DEVCLUSTER / module.folder) >= (1, 26)
        assert module.programs


@pytest.mark.unit
@pytest.mark.parametrize("tool", list(modules.Tool))
def test_every_module_of_a_tool_names_what_it_needs(tool: modules.Tool) -> None:
    for module in modules.MODULES_OF_TOOL[tool]:
        folder = DEVCLUSTER / module.folder
        assert modules.required_go(folder) >= (1, 26)
        assert module.programs
        assert not module.cgo, "it runs wherever it was copied to"
        stamps = modules.version_ldflags(folder, module.stamp_versions)
        assert all(re.fullmatch(r"-X \S+=v\d+\.\d+\.\d+\S*", stamp) for stamp in stamps)


@pytest.mark.unit
def test_tool_directives_and_program_names_agree() -> None:
    tools_of_tests = [module for found in modules.MODULES_OF_TOOL.values() for module in found]
    for module in (modules.NODE, modules.KWOK, *tools_of_tests):
        text = (DEVCLUSTER / module.folder / "go.mod").read_text()
        block = (
            text.split("tool (")[1].split(")")[0]
            if "tool (" in text
            else text.split("tool ")[1].split("\n")[0]
        )
        assert sorted(line.rsplit("/", 1)[-1] for line in block.split()) == sorted(module.programs)


@pytest.mark.unit
def test_version_stamp_comes_from_go_mod(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module m\n\ngo 1.26.0\n\nrequire (\n\tk8s.io/kubernetes v1.36.3\n)\n")
    assert [flag.split("version.")[1] for flag in modules.kubernetes_ldflags(tmp_path)] == [
        "gitVersion=v1.36.3",
        "gitMajor=1",
        "gitMinor=36",
    ]
    stamps = (("main.version", "k8s.io/kubernetes"),)
    assert modules.version_ldflags(tmp_path, stamps) == ("-X main.version=v1.36.3",)
    (tmp_path / "go.mod").write_text("module m\n")
    with pytest.raises(ValueError, match=r"k8s\.io/kubernetes"):
        modules.kubernetes_ldflags(tmp_path)
    with pytest.raises(ValueError, match=r"does not require k8s\.io/kubernetes"):
        modules.version_ldflags(tmp_path, stamps)
    with pytest.raises(ValueError, match="go mod tidy"):
        modules.required_go(tmp_path)


@pytest.mark.unit
def test_cache_folder_follows_xdg_and_falls_back_into_the_clone(tmp_path: Path) -> None:
    found = find_paths(tmp_path / "clone", {"XDG_CACHE_HOME": str(tmp_path / "xdg")})
    assert found.tools == tmp_path / "xdg" / "zerotrain" / "tools"
    assert not found.cache_is_in_clone
    without_home = find_paths(tmp_path / "clone", {"XDG_CACHE_HOME": "/dev/null/nowhere"})
    assert without_home.cache == tmp_path / "clone" / "build" / "cache"
    assert without_home.cache_is_in_clone


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.unit
@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO(), 6), (Terminal(), 60)])
def test_progress_is_a_line_every_ten_seconds_or_redraws(stream: io.StringIO, shown: int) -> None:
    now = 0.0
    reporter = Reporter(stream=stream, clock=lambda: now)
    reporter.start("building x", upcoming=("y", "z"))
    stream.truncate(stream.seek(0))
    for second in range(1, 61):
        now = float(second)
        reporter.update(detail=f"package {second}", done=second, total=60)
    text = stream.getvalue()
    assert text.count("package") == shown
    if isinstance(stream, Terminal):
        assert "\n" not in text
        assert "[############............] 30/60" in text
    else:
        assert "60/60 package 60  1 min 00 s; next: y, z\n" in text


@pytest.mark.ranks
def test_failing_command_shows_its_last_lines(tmp_path: Path) -> None:
    script = "for i in $(seq 100); do echo line $i; done; exit 3"
    with pytest.raises(BuildError, match=r"(?s)ended with status 3.*line 71\n.*line 100"):
        process.run_streaming(
            ["sh", "-c", script], folder=tmp_path, environ=os.environ, on_line=print, on_tick=nothing
        )


@pytest.mark.ranks
@pytest.mark.parametrize("trap", ["exit 1", ""], ids=["by-interrupt", "ignores-interrupts"])
def test_interrupted_command_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    def interrupt(line: str) -> None:
        (tmp_path / "pid").write_text(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "STOP_TIMEOUT_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        process.run_streaming(
            ["sh", "-c", f"trap '{trap}' INT; echo $$; while :; do sleep 0.1; done"],
            folder=tmp_path, environ=os.environ, on_line=interrupt, on_tick=nothing,
        )  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def write_archive(path: Path, body: bytes) -> str:
    with archive_at(path) as writer:
        writer.add_layer("one", [LayerEntry(path="/a/b", mode=0o755, body=body)])
        return writer.finish(tag="localhost/x:1", config=ImageConfig(entrypoint=("/a/b",), user="1:1"))


@pytest.mark.unit
def test_equal_input_gives_the_same_archive(tmp_path: Path) -> None:
    first, second, other = tmp_path / "1.tar", tmp_path / "2.tar", tmp_path / "3.tar"
    assert write_archive(first, b"x") == write_archive(second, b"x") != write_archive(other, b"y")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.unit
def test_archive_is_what_image_importers_read(tmp_path: Path) -> None:
    identity = write_archive(tmp_path / "image.tar", b"body")
    with tarfile.open(tmp_path / "image.tar") as archive:
        members = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        content = {name: file.read() for name, file in members.items() if file is not None}
    (manifest,) = json.loads(content["manifest.json"])
    assert manifest == {"Config": f"{identity}.json", "RepoTags": ["localhost/x:1"], "Layers": ["one.tar"]}
    config = json.loads(content[manifest["Config"]])
    assert config["config"]["Entrypoint"] == ["/a/b"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(content['one.tar']).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(content["one.tar"])) as tree:
        (member,) = tree.getmembers()
    assert (member.name, member.mode, member.uid, member.gid, member.uname) == ("a/b", 0o755, 0, 0, "")


@pytest.mark.unit
def test_archive_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    write_archive(path, b"old")
    before = path.read_bytes()
    with pytest.raises(FileNotFoundError), archive_at(path) as writer:
        writer.add_layer(
            "one", [LayerEntry(path="/a", body=b"x"), LayerEntry(path="/b", source=tmp_path / "gone")]
        )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def toolchain() -> Toolchain:
    real = find_paths(ROOT, os.environ)
    return find_or_install((1, 26), Paths(repository=ROOT, cache=real.cache), Reporter(stream=io.StringIO()))


def tiny(monkeypatch: pytest.MonkeyPatch, sources: Path) -> Paths:
    """Return a clone whose only module is the tiny one."""
    module = modules.Module(
        name="m", folder=sources.name, package=".", programs=("m",), summary="test", cgo=False
    )
    monkeypatch.setitem(modules.MODULES_OF, modules.Profile.CONTROL_PLANE, (module,))
    devcluster = sources.parent / "deploy" / "devcluster"
    devcluster.mkdir(parents=True)
    sources.rename(devcluster / sources.name)
    return Paths(repository=sources.parent, cache=sources.parent / "cache")


@pytest.mark.cluster
def test_tools_are_compiled_once_and_again_after_an_edit(
    sources: Path, monkeypatch: pytest.MonkeyPatch, toolchain: Toolchain
) -> None:
    paths = tiny(monkeypatch, sources)
    monkeypatch.setattr(tools, "find_or_install", lambda *_: toolchain)
    main = paths.devcluster / sources.name / "main.go"

    def run() -> tuple[str, Path]:
        log = io.StringIO()
        tools.build_tools(modules.Profile.CONTROL_PLANE, paths, Reporter(stream=log), parallel=1)
        return log.getvalue(), (paths.bin / "m").resolve()

    first_log, first = run()
    assert "built m" in first_log
    assert os.access(first, os.X_OK)
    assert run() == (f"m: cached in {first.parents[1]}\n", first)

    main.write_text("package main\nfunc main() { undefined() }\n")
    with pytest.raises(BuildError, match=r"main\.go:2.*undefined"):
        run()
    assert (paths.bin / "m").resolve() == first

    main.write_text('package main\nfunc main() { println("new") }\n')
    assert run()[1] != first


@pytest.mark.cluster
def test_sources_edited_during_the_build_are_not_published(
    sources: Path, monkeypatch: pytest.MonkeyPatch, toolchain: Toolchain
) -> None:
    paths = tiny(monkeypatch, sources)
    monkeypatch.setattr(tools, "find_or_install", lambda *_: toolchain)
    compile_module = gobuild.GoBuild.run

    def compile_and_edit(
        build: gobuild.GoBuild, output: Path, reporter: Reporter, *, parallel: int | None
    ) -> None:
        compile_module(build, output, reporter, parallel=parallel)
        (build.folder / "data.txt").write_text("edited")

    monkeypatch.setattr(gobuild.GoBuild, "run", compile_and_edit)
    with pytest.raises(BuildError, match="edited while it was compiled"):
        tools.build_tools(modules.Profile.CONTROL_PLANE, paths, Reporter(stream=io.StringIO()), parallel=1)
    assert list(paths.tools.glob("m-*")) == []
