"""The list of the database files that this process has open."""

import threading
from pathlib import Path

from handrail.journal.sqlite import OpenFile
from support import PATIENCE


def test_a_file_can_be_closed_while_another_one_is_examined(tmp_path: Path) -> None:
    """Closing a file does not block while another one is examined in the same thread, as when garbage collection closes a forgotten journal."""
    for name in ("forgotten", "opened"):
        (tmp_path / name).touch()
    forgotten = OpenFile(str(tmp_path / "forgotten"), lambda: None)
    opening = threading.Thread(
        target=lambda: OpenFile(str(tmp_path / "opened"), forgotten.close).close(), daemon=True
    )
    opening.start()
    opening.join(PATIENCE)
    assert not opening.is_alive()
