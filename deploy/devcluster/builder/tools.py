"""`build.py tools`: builds and links programs.

Those of a cluster go into build/devcluster/bin, other tools into build/tools/bin.
"""

from pathlib import Path

from .cache import build_once, content_key, link, remove_unused
from .errors import BuildError
from .gobuild import GoBuild, plan
from .modules import MODULES_OF, MODULES_OF_TOOL, PAUSE, Module, Profile, Tool, required_go
from .paths import Paths
from .pause_image import write_pause_image
from .progress import Reporter
from .toolchain import find_or_install


def build_tools(profile: Profile, paths: Paths, reporter: Reporter, *, parallel: int | None) -> None:
    """Build the modules of the profile that the cache does not hold, one after the other."""
    modules = MODULES_OF[profile]
    _build(modules, paths.bin, paths, reporter, parallel=parallel)
    if PAUSE in modules:
        write_pause_image(paths.bin / "pause", paths.images / "pause.tar")


def build_other_tools(tool: Tool, paths: Paths, reporter: Reporter, *, parallel: int | None) -> None:
    """Build programs that are part of no cluster, unless the cache holds them."""
    _build(MODULES_OF_TOOL[tool], paths.tool_bin, paths, reporter, parallel=parallel)


def _build(
    modules: tuple[Module, ...], binaries: Path, paths: Paths, reporter: Reporter, *, parallel: int | None
) -> None:
    required = max(required_go(paths.devcluster / module.folder) for module in modules)
    toolchain = find_or_install(required, paths, reporter)
    entries = []
    for index, module in enumerate(modules):
        build = plan(module, paths.devcluster, toolchain)
        upcoming = tuple(later.name for later in modules[index + 1 :])
        entry = _provide(build, paths, reporter, upcoming=upcoming, parallel=parallel)
        for program in sorted((entry / "bin").iterdir()):
            link(program, binaries / program.name)
        entries.append(entry)
    for removed in remove_unused(paths.tools, keep=entries):
        reporter.print_line(f"removed {removed}, unused for a long time")


def _provide(
    build: GoBuild, paths: Paths, reporter: Reporter, *, upcoming: tuple[str, ...], parallel: int | None
) -> Path:
    module = build.module
    key = content_key(build.folder, build.settings)
    entry = paths.tools / f"{module.name}-{key}"

    def compile_into(folder: Path) -> None:
        reporter.start(f"building {module.name}: {module.summary}", upcoming=upcoming)
        build.run(folder, reporter, parallel=parallel)
        if content_key(build.folder, build.settings) != key:
            raise BuildError(f"{build.folder} was edited while it was compiled; run the same command again")
        reporter.finish(f"built {', '.join(module.programs)}")

    build_once(
        entry,
        compile_into,
        on_wait=lambda: reporter.print_line(f"{module.name}: another process is building it; waiting"),
        on_found=lambda: reporter.print_line(f"{module.name}: cached in {entry}"),
    )
    return entry
