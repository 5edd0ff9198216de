"""One line for every attack: the API server's answers, a neighbour's waiting time, the operator's memory."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    answers: str
    """Summary of the API server's answers."""

    waited_s: float
    """Seconds from posting a job in another namespace to its last pod."""

    resident: int
    """Resident bytes of the operator after the attack."""


@dataclass
class Report:
    """A report that is printed at the end of a file, whether or not its tests passed."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def text(self) -> str:
        if not self.rows:
            return ""
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.title}: {len(self.rows)} attacks; neighbour's pods after s, operator's MiB, answer"]
        lines += [
            f"  {row.name:<{width}} {row.waited_s:6.2f} {row.resident / MIB:6.0f}  {row.answers}"
            for row in self.rows
        ]
        waits = sorted(row.waited_s for row in self.rows)
        lines.append(
            f"  neighbour waited {waits[len(waits) // 2]:.2f} s in the middle, {waits[-1]:.2f} s at most"
        )
        return "\n".join(lines)


def summed(answers: list[str]) -> str:
    """Return a summary such as `3 of 4 accepted; 422 ...`."""
    taken = sum(answer == "accepted" for answer in answers)
    refused = list(dict.fromkeys(answer for answer in answers if answer != "accepted"))
    return "; ".join([f"{taken} of {len(answers)} accepted", *refused[:2]])
