"""`ServedApp`, also called `asgi`: the server as an ASGI app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from handrail.errors import DefinitionError
from handrail.journal.protocol import Journal
from handrail.serve.feed import Streams
from handrail.serve.inbox import Inbox
from handrail.serve.lifespan import Lifespan
from handrail.serve.limits import Limits
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import AccessLog, GuardMiddleware
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from handrail.serve.principals import Authenticate, Principals
from handrail.serve.refusals import exception_handlers
from handrail.serve.routes import Routes
from handrail.serve.sources import Source
from handrail.serve.thread import Submit
from handrail.serve.threads import Threads

log = logging.getLogger("handrail.serve")


class ServedApp:
    """An ASGI app that serves `source`, with AG-UI at `/agent` and the page at `/`. Exported as `asgi`.

    Runs are recorded in `journal`. On startup, the app resumes the runs that an earlier process left unfinished, except
    those that wait for an answer. A run that waits for an answer is parked after `park_after` seconds. On shutdown, the
    app parks its runs. A run that is still working after `grace` seconds is cut off. `renderers` is the path of a script
    with renderers for the page. `hosts` are additional host names that the app answers to, and `origins` are additional
    origins whose pages may use it. `prefix` is the path below which browsers reach the app, such as `/agents`, if a proxy adds it; an
    app that is mounted in another one knows it. `access_log` is a file that gets a line of JSON for every HTTP request. With `submit`,
    workers execute the new runs, and this process shows them; this needs a journal in PostgreSQL.

    Requests are authenticated by `authenticate`, by the users in `people`, or by `token`. Without any of these, the
    page is opened with a link that works once. The app logs a link when an ASGI server starts it, and a new one whenever
    one has been used. Only the page's files, sign-in and `/health` need no authentication.

    Raises `DefinitionError` if `oidc` is given without users or together with `authenticate`, if `submit` is given and
    the journal is not in PostgreSQL, if `token` is too short, can't be sent in a header, or is given together with
    users or `authenticate`, if `prefix` is not a path, or if the access log can't be opened.
    """

    def __init__(
        self,
        source: Source,
        *,
        journal: Journal,
        authenticate: Authenticate | None = None,
        people: People | None = None,
        oidc: OidcProvider | None = None,
        token: str | None = None,
        renderers: Path | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        prefix: str = "",
        limits: Limits | None = None,
        access_log: Path | None = None,
        submit: Submit | None = None,
        park_after: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        if submit is not None and journal.broadcasts is None:
            raise DefinitionError(
                "a server can show what workers do only if the journal is in PostgreSQL, and this one is not. "
                "Use a journal in PostgreSQL (--journal postgresql://…), or leave out `submit`."
            )
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.people = people or People()
        self.principals = principals = Principals(
            self.people, key=journal.key, token=token, authenticate=authenticate, limits=self.limits
        )
        self.threads = Threads(
            source,
            journal,
            park_after=park_after,
            ended=self.metrics.end_leg,
            voters=principals.who_may_vote,
            may_run=principals.may_run,
            submit=submit,
        )
        self.inbox = Inbox(self.threads, principals)
        self.streams = Streams(self.limits, self.metrics)
        self._grace = grace
        self._logs_link = token is None
        self._lifespan = Lifespan(self._start, self._stop, self._offer_link)
        if oidc is not None and not principals.has_people:
            raise DefinitionError(
                "OpenID Connect needs users, and can't be used together with `authenticate`. Add a user with "
                "`handrail users add NAME`, or leave `authenticate` out."
            )
        self.routes = routes = Routes(
            self.threads,
            principals=principals,
            streams=self.streams,
            metrics=self.metrics,
            limits=self.limits,
            renderers=renderers,
            inbox=self.inbox,
            has_oidc=oidc is not None,
        )
        app = Starlette(
            routes=[*routes.list(), *(() if oidc is None else oidc.routes(principals))],
            lifespan=self.lifespan,
            exception_handlers=exception_handlers(self.metrics.refuse),
        )
        app.router.redirect_slashes = False
        self._guard = GuardMiddleware(
            self._lifespan.wrap(app),
            principals=principals,
            routes=app.routes,
            metrics=self.metrics,
            limits=self.limits,
            hosts=hosts,
            origins=origins,
            prefix=prefix,
            stopping=lambda: self.threads.stopping,
            access=None if access_log is None else AccessLog(access_log),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Start the app, and stop it at the end of the block, as an ASGI server does.

        Pass it to an app that this one is mounted in: `Starlette(routes=[Mount("/desk", desk)], lifespan=desk.lifespan)`.
        An app that is not started refuses every request.
        """
        return self._lifespan.run()

    async def start(self) -> None:
        """Resume the runs that an earlier process left unfinished, and count the votes that it did not count.

        Runs that wait for an answer stay parked, unless the votes decide their question.
        """
        await self._lifespan.start()

    def running(self) -> int:
        """Return the number of runs that this process has in memory, including those that wait for an answer."""
        return len(self.threads.running())

    async def stop(self) -> None:
        """Accept no new work, park every run, and end every stream. Calling it again has no further effect."""
        await self._lifespan.stop()

    async def _start(self) -> None:
        await self.threads.start()
        await self.inbox.count_all()

    async def _stop(self) -> None:
        await self.threads.stop(self._grace)
        await asyncio.sleep(0.05)  # feeds wake their readers in batches, so wait for the last batch
        self.streams.close()

    def _offer_link(self) -> None:
        if self._logs_link and self.principals.has_links:
            self.principals.link_used = self._log_link
            self._log_link()

    def _log_link(self) -> None:
        log.warning(
            "to open the page of %r, append this to its address, which ends in a slash (it works once): #link=%s",
            self.threads.source.name,
            self.principals.new_link(),
        )


asgi = ServedApp
