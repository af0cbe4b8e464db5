"""A program that hands one message to apprise. Its input is JSON with `url`, `title` and `body`; its exit code says what came of it.

It is a process of its own, so that a receiver that hangs or sends without end costs no more than this process, and so that nothing that
apprise or its plugins log, which may contain secrets, gets into the server's log. It follows no redirects.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

ARRIVED, FAILED, NO_APPRISE, NO_SUCH_URL = 0, 1, 3, 4
_MOST_SECONDS = 60
"""Seconds after which it ends even if the process that started it is gone."""
_MOST_MEMORY = 2 * 1024**3


def main() -> int:
    signal.alarm(_MOST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    logging.disable(logging.CRITICAL)
    given = json.load(sys.stdin)
    try:
        import apprise
    except ModuleNotFoundError:
        return NO_APPRISE
    asset = apprise.AppriseAsset(http_redirects=False, async_mode=False)
    receiver: Any = apprise.Apprise.instantiate(given["url"], asset=asset)  # pyright: ignore[reportUnknownMemberType]  # apprise does not say what the dict contains
    if receiver is None:
        return NO_SUCH_URL
    if not given["body"]:
        return ARRIVED
    arrived = receiver.notify(body=given["body"], title=given["title"], body_format=apprise.NotifyFormat.TEXT)
    return ARRIVED if arrived else FAILED


if __name__ == "__main__":
    sys.exit(main())
