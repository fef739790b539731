"""Whatever goes wrong while an index is worked on, in one line and with an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import torch.distributed as dist
import typer

from .._factories import FactoryError, in_words, users_line
from ..influence import DamagedError, MismatchError, StorageError
from .output import WRONG_USE, fail

DIFFERS, UNUSABLE, UNWRITTEN, STOPPED = 1, 3, 4, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
EXIT_CODES = {
    0: "done",
    DIFFERS: "check: what is stored differs from one backward per sample",
    WRONG_USE: "SPEC, what it gives, an option or the folder is wrong",
    UNUSABLE: "the index is damaged, or was built from something else",
    UNWRITTEN: "a file could not be written; what was finished before is kept",
    STOPPED: "stopped by Ctrl-C; the same build goes on from there",
}


@contextmanager
def refusals(command: str) -> Iterator[None]:
    """Errors leave the command with their code; what the user's code prints goes to stderr."""
    joined = dist.is_available() and dist.is_initialized()  # before this command, which may do so under torchrun
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (MismatchError, DamagedError) as error:
        fail(command, error, UNUSABLE)
    except StorageError as error:
        fail(command, error.strerror, UNWRITTEN)
    except (FactoryError, FileNotFoundError, ImportError) as error:
        fail(command, error)
    except OSError as error:
        fail(command, in_words(error), UNWRITTEN if error.errno in _FULL else WRONG_USE)
    except KeyboardInterrupt:
        fail(command, "stopped", STOPPED)
    except typer.Exit:
        raise
    except SystemExit as error:  # of the user's code, whose exit code would be taken for one of these
        fail(command, in_words(error))
    except Exception as error:
        is_ours = isinstance(error, (TypeError, ValueError)) and users_line(error) is None
        fail(command, error if is_ours else in_words(error))
    finally:
        if dist.is_available() and dist.is_initialized() and not joined:
            dist.destroy_process_group()
