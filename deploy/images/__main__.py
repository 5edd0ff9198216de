"""`python -m deploy.images wheels|base|build`: the images, with or without a network."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from deploy.images.base import make_base
from deploy.images.context import (
    IMAGES,
    ROOT,
    Image,
    ImageError,
    collect_wheels,
    default_wheels,
    make_context,
    require_torch,
    torch_among,
)
from deploy.images.tools import Builder, find_builder
from deploy.images.variants import Torch

BUILD = ROOT / "build" / "images"
BASE_TAG = "localhost/zerotrain-base:dev"


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.images", description=__doc__)
    acts = parser.add_subparsers(required=True)
    wheels = acts.add_parser("wheels", help="collect all wheels of an image, for a build without an index")
    wheels.add_argument("image", choices=sorted(IMAGES))
    wheels.add_argument(
        "--output", type=Path, metavar="FOLDER", help="deploy/images/wheels/IMAGE unless given"
    )
    wheels.set_defaults(act=_wheels)
    base = acts.add_parser("base", help="make a base of Debian's Python with mmdebstrap")
    base.add_argument("--output", type=Path, default=BUILD / "base.tar", metavar="FILE")
    base.set_defaults(act=_base)
    build = acts.add_parser("build", help="build an image with buildah or docker, and print its size")
    build.add_argument("image", choices=sorted(IMAGES))
    build.add_argument("--base", help="base image, best by digest; the Dockerfile's unless given")
    build.add_argument("--base-archive", type=Path, metavar="FILE", help="base as a tar (see `base`)")
    build.add_argument(
        "--torch",
        type=Torch,
        choices=[Torch.CUDA, Torch.CPU],
        help="variant that the runtime's image must hold; pip's settings choose it. cuda unless given",
    )
    build.add_argument("--offline", action="store_true", help="collect the wheels first, then use no network")
    build.add_argument("--tag", help="name of the image; localhost/zerotrain-IMAGE:dev unless given")
    build.add_argument("--tool", choices=["auto", "buildah", "docker"], default="auto")
    build.add_argument("--output", type=Path, metavar="FILE", help="write it as a docker-archive, too")
    build.set_defaults(act=_build)
    return parser


def _wheels(options: argparse.Namespace) -> int:
    image = IMAGES[options.image]
    folder = collect_wheels(image, options.output or default_wheels(image))
    count, torch = len(list(folder.glob("*.whl"))), torch_among(folder)
    print(f"{count} wheels and their digests, torch: {torch}: {folder}")
    return 0


def _base(options: argparse.Namespace) -> int:
    archive = make_base(options.output)
    print(f"{archive.stat().st_size / 1e6:.0f} MB: {archive}")
    return 0


def _build(options: argparse.Namespace) -> int:
    image = IMAGES[options.image]
    torch = image.torch(options.torch)
    tag = options.tag or f"localhost/zerotrain-{image.name}:dev"
    builder = find_builder(BUILD / "storage", options.tool)
    if options.base_archive is not None:
        builder.load_base(options.base_archive, BASE_TAG)
        options.base = BASE_TAG
    wheels = collect_wheels(image, BUILD / "wheels" / image.name) if options.offline else None
    build_image(builder, image, torch, tag=tag, base=options.base, wheels=wheels)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        builder.save(tag, options.output)
    check_size(builder, image, torch, tag=tag, base=options.base)
    return 0


def build_image(
    builder: Builder, image: Image, torch: Torch, *, tag: str, base: str | None, wheels: Path | None
) -> None:
    """Build `tag` with this variant of torch; with `wheels`, only from these. Raises ImageError."""
    given = {"BASE": base} if base is not None else {}
    if torch is not Torch.NONE:
        given["TORCH"] = torch.value
    if wheels is not None:
        require_torch(torch, wheels)
        # The wheel is compiled already, so any base with Python can be the build stage.
        given |= {"PIP_ARGS": "--no-index"} | (
            {"BUILD_BASE": base} if base and image.name == "runtime" else {}
        )
    with tempfile.TemporaryDirectory(prefix="zerotrain-image-") as folder:
        context = make_context(Path(folder), image, wheels=wheels)
        builder.build(image.dockerfile, context, tag, given, offline=wheels is not None)


def check_size(builder: Builder, image: Image, torch: Torch, *, tag: str, base: str | None) -> None:
    """Print the size beside the budget. Raises ImageError if the image adds more than that to its base."""
    total, budget = builder.size_bytes(tag), image.budgets[torch]
    known = f"budget {_megabytes(budget)}, torch: {torch}"
    if base is None:
        print(f"{tag}: {_megabytes(total)} with its base ({known}; not checked without --base)")
        return
    added = total - builder.size_bytes(base)
    print(f"{tag}: {_megabytes(total)}, {_megabytes(added)} above its base ({known})")
    if added > budget:
        raise ImageError(
            f"{tag} adds {_megabytes(added)} to its base, {_megabytes(added - budget)} more than it may "
            f"({known}): find what has grown in its /opt/zerotrain, and leave that out or raise the budget "
            "in deploy/images/context.py"
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
