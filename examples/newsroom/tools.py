"""The functions of the newsroom's workers. Only those that a worker lists can be reached by it."""

from handrail import WorkerContext, tool


@tool(effect="pure")
def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def publish(text: str) -> str:
    """Publish a text for everybody to read."""
    return f"published: {text}"


@tool(effect="idempotent", capabilities={"worker"})
async def review(text: str, context: WorkerContext) -> list[str]:
    """Let the critic look at a text; gives its remarks."""
    verdict = await context.call_worker("critic", text)
    print(f"   critic: {verdict}")
    return verdict["remarks"]
