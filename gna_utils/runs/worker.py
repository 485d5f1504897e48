"""The process that executes one notebook: ``python -m gna_utils.runs.worker REQUEST.json``, started by
``execute``.

It writes one JSON event a line to its standard output: ``cell`` at each start, ``failed`` with the cause,
``done``. It ends, with its kernel, as soon as its standard input closes, so that no kernel outlives ``gna``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import nbformat
import papermill
import psutil
from jupyter_client import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from .project import write_json

FACTS_TAG = "gna-facts"
_FACTS_SOURCE = "from gna_utils.runs.records import write_kernel_facts\nwrite_kernel_facts()"


class _KernelManager(AsyncKernelManager):
    """Remembers how the kernel ended, which tells a crash from a kill."""

    exit_status: int | None = None

    async def is_alive(self) -> bool:
        alive = await super().is_alive()
        if not alive and self.has_kernel:
            _KernelManager.exit_status = await self.provisioner.poll()
        return alive


def main(request_file: str) -> int:
    events = _take_stdout()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    failure = _execute(request, events)
    peak = _peak_of_kernel()
    if failure is None:
        _emit(events, event="done", peak_memory_bytes=peak)
        return 0
    _emit(events, event="failed", peak_memory_bytes=peak, **failure)
    return 1


def _execute(request: dict[str, Any], events: TextIO) -> dict[str, Any] | None:
    """Run the notebook; the cause of its failure, or None."""
    output = Path(request["output"])
    # Notebooks of nbformat 4.4 have no cell ids, and nbformat complains about them when it writes 4.5.
    notebook = nbformat.read(request["notebook"], as_version=4)
    facts = nbformat.v4.new_code_cell(_FACTS_SOURCE, metadata={"tags": [FACTS_TAG]})
    notebook.cells.append(facts)

    def on_cell_start(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            _emit(
                events, event="cell", index=cell_index, source=cell.source, tags=cell.metadata.get("tags", [])
            )

    try:
        papermill.execute_notebook(
            notebook,
            str(output),
            parameters=request["given"],
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=request["cwd"],
            execution_timeout=request["timeout"],
            kernel_manager_class=_KernelManager,
            on_cell_start=on_cell_start,
        )
    except PapermillExecutionError as error:
        logging.error("%s\n%s", error, "\n".join(error.traceback))
        return {"cause": "error", "ename": error.ename, "evalue": error.evalue}
    except CellTimeoutError as error:
        logging.error("%s", error)
        return {"cause": "timeout"}
    except DeadKernelError as error:
        logging.error("%s", error)
        return {"cause": "died", "code": _KernelManager.exit_status}
    except Exception as error:
        logging.exception("the notebook could not be executed")
        return {"cause": "internal", "ename": type(error).__name__, "evalue": str(error)}
    finally:
        if output.is_file():
            _tidy(output, request)
    return None


def _tidy(output: Path, request: dict[str, Any]) -> None:
    """Take our own last cell out again, and paths of this machine out of the metadata."""
    notebook = json.loads(output.read_text(encoding="utf-8"))
    notebook["cells"] = [c for c in notebook["cells"] if FACTS_TAG not in c["metadata"].get("tags", [])]
    notes = notebook["metadata"].get("papermill", {})
    notes.update(input_path=Path(request["notebook"]).name, output_path=output.name)
    write_json(output, notebook)


def _take_stdout() -> TextIO:
    """Keep standard output for events; whatever else prints there, kernels included, goes to the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _emit(events: TextIO, **event: Any) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _die_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, makes the interpreter abort at the end of a good run.
    while os.read(0, 1024):
        pass
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


def _peak_of_kernel() -> int | None:
    """Largest resident size among the kernel processes that ended, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
