"""The command line of build.py."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .errors import BuildError
from .hostimage import build_host_image
from .modules import Profile, Tool
from .paths import Paths, find_paths
from .progress import Reporter, duration
from .tools import build_other_tools, build_tools


def main(arguments: Sequence[str], repository: Path) -> int:
    """Run one subcommand and return the exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)  # ends a running compiler, as on Ctrl-C
    reporter = Reporter()
    started_at = reporter.clock()
    if sys.platform != "linux":
        print(f"error: the development cluster runs on Linux only; this is {sys.platform}", file=sys.stderr)
        return 2
    try:
        _run(options, find_paths(repository, os.environ), reporter)
    except BuildError as error:
        reporter.print_line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        reporter.print_line("interrupted; what was finished stays in the cache")
        return 130
    reporter.print_line(f"done in {duration(reporter.clock() - started_at)}")
    return 0


def _run(options: argparse.Namespace, paths: Paths, reporter: Reporter) -> None:
    match options.what:
        case "tools" if options.tool is not None:
            build_other_tools(Tool(options.tool), paths, reporter, parallel=options.jobs)
        case "tools":
            build_tools(Profile(options.profile), paths, reporter, parallel=options.jobs)
        case "image":
            build_host_image(paths, reporter)
        case "clean":
            _clean(paths, reporter, also_cache=options.cache)


def _clean(paths: Paths, reporter: Reporter, *, also_cache: bool) -> None:
    """Remove the builder's output. Running instances are left to `devcluster down`."""
    for folder in (paths.bin, paths.tool_bin, paths.images, *((paths.cache,) if also_cache else ())):
        if folder.exists():
            shutil.rmtree(folder)
            reporter.print_line(f"removed {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build.py", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    tools = commands.add_parser(
        "tools", help="build a profile's programs into build/devcluster/bin, or a tool into build/tools/bin"
    )
    wanted = tools.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--profile", choices=[each.value for each in Profile])
    wanted.add_argument("--tool", choices=[each.value for each in Tool])
    tools.add_argument(
        "--jobs", type=_positive, help="how many packages to compile at once (default: all cores)"
    )
    commands.add_parser(
        "image", help="make the image of this Python environment, build/devcluster/images/host.tar"
    )
    clean = commands.add_parser("clean", help="remove the built programs and images of this clone")
    clean.add_argument(
        "--cache", action="store_true", help="also remove the cache that all clones of this user share"
    )
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
