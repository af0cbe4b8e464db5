"""`python -m handrail.testing.simulation module:scenario`: crash a scenario at every point and report what broke."""

from __future__ import annotations

import argparse
import importlib
import sys

from handrail.errors import DefinitionError
from handrail.testing.simulation import Scenario, simulate


def scenario_named(name: str) -> Scenario:
    """Import and return the scenario named `module:name`. The current folder is searched first.

    Raises `DefinitionError` if the name has no colon or the module has no such scenario, and `ImportError` if the
    module can't be imported.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise DefinitionError(f"{name!r} does not name a scenario. Write module:scenario.")
    sys.path.insert(0, "")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, Scenario):
        raise DefinitionError(
            f"{attribute!r} in {module!r} is not a Scenario. Define one at the top level of the module."
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m handrail.testing.simulation",
        description=__doc__.partition(": ")[2] if __doc__ else "",
    )
    parser.add_argument("scenario", help="module:name of a Scenario")
    parser.add_argument("--write-every", type=int, default=1, help="crash only at every Nth journal write")
    parser.add_argument(
        "--step-every", type=int, default=1, help="crash only at every Nth step of the event loop"
    )
    parser.add_argument(
        "--overtaken-every",
        type=int,
        default=1,
        help="let the process be overtaken at every Nth write; 0 for never",
    )
    parser.add_argument(
        "--parked-every", type=int, default=0, help="park the run by force at every Nth step; 0 for never"
    )
    parser.add_argument("--again", action="store_true", help="crash the restarted process as well")
    parser.add_argument(
        "--connected", action="store_true", help="a person answers at once, so nothing is parked"
    )
    parser.add_argument("--at", help="try only this point, named as in a report, such as 'before write 12'")
    parser.add_argument("--jobs", type=int, default=1, help="how many points are tried at once")
    parser.add_argument("--journal", help="postgresql://… to record the run there, and not in SQLite files")
    options = vars(parser.parse_args(arguments))
    report = simulate(scenario_named(options.pop("scenario")), **options)
    print(report)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
