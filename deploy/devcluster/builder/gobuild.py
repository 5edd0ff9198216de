"""Compilation of one Go module into a folder, with the number of finished packages as progress."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .modules import Module, kubernetes_ldflags, version_ldflags
from .process import run_streaming
from .progress import Reporter
from .toolchain import Toolchain

STRIP = ("-s", "-w")  # no symbol table and no DWARF: less than half the size


@dataclass(frozen=True, kw_only=True, slots=True)
class GoBuild:
    """All inputs that determine the output, so that `settings` can be part of the cache key."""

    module: Module
    folder: Path
    toolchain: Toolchain
    tags: tuple[str, ...]
    ldflags: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        """Part of the cache key beside the sources."""
        machine = _go_env(self.toolchain, "GOOS", "GOARCH")
        return (self.toolchain.label, *machine, f"cgo={self.module.cgo}", *self.tags, *self.ldflags)

    def run(self, output: Path, reporter: Reporter, *, parallel: int | None) -> None:
        """Compile into `output`/bin. Raises BuildError with the compiler's last lines."""
        binaries = output / "bin"
        binaries.mkdir(parents=True)
        environ = dict(self.toolchain.environ)
        environ["CGO_ENABLED"] = "1" if self.module.cgo else "0"
        packages = self._count_packages(environ, reporter)
        shown = _PackageCounter(reporter=reporter, total=packages)
        command = [
            str(self.toolchain.go),
            "build",
            "-v",
            "-trimpath",
            "-buildvcs=false",
            f"-tags={','.join(self.tags)}",
        ]
        if parallel is not None:
            command.append(f"-p={parallel}")
        command += [f"-ldflags={' '.join(self.ldflags)}", "-o", f"{binaries}/", self.module.package]
        run_streaming(command, folder=self.folder, environ=environ, on_line=shown.line, on_tick=reporter.tick)
        missing = [name for name in self.module.programs if not (binaries / name).is_file()]
        if missing:
            raise BuildError(f"`{' '.join(command)}` in {self.folder} did not make {', '.join(missing)}")

    def _count_packages(self, environ: dict[str, str], reporter: Reporter) -> int:
        """Return the number of packages of the programs. This call also downloads the modules."""
        packages = 0

        def line(text: str) -> None:
            nonlocal packages
            if text.startswith("go: downloading "):
                reporter.update(detail=f"downloading {text.removeprefix('go: downloading ')}")
            else:
                packages += 1

        command = [
            str(self.toolchain.go),
            "list",
            "-deps",
            f"-tags={','.join(self.tags)}",
            self.module.package,
        ]
        run_streaming(command, folder=self.folder, environ=environ, on_line=line, on_tick=reporter.tick)
        return packages


@dataclass
class _PackageCounter:
    """Progress from the lines of `go build -v`, one import path for each package whose compilation starts."""

    reporter: Reporter
    total: int
    compiled: int = 0

    def line(self, text: str) -> None:
        if " " in text or text.startswith("#"):  # a message, not an import path
            return
        self.compiled += 1
        # The last package's line comes before the linker, which takes a while without output.
        self.reporter.update(
            detail=f"compiling {text}", done=self.compiled, total=max(self.total, self.compiled)
        )


def plan(module: Module, devcluster: Path, toolchain: Toolchain) -> GoBuild:
    """Return the build with the tags and linker flags for this machine."""
    folder = devcluster / module.folder
    tags = module.tags
    if module.wants_seccomp and has_libseccomp_headers():
        tags = (*tags, "seccomp")
    stamp = kubernetes_ldflags(folder) if module.stamp_kubernetes_version else ()
    stamp += version_ldflags(folder, module.stamp_versions)
    return GoBuild(module=module, folder=folder, toolchain=toolchain, tags=tags, ldflags=(*STRIP, *stamp))


def has_libseccomp_headers() -> bool:
    """Return whether runc can be linked with libseccomp.

    pkg-config decides, as it does in runc's own build.
    """
    if shutil.which("pkg-config") is None:
        return False
    return (
        subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False, capture_output=True).returncode
        == 0
    )


def _go_env(toolchain: Toolchain, *names: str) -> tuple[str, ...]:
    answer = subprocess.run(
        [toolchain.go, "env", *names],
        env=toolchain.environ,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(answer.stdout.split())
