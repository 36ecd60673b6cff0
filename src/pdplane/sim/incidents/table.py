"""All incidents, and the table that a person reads."""

from __future__ import annotations

import sys

from .i04 import I04
from .i05 import I05
from .i06 import I06
from .i07 import I07
from .i12 import I12
from .i23 import I23
from .i24 import I24
from .incident import Incident, Verdict, judge

INCIDENTS: dict[str, Incident] = {one.number: one for one in (I04, I05, I06, I07, I12, I23, I24)}


def incidents_main(numbers: list[str]) -> int:
    """The table of these incidents, or of all. 0: each breaks its rule with the hole, and none without; 1: one does
    not; 2: there is no such incident."""
    unknown = [number for number in numbers if number not in INCIDENTS]
    if unknown:
        print(f"there is no incident {unknown[0]}; choose among {', '.join(INCIDENTS)}", file=sys.stderr)
        return 2
    verdicts = [judge(INCIDENTS[number]) for number in numbers or INCIDENTS]
    print("\n".join(line for verdict in verdicts for line in _lines(verdict)))
    return 0 if all(verdict.as_it_should_be for verdict in verdicts) else 1


def _lines(verdict: Verdict) -> list[str]:
    incident, ours, theirs = verdict.incident, verdict.ours, verdict.theirs
    lines = [f"{incident.number}  {incident.story}"]
    lines.append(f"  with the hole  {theirs.violation or 'NOT SEEN, and must break ' + incident.breaks}")
    ends = ", ".join(f"{code} {count}" for code, count in ours.verdicts.items())
    lines.append(f"  our rules      {'VIOLATION ' + ours.violation if ours.violation else 'all held; ends: ' + ends}")
    lines += [f"  NOT REACHED    {name}" for name in verdict.missed]
    return lines
