"""A program that runs a served thread without HTTP, until it is killed.

python serve_app.py FOLDER PLAN     prints `working` when its tool runs, or `asked` when the run waits for a person
"""

import asyncio
import sys
from pathlib import Path

from support.served_threads import App, Held, settle


async def main(folder: Path, plan: str) -> None:
    held = Held()
    app = App(folder, tools=[held.tool])
    await app.threads.start()
    thread = app.thread()
    await thread.say(plan)
    resting = asyncio.ensure_future(settle(thread))
    working = asyncio.ensure_future(held.has_begun.wait())
    await asyncio.wait({resting, working}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        while '["choose"' in plan and not (thread.live and thread.live.questions):
            await asyncio.sleep(0.001)
    print("working" if working.done() else "asked", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
