"""A Python that stays: what is sent to it, and the loop that it runs.

In: cells as `token, length, text` on a descriptor of its own. Out: `token begun` and `token code` for each on another one; output as the
code wrote it.
Waits for the next cell. The interpreter is forked from the agent, so what the agent has loaded is there.
"""

from __future__ import annotations

import os
import sys

from . import jobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start

TOKEN, HEAD = 32, 40
STATUS = 3
INTERRUPTED = 130


class Python:
    """What `sessions.Session` has to know of Python."""

    def become(self) -> None:
        """In the child: serves cells until the agent closes its end."""
        control = os.dup(0)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.set_inheritable(STATUS, False)
        jobs.prepare_interpreter()
        _Loop(control).serve()

    def opening(self, token: bytes) -> bytes:
        """An empty cell: its report says that the loop runs."""
        return self.cell(token, "")

    def cell(self, token: bytes, code: str) -> bytes:
        """A cell as it travels."""
        raw = code.encode("utf-8", "surrogateescape")
        return token + b"%08x" % len(raw) + raw

    def sync(self, token: bytes) -> bytes:
        """Nothing: the loop itself ignores Ctrl-C, so one that comes late does no harm."""
        return b""


class _Loop:
    """The interpreter's side."""

    def __init__(self, control: int) -> None:
        # Loaded here and not when they are needed: then memory or descriptors may have run out.
        import __future__

        import _ast
        import linecache
        import traceback

        self.control = control
        self.pid = os.getpid()
        self.count = 0
        self.ast: Any = _ast
        self.sources = linecache.cache
        self.print_exception: Any = traceback.print_exception
        self.futures = 0
        for name in __future__.all_feature_names:
            self.futures |= getattr(__future__, name).compiler_flag
        self.flags = 0
        main = type(sys)("__main__")
        main.__dict__["__builtins__"] = __builtins__
        self.names = main.__dict__
        sys.modules["__main__"] = main
        sys.argv = [""]
        sys.path.insert(0, "")
        self.handler: Any = signal.signal(signal.SIGINT, _quiet)

    def serve(self) -> None:
        """For ever."""
        while True:
            head = self._take(HEAD)
            code = self._take(int(head[TOKEN:], 16)).decode("utf-8", "surrogateescape")
            self.count += bool(code)
            status = self._guarded(head[:TOKEN], code)
            if os.getpid() != self.pid:
                # A fork that the cell made and did not end has come back here.
                jobs.leave(status)
            os.write(STATUS, head[:TOKEN] + b" %d\n" % status)

    def _take(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = os.read(self.control, size - len(found))
            if not more:
                os._exit(0)
            found += more
        return found

    def _guarded(self, token: bytes, code: str) -> int:
        """Runs a cell with Ctrl-C let in, as the code before it wished; between cells Ctrl-C is ignored."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self.handler is None else self.handler)
            os.write(STATUS, token + b" begun\n")
            status = self._run(code)
        except BaseException as error:  # what came while an error was told, or a stream that the code broke
            os.write(2, f"{type(error).__name__} while the cell ended\n".encode())
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        while True:
            try:
                self.handler = signal.signal(signal.SIGINT, _quiet)
                return status
            except KeyboardInterrupt:
                status = INTERRUPTED

    def _run(self, code: str) -> int:
        name = f"<cell {self.count}>"
        self.sources[name] = (len(code), None, code.splitlines(True), name)
        status = 0
        try:
            self._execute(code, name)
        except SystemExit as error:
            status = jobs.exit_code(error)
        except BaseException as error:
            self._tell(error)
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return status

    def _execute(self, code: str, name: str) -> None:
        ast = self.ast
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | self.flags, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        first = compile(tree, name, "exec", self.flags, dont_inherit=True)
        self.flags |= first.co_flags & self.futures
        exec(first, self.names)
        if last is not None:
            # `single` hands the value to sys.displayhook, as a prompt does.
            exec(compile(ast.Interactive([last]), name, "single", self.flags, dont_inherit=True), self.names)

    def _tell(self, error: BaseException) -> None:
        """Prints an error with the frames of cells and what they call, without ours."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, trace)
        else:
            self.print_exception(type(error), error, trace)


def _quiet(number: int, frame: Any) -> None:
    """Ctrl-C between cells."""
