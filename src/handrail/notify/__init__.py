"""Notifications: the people who may answer a question are told that it waits.

A notification names the app and the tool, and has a link to the question on the server's page. It has no arguments, and it gives nobody
a right: whoever follows the link signs in, and answers only what they may answer. `handrail.serve.notifier` sends them.
"""

from handrail.notify.address import Address
from handrail.notify.settings import Notify

__all__ = ["Address", "Notify"]
