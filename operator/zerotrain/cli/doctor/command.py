"""`zerotrain doctor`: check this machine, or a node of the cluster from inside a pod."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from zerotrain.cli.doctor.finding import Finding, State, to_records, worst
from zerotrain.cli.errors import CliError
from zerotrain.cli.errors import show as show_error
from zerotrain.cli.options import Output, OutputOption, Target, cluster_command
from zerotrain.cli.output import show_record, show_table

EXAMPLE = "Example: zerotrain doctor --pod --image registry.example.org/zerotrain:1"
FAILED = 1
"""Exit code when a check failed."""
STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.SKIP: "dim"}


Folder = Annotated[
    Path | None,
    typer.Option(help="Folder for spilled state, whose drive is measured; a temporary folder unless given."),
]
InPods = Annotated[
    bool, typer.Option("--pod", help="Run the checks inside the cluster, in two short-lived restricted pods.")
]
Image = Annotated[str | None, typer.Option(help="With --pod: the image of your workers.")]
Node = Annotated[str | None, typer.Option(help="With --pod: the node to check; any node unless given.")]
StorageClass = Annotated[
    str | None, typer.Option(help="With --pod: the volume to measure, as spec.nvme.storageClassName.")
]
Size = Annotated[str, typer.Option(help="With --pod: size of that volume; the check writes 512 MiB.")]
Gpus = Annotated[int, typer.Option(min=0, help="With --pod: number of GPUs to request.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="With --pod: seconds to wait for the pods.")]
Ports = Annotated[list[int] | None, typer.Option(hidden=True)]
Seconds = Annotated[float, typer.Option(hidden=True)]
Targets = Annotated[list[str] | None, typer.Option(hidden=True)]
Flag = Annotated[bool, typer.Option(hidden=True)]


@cluster_command
def doctor(
    target: Target,
    folder: Folder = None,
    pod: InPods = False,
    image: Image = None,
    node: Node = None,
    storage_class: StorageClass = None,
    size: Size = "2Gi",
    gpus: Gpus = 0,
    timeout: Timeout = 300.0,
    output: OutputOption = Output.TABLE,
    listen: Ports = None,
    listen_seconds: Seconds = 60.0,
    allowed: Targets = None,
    denied: Targets = None,
    denied_api_server: Flag = False,
) -> None:
    """Check what a job needs: drive, I/O engine, seccomp, page-locking, huge pages, NUMA, GPU, NCCL, DNS;
    with --pod also whether the cluster enforces NetworkPolicies.

    The exit code is 1 if a check failed. A warning names what is slower or less protected than it could be.
    """
    if pod:
        found = _in_pods(target, image, (node, storage_class, size, gpus, timeout))
    elif allowed or denied:
        found = _reach(allowed or [], denied or [], with_api_server=denied_api_server)
    elif listen:
        _listening(folder, listen, listen_seconds, output)
        return
    else:
        found = local(folder)
    _show(found, output)
    if worst(found) is State.FAIL:
        raise typer.Exit(FAILED)


def local(folder: Path | None) -> list[Finding]:
    """Run every check of this machine, which takes about ten seconds."""
    from zerotrain.cli.doctor import accelerators, drive, machine, network

    with tempfile.TemporaryDirectory(prefix="zerotrain-doctor-") as scratch:
        drives = drive.drive(folder if folder is not None else Path(scratch))
    return [
        *drives,
        *machine.kernel(),
        *machine.memory(),
        *machine.processor(),
        *accelerators.narrow_products(),
        *accelerators.gpus(),
        *accelerators.nccl(),
        *network.dns(),
    ]


def _listening(folder: Path | None, ports: Sequence[int], seconds: float, output: Output) -> None:
    """Run and print the local checks. The ports stay open for the other pod until `seconds` after that."""
    from zerotrain.cli.doctor.network import listen

    servers = listen(ports, seconds=seconds)
    _show(local(folder), output)
    time.sleep(seconds)
    for server in servers:
        server.close()


def _reach(allowed: Sequence[str], denied: Sequence[str], *, with_api_server: bool) -> list[Finding]:
    from zerotrain.cli.doctor.network import reach

    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    server = f"{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}" if host else ""
    return reach(allowed, [*denied, *([server] if with_api_server and server else [])])


def _in_pods(
    target: Target,
    image: str | None,
    requested: tuple[str | None, str | None, str, int, float],
) -> list[Finding]:
    from zerotrain.cli.doctor.pods import Examination, PodRequest

    if image is None:
        raise CliError("--pod needs --image: the image of your workers", next_step=EXAMPLE)
    node, storage_class, size, gpus, timeout_s = requested
    console = Console(stderr=True, highlight=False)
    examination = Examination(
        target.client,
        PodRequest(
            image=image, node=node, storage_class=storage_class, size=size, gpus=gpus, timeout_s=timeout_s
        ),
        on_progress=lambda text: console.print(text, markup=False),
    )
    try:
        found = examination.run()
    except BaseException:
        # The error is the answer; what could not be deleted is shown as well.
        try:
            examination.clean_up()
        except CliError as left:
            show_error(left)
        raise
    examination.clean_up()
    return found


def _show(found: Sequence[Finding], output: Output) -> None:
    if output is Output.JSON:
        print(json.dumps(to_records(found)), flush=True)  # one line, as the parser of the pods' log expects
        return
    if output is Output.YAML:
        show_record(to_records(found), output)
        return
    console = Console(highlight=False)
    rows, last = [], ""
    for item in found:
        group = item.group if item.group != last else ""
        last = item.group
        rows.append((group, item.name, Text.styled(item.state, STYLES[item.state]), item.value, item.note))
    show_table(("group", "check", "", "found", "note"), rows, console)
    counts = {state: sum(item.state is state for item in found) for state in State}
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    console.print(text, style=STYLES[worst(found)])
