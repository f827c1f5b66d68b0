"""`python -m verl_mux.launcher.keep_exit_code FILE MODULE ARGUMENTS...`: runs MODULE as `python -m MODULE` would, and leaves its
exit code in FILE.

Runs in a job's driver and a filler; started by run_processes.py. The kernel gives the exit code of a process to its parent only.
A launcher that was killed and started again is no parent, and reads the code from FILE. A process that is killed leaves no file.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    path, driver = Path(file).absolute(), os.getpid()
    sys.argv = [module, *arguments]
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        raise
    finally:
        if os.getpid() == driver:  # not in a process that it forked
            half = path.with_suffix(".half")
            with contextlib.suppress(OSError):  # a full disk does not change how the job ended
                half.write_text(f"{0 if code is None else code if isinstance(code, int) else 1}\n")
                half.replace(path)


if __name__ == "__main__":
    main()
